"""What happens to a model's buffers (BatchNorm's running statistics), by name.

average  every client starts from the server's, and the server averages what comes back by share (the default);
local    every client keeps its own and starts from them, in its first round from the server's; the server averages
         the latest ones, for evaluation only;
frozen   training does not change them: normalisation layers use the starting statistics, in training as in evaluation.

Counters (integers) cannot be averaged: the largest one counts.

Buffers that training does not change (masks, scales, position codes) are constants. Both sides have them from the model
itself, as they have parameters that need no gradient: they do not travel, and may hold -inf or NaN. Which buffers move
is seen in a first step (`Net.examine`) and again in every round: one that changes later is sent from then on. Entries
that no client of a round changed stay the server's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from fedgg.core.tensor_rows import Rows, weighted_sum

BufferPolicy = Literal["average", "local", "frozen"]


def close_buffers(policy: BufferPolicy, server: Rows, trained: Rows, share: Tensor) -> Rows:
    """The server's buffers after a round; `trained` has one row per client."""
    if policy == "frozen":
        return server
    return {name: _merge(server[name], rows, share) for name, rows in trained.items()}


def _merge(server: Tensor, rows: Tensor, share: Tensor) -> Tensor:
    """An average of equal numbers is rounded, and drifts over the rounds: what no client changed is not averaged."""
    constant = _same(server, rows).all(0, keepdim=True)
    if rows.is_floating_point() or rows.is_complex():
        merged = weighted_sum(share.to(rows.dtype).view(-1, *[1] * (rows.ndim - 1)), rows)
    else:
        merged = rows.amax(dim=0, keepdim=True)
    return torch.where(constant, server, merged)


def travelling(moving: Collection[str], known: Rows, current: Rows) -> Rows:
    """What is sent of `current` to a side that has `known`: buffers that training moves, others where they differ."""
    return {name: rows for name, rows in current.items() if name in moving or differs(known[name], rows)}


def not_finite(before: Rows, after: Rows) -> list[str]:
    """The buffers in which training has turned an entry into NaN or infinity."""
    names = [name for name, rows in after.items() if rows.is_floating_point() or rows.is_complex()]
    affected = [name for name in names if not bool(torch.isfinite(after[name]).all())]
    return [name for name in affected if bool((~torch.isfinite(after[name]) & ~_same(before[name], after[name])).any())]


def differs(one: Tensor, other: Tensor) -> bool:
    return not bool(_same(one, other).all())


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Entry by entry; NaN is the same as NaN."""
    return (one == other) | ((one != one) & (other != other))
