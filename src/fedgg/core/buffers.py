"""What happens to a model's buffers (BatchNorm's running statistics), by name.

average  every client starts from the server's, and the server averages what comes back by share (the default);
local    every client keeps its own and starts from them, at a first meeting from the server's; the server averages the
         latest ones, for evaluation only;
frozen   nobody moves them: normalisation layers use the starting statistics, in training as in evaluation.

Counters (integers) cannot be averaged: the largest one counts.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fedgg.core.rows import Rows, weighted_sum

BufferPolicy = Literal["average", "local", "frozen"]


def open_buffers(policy: BufferPolicy, server: Rows, kept: Rows | None) -> Rows:
    """A client's own copy to train with."""
    return {name: rows.clone() for name, rows in starting_buffers(policy, server, kept).items()}


def close_buffers(policy: BufferPolicy, server: Rows, trained: Rows, share: Tensor) -> Rows:
    """The server's buffers after a round; `trained` has one row per client."""
    if policy == "frozen":
        return server
    return {name: _merge(rows, share) for name, rows in trained.items()}


def _merge(rows: Tensor, share: Tensor) -> Tensor:
    if not rows.is_floating_point():
        return rows.amax(dim=0, keepdim=True)
    weights = share.to(rows.dtype).view(-1, *[1] * (rows.ndim - 1))
    return weighted_sum(weights, rows)


def starting_buffers(policy: BufferPolicy, server: Rows, kept: Rows | None) -> Rows:
    """Those a client starts from: its own under `local`, once it has some; else the server's."""
    return kept if policy == "local" and kept is not None else server


def travels(policy: BufferPolicy, *, kept: bool = False) -> tuple[bool, bool]:
    """Whether buffers go (down, up); `kept`: whether the client has some of its own by now."""
    return policy == "average" or (policy == "local" and not kept), policy != "frozen"
