"""Checks of clients' data against batches and model before anything trains, with notices on small clients."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from fedgg.core.random_choices import Work
from fedgg.data.batch_preparation import CHUNK, Feed, Scaling
from fedgg.data.dataset import Dataset
from fedgg.errors import UserError
from fedgg.lab.config import Experiment


def check_batches(experiment: Experiment, work: Work, sizes: list[int], names: Sequence[str] | None) -> list[str]:
    """Notices on clients that are empty or smaller than a batch; UserError where all are, or small ones are refused."""
    empty = sizes.count(0)
    notices = [f"{empty} of {len(sizes)} clients hold no examples and never take part"] if empty else []
    if work.batch is None:
        return notices
    small = [client for client, size in enumerate(sizes) if 0 < size < work.batch]
    if len(small) + empty == len(sizes):
        raise UserError(
            f"local.batch = {work.batch} is larger than every client (the largest holds {max(sizes)} examples): "
            f"take a smaller batch or fewer clients"
        )
    if small and experiment.local.small_clients == "refuse":
        first = small[0]
        raise UserError(
            f"local.batch = {work.batch} is larger than client {names[first] if names else first}, which holds "
            f"{sizes[first]} examples: take a smaller batch, a larger split.min_examples, or local.small_clients = "
            f"'whole'"
        )
    if small:
        fewer = f"{len(small)} of {len(sizes)} clients hold less than a batch of {work.batch}"
        notices.append(f"{fewer}: they train on all they have")
    return notices


def check_single_examples(work: Work, sizes: list[int], names: Sequence[str] | None) -> None:
    """UserError where a client's last batch has one example, of a model that cannot take that."""
    for client, size in enumerate(sizes):
        last = size if work.batch is None else (size - 1) % work.batch + 1
        if size and last == 1 and work.steps(size) >= (1 if work.batch is None else -(-size // work.batch)):
            raise UserError(
                f"client {names[client] if names else client} holds {size} examples, so its last batch has one, which "
                f"the model cannot take (batch statistics need two): take another local.batch, a larger "
                f"split.min_examples or model.statistics = 'frozen'"
            )


def check_single_scores(feed: Feed, names: Sequence[str] | None) -> None:
    """UserError where a model that cannot take one example would be scored on one."""
    sizes = {"the test set": len(feed.x_test)}
    for client, held_out in enumerate(feed.held_out):
        sizes[f"the hold-out of client {names[client] if names else client}"] = len(held_out)
    for examples, size in sizes.items():
        if size % CHUNK == 1:
            raise UserError(
                f"{examples} has {size} examples and is scored {CHUNK} at a time, so that the last one is alone, which "
                f"the model cannot take in evaluation mode: leave one out"
            )


def try_the_largest_inputs(module: nn.Module, dataset: Dataset, scaling: Scaling) -> None:
    """UserError where an Embedding has no row for a token id, which the first examples need not have.

    On the CPU, where that is an error one can recover from.
    """
    chosen = []
    for x in (dataset.x_train, dataset.x_test):
        chosen += [x[int(x.flatten(1).amin(1).argmin())], x[int(x.flatten(1).amax(1).argmax())]]
    extremes, cpu = torch.stack(chosen).cpu(), torch.device("cpu")
    try:
        with torch.no_grad():
            copy.deepcopy(module).to(cpu).eval()(scaling.to(cpu)(extremes))
    except IndexError as error:
        raise UserError(
            f"{type(module).__name__} cannot take all examples: {error}; the inputs lie between {extremes.min():g} and "
            f"{extremes.max():g}, and token ids must be less than the size of their Embedding"
        ) from error
    except Exception:
        return  # a module made for another device, for instance: it is tried where it trains
