"""The server's half of a round, shared by every engine and by real deployments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Hub
from fedgg.core.buffers import BufferPolicy, close_buffers, not_finite
from fedgg.core.collect import PLAIN, Collector, Sent, shares
from fedgg.core.local import LocalEnd
from fedgg.core.rows import Rows, check, read_only, stack


@dataclass(frozen=True)
class ServerState:
    """All the server knows between rounds."""

    w: Tensor  # [1, P]
    buffers: Rows
    memory: Rows


@dataclass(frozen=True)
class Lost:
    """A client that was left out of a round, and why."""

    client: int
    why: str


def first_state(algorithm: Algorithm, w: Tensor, buffers: Rows) -> ServerState:
    return ServerState(w, buffers, check(algorithm.server_memory(w), 1, "server_memory()"))


def healthy(
    ends: Mapping[int, LocalEnd | Lost], buffers_before: Callable[[int], Rows]
) -> tuple[dict[int, LocalEnd], list[Lost]]:
    """The clients whose update is there and finite, and the others: one NaN would destroy the model for all.

    `buffers_before`: those a client began with; what was infinite in them already is a constant.
    """
    kept: dict[int, LocalEnd] = {}
    lost: list[Lost] = []
    for client, end in ends.items():
        if isinstance(end, Lost):
            lost.append(end)
            continue
        everything = end.up | {f"memory {name}": rows for name, rows in end.memory.items()}
        sick = [name for name, rows in everything.items() if not bool(torch.isfinite(rows).all())]
        if not all(bool(torch.isfinite(rows).all()) for rows in end.buffers.values()):
            sick += not_finite(buffers_before(client), end.buffers)  # asked for here alone: they may lie on disk
        if sick:
            lost.append(Lost(client, f"not finite: {', '.join(sick)}"))
        else:
            kept[client] = end
    return kept, lost


def close_round(
    algorithm: Algorithm,
    state: ServerState,
    hub: Hub,
    ends: Mapping[int, LocalEnd],
    examples: Mapping[int, int],
    policy: BufferPolicy,
    collector: Collector = PLAIN,
    asked: int | None = None,
) -> tuple[ServerState, dict[int, float]]:
    """The server's state after the round, and the share each client had in it.

    Clients count by their examples, unless the collector counts them the same; `asked` says how many there would have
    been had nobody been lost.
    """
    order = sorted(ends)  # the same sum in the same order, whoever answered first
    share = shares([examples[client] for client in order], state.w, equally=collector.counts_equally)
    up = stack([ends[client].up for client in order])
    collector.check(up, state.w.shape[1])
    rows, weights = collector.collect(Sent(up, share, hub.round, len(order) if asked is None else asked))
    w, memory = algorithm.aggregate(state.w, read_only(rows, "up"), weights, hub)
    if w.shape != state.w.shape:
        raise ValueError(f"aggregate() must return a model {tuple(state.w.shape)}, got {tuple(w.shape)}")
    buffers = close_buffers(policy, state.buffers, stack([ends[client].buffers for client in order]), share)
    return ServerState(w, buffers, check(memory, 1, "aggregate() memory")), {
        client: float(part) for client, part in zip(order, share, strict=True)
    }
