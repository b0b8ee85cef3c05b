"""A federation ready to run: which client holds which examples, where the data come from, model, algorithm, engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedgg.core.algorithm import Algorithm
from fedgg.core.model import Net
from fedgg.core.sampling import Work, stream
from fedgg.data.client_batches import Feed
from fedgg.data.dataset import Dataset
from fedgg.data.partition import Partition
from fedgg.errors import UserError
from fedgg.lab.aggregation import PLAIN_AGGREGATION, Aggregation
from fedgg.lab.config import Experiment
from fedgg.lab.engine_choice import Choice

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


Keeper = Literal["here", "nodes"]


class Origin(Protocol):
    """As much as this process knows: everything, or, where clients have machines of their own, what they say."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def labels_are_words(self) -> bool: ...
    @property
    def client_names(self) -> tuple[str, ...] | None:
        """By client, where the data give them names and the split is theirs."""

    @property
    def fingerprint(self) -> str:
        """A hash of the data, so that a resumed run notices others."""

    @property
    def keeper(self) -> Keeper:
        """Who holds what clients keep between rounds: this run's folder, or nodes of their own."""

    def split_hash(self) -> str: ...
    def described(self) -> dict[str, Any]:
        """What partition.json says."""

    def positions(self) -> dict[str, NDArray[np.int64]]:
        """What partition.npz holds."""


@dataclass(frozen=True, eq=False)
class WholeData:
    """A data set and its split, both in this process."""

    dataset: Dataset
    partition: Partition
    proxy: NDArray[np.int64]  # what the server took out of the split
    keeper: Keeper = "here"

    @property
    def name(self) -> str:
        return self.dataset.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dataset.shape

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    @property
    def labels_are_words(self) -> bool:
        return self.dataset.words

    @property
    def client_names(self) -> tuple[str, ...] | None:
        return names_of(self.partition, self.dataset)

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    def split_hash(self) -> str:
        return self.partition.hash()

    def described(self) -> dict[str, Any]:
        return described_split(self.partition, self.dataset) | self._described_proxy()

    def positions(self) -> dict[str, NDArray[np.int64]]:
        split = self.partition
        return {"examples": np.concatenate(split.indices), "sizes": split.sizes, "proxy": self.proxy}

    def _described_proxy(self) -> dict[str, Any]:
        """How many of each class the server has, where it has any."""
        labels = self.dataset.y_train.cpu()[torch.from_numpy(self.proxy)]
        return {"proxy": labels.bincount(minlength=len(self.classes)).tolist()} if len(self.proxy) else {}


def names_of(split: Partition, dataset: Dataset) -> tuple[str, ...] | None:
    """The clients' names; those of another split than the data's own have none."""
    return dataset.client_names if split.scheme == "given" else None


def described_split(split: Partition, dataset: Dataset) -> dict[str, Any]:
    """Who holds how many of which class."""
    counts = split.counts(dataset.y_train.cpu().numpy(), len(dataset.classes))
    names = names_of(split, dataset)
    return {
        "scheme": split.scheme,
        "hash": split.hash(),
        "classes": list(dataset.classes),
        "counts": counts.tolist(),
        **({} if names is None else {"names": list(names)}),
    }


@dataclass(frozen=True, eq=False)
class Federation:
    """A server, its clients and their data, ready to run."""

    experiment: Experiment
    algorithm: Algorithm
    net: Net
    feed: Feed
    origin: Origin
    work: Work
    choice: Choice  # of the engine, and why
    notices: tuple[str, ...]
    aggregation: Aggregation = PLAIN_AGGREGATION  # privacy, robust rule and attack

    @property
    def engine(self) -> str:
        """The name of the engine that trains it."""
        return self.choice.name

    def named(self, client: int) -> dict[str, Any]:
        """A client as the history writes it: its number, and its name where it has one."""
        names = self.origin.client_names
        return {"client": client} | ({} if names is None else {"name": names[client]})

    @property
    def cohort_size(self) -> int:
        return self.experiment.cohort_of(len(self.filled))

    @cached_property
    def last_round(self) -> int:
        """The one asked for, or an earlier one where privacy allows no more."""
        rounds, budget = self.experiment.rounds, self.aggregation.budget
        return rounds if budget is None else budget.affordable(rounds)

    # Counted once: a round asks for its cohort's alone, and must not cost more where the population is larger.

    @cached_property
    def examples(self) -> list[int]:
        """How many each client trains on."""
        return [len(client) for client in self.feed.clients]

    @cached_property
    def population(self) -> Population:
        return Population(len(self.filled), sum(self.examples))

    @cached_property
    def filled(self) -> NDArray[np.int64]:
        """The clients that have any."""
        return np.flatnonzero(self.examples)

    @cached_property
    def tested(self) -> list[int]:
        """The clients that keep examples back."""
        return [client for client, kept in enumerate(self.feed.held_out) if len(kept)]
