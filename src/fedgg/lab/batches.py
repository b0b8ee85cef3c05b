"""Whether clients hold enough examples for the batches that are asked of them."""

from __future__ import annotations

from collections.abc import Sequence

from fedgg.core.net import Net
from fedgg.core.plan import Work
from fedgg.errors import UserError
from fedgg.lab.config import Experiment


def check_batches(experiment: Experiment, work: Work, sizes: list[int], names: Sequence[str]) -> list[str]:
    """What is worth knowing of clients that are empty or smaller than a batch; UserError where the latter are refused,
    or all are."""
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
            f"local.batch = {work.batch} is larger than client {names[first]}, which holds {sizes[first]} examples: "
            f"take a smaller batch, a larger split.min_examples, or local.small_clients = 'whole'"
        )
    if small:
        notices.append(
            f"{len(small)} of {len(sizes)} clients hold less than a batch of {work.batch}: they train on all they have"
        )
    return notices


def check_single_scores(net: Net, tested: int, held_out: list[int], names: Sequence[str], chunk: int) -> None:
    """UserError where a model that cannot take one example would be scored on one."""
    if not net.needs_two_in_evaluation:
        return
    sizes = {"the test set": tested} | {
        f"the hold-out of client {names[client]}": size for client, size in enumerate(held_out)
    }
    for what, size in sizes.items():
        if size % chunk == 1:
            raise UserError(
                f"{what} has {size} examples and is scored {chunk} at a time, so that the last one is alone, which the "
                f"model cannot take in evaluation mode: leave one out"
            )


def check_single_examples(net: Net, work: Work, sizes: list[int], names: Sequence[str]) -> None:
    """UserError where a client's last batch has one example and the model cannot take that."""
    if not net.needs_two_examples:
        return
    for client, size in enumerate(sizes):
        last = size if work.batch is None else (size - 1) % work.batch + 1
        if size and last == 1:
            raise UserError(
                f"client {names[client]} holds {size} examples, so its last batch has one, which the model cannot take "
                f"(batch statistics need two): take another local.batch, a larger split.min_examples or "
                f"model.statistics = 'frozen'"
            )
