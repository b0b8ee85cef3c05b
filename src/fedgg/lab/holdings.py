"""Who has which training examples: what clients train on, what they keep back to test on, what the server keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgg.core.seeds import stream
from fedgg.data.partition import Partition
from fedgg.errors import UserError
from fedgg.lab.config import Experiment

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Population:
    """The clients that hold examples, which are those that can be drawn."""

    clients: int
    examples: int  # all of theirs


@dataclass(frozen=True, eq=False)
class Holdings:
    """Positions in the training set, each in one place only; nothing of it is in the test set."""

    clients: list[Positions]
    held_out: list[Positions]
    proxy: Positions


def holdings(experiment: Experiment, split: Partition) -> Holdings:
    owned, proxy = _without_proxy(experiment, split)
    clients, held_out = _hold_out(experiment, owned)
    return Holdings(clients, held_out, proxy)


def _without_proxy(experiment: Experiment, split: Partition) -> tuple[list[Positions], Positions]:
    """The split less the server's examples, drawn from all clients alike but for those that have no more to spare."""
    wanted = experiment.data.proxy
    if not wanted:
        return list(split.indices), np.empty(0, np.int64)
    owners = np.repeat(np.arange(len(split.indices)), split.sizes)
    examples = np.concatenate(split.indices)
    spare = split.sizes - max(experiment.split.min_examples, 1)
    taken: list[int] = []
    for place in stream(experiment.seed, "proxy").permutation(len(examples)):
        if spare[owners[place]] > 0:
            spare[owners[place]] -= 1
            taken.append(int(examples[place]))
        if len(taken) == wanted:
            break
    if len(taken) < wanted:
        raise UserError(
            f"data.proxy = {wanted} is more than the {len(taken)} examples clients can spare "
            f"(split.min_examples = {experiment.split.min_examples}): take fewer"
        )
    proxy = np.sort(np.array(taken, dtype=np.int64))
    return [own[~np.isin(own, proxy)] for own in split.indices], proxy


def _hold_out(experiment: Experiment, owned: Sequence[Positions]) -> tuple[list[Positions], list[Positions]]:
    """Each client's training examples, and those it keeps back (at least one where it has two or more)."""
    share = experiment.data.holdout
    if share == 0:
        return list(owned), [np.empty(0, np.int64)] * len(owned)
    train, kept = [], []
    for client, own in enumerate(owned):
        count = min(max(round(share * len(own)), 1), len(own) - 1) if len(own) > 1 else 0
        order = stream(experiment.seed, "holdout", client).permutation(len(own))
        kept.append(np.sort(own[order[:count]]))
        train.append(np.sort(own[order[count:]]))
    return train, kept
