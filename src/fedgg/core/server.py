"""The server's half of a round: shares, collection of what clients send, aggregation; shared by all engines and Flower.

A plain `Collector` returns what was sent. Privacy and robust rules override it; algorithms need not know of them. What
a collector returns is all that `aggregate` sees of the clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Server
from fedgg.core.buffers import BufferPolicy, close_buffers, not_finite
from fedgg.core.local import LocalEnd
from fedgg.core.tensor_rows import Rows, check, read_only, stack, two_of


@dataclass(frozen=True)
class Sent:
    """What has reached the server in a round, one row per client, in ascending order of clients."""

    up: Rows
    share: Tensor  # [K, 1], sums to one
    round: int
    asked: int  # clients of the cohort, those included that were lost


@dataclass(frozen=True)
class Collector:
    """Returns what was sent, as it is."""

    counts_equally: ClassVar[bool] = False  # whether every client counts the same, instead of by its examples

    def check(self, up: Rows, parameters: int) -> None:
        """UserError where the messages of an algorithm cannot be treated; `parameters` is the model's length."""

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        """The rows and shares that `aggregate` is given."""
        return sent.up, sent.share


PLAIN = Collector()


def shares(counts: list[int], like: Tensor, *, equally: bool) -> Tensor:
    """What part each client has in the round, `[K, 1]`: by its examples, or all the same."""
    weights = torch.tensor([[1 if equally else count] for count in counts], dtype=like.dtype, device=like.device)
    return weights / weights.sum()


def all_sent_the_same(one: Rows, clients: int) -> tuple[Rows, Tensor]:
    """So many clients who all sent the same row: views, so nothing is copied.

    Algorithms that add up clients, count them or take their mean then all do what they mean to.
    """
    up = {name: row.expand(clients, *row.shape[1:]) for name, row in one.items()}
    first = next(iter(one.values()))
    return up, torch.full((clients, 1), 1 / clients, dtype=first.dtype, device=first.device)


FACTOR = 1e6  # training does not make values so many times larger in one round
OUT_OF_PROPORTION = "out of all proportion"
K = TypeVar("K")


@dataclass(frozen=True)
class ServerState:
    """What the server keeps between rounds."""

    w: Tensor  # [1, P]
    buffers: Rows
    memory: Rows


@dataclass(frozen=True)
class Lost:
    """A client that was left out of a round, and why."""

    client: int
    why: str


def healthy(
    ends: Mapping[int, LocalEnd | Lost], buffers_before: Callable[[int], Rows]
) -> tuple[dict[int, LocalEnd], list[Lost]]:
    """The clients whose update is there and finite, and the others: one NaN would destroy the model for all.

    `buffers_before`: those a client began with; what was infinite in them already is a constant.
    """
    finite: dict[int, LocalEnd] = {}
    lost: list[Lost] = []
    rows: dict[tuple[int, str, str], Tensor] = {}
    for client, end in ends.items():
        if not isinstance(end, Lost):
            kinds = {"": end.up, "memory ": end.memory, "statistics": end.buffers}
            rows |= {(client, kind, name): tensor for kind, part in kinds.items() for name, tensor in part.items()}
    not_finite_names: dict[int, list[str]] = {client: [] for client in ends}
    changed_buffers = set[int]()
    for (client, kind, name), size in largest(rows).items():
        if not math.isfinite(size) and kind == "statistics":
            changed_buffers.add(client)
        elif not math.isfinite(size):
            not_finite_names[client].append(f"{kind}{name}")
    for client, end in ends.items():
        if isinstance(end, Lost):
            lost.append(end)
            continue
        if client in changed_buffers:
            # Read only here: they may lie on disk.
            not_finite_names[client] += not_finite(buffers_before(client), end.buffers)
        if not_finite_names[client]:
            lost.append(Lost(client, f"not finite: {', '.join(not_finite_names[client])}"))
        else:
            finite[client] = end
    return finite, lost


def in_proportion(ends: Mapping[int, LocalEnd], model: Tensor) -> tuple[dict[int, LocalEnd], list[Lost]]:
    """The clients whose update is in proportion to the others of the round, and those whose is not.

    Out of proportion is a part of an update with larger values than FACTOR times those of the model that was sent and
    those of the other clients, of which the lower median counts: a cohort that diverges together is kept, and half of a
    cohort can be left out. Repeated until no client is: those that are left in stay in when the others are gone.
    """
    # What the server computes with; client state stays with the clients.
    sent = {
        client: end.up | {f"statistics {name}": rows for name, rows in end.buffers.items()}
        for client, end in ends.items()
    }
    sizes = largest({(client, name): tensor for client, rows in sent.items() for name, tensor in rows.items()})
    (size_of_model,) = largest({"w": model}).values()
    usable, lost = dict(ends), dict[int, Lost]()
    while len(usable) > 1:
        too_large: dict[int, list[str]] = {}
        for name in sent[next(iter(usable))]:
            usual = sorted(sizes[client, name] for client in usable)[(len(usable) - 2) // 2]
            limit = FACTOR * max(usual, size_of_model, 1.0)
            for client in usable:
                if sizes[client, name] > limit:
                    too_large.setdefault(client, []).append(name)
        if not too_large:
            break
        for client, names in too_large.items():
            del usable[client]
            why = f"{OUT_OF_PROPORTION}: {', '.join(names)}, over {FACTOR:,.0f} times the model and the other clients"
            lost[client] = Lost(client, why)
    return usable, [lost[client] for client in ends if client in lost]


def spoilt(before: ServerState, after: ServerState) -> str | None:
    """What is wrong with the server's state after a round, where it was right before."""
    parts_before, parts_after = (
        {"model": state.w}
        | {f"memory {name}": rows for name, rows in state.memory.items()}
        | {f"statistics {name}": rows for name, rows in state.buffers.items()}
        for state in (before, after)
    )
    sizes = largest(parts_after)
    if not math.isfinite(sizes["model"]):
        return "the global model is not finite"
    if sizes["model"] > FACTOR * max(largest({"w": before.w})["w"], 1.0):
        return f"the global model is {OUT_OF_PROPORTION}"
    names = [name for name, size in sizes.items() if not math.isfinite(size)]
    earlier = largest(parts_before) if names else {}
    names = [name for name in names if math.isfinite(earlier.get(name, 0.0))]
    return f"the server's {', '.join(names)} is not finite" if names else None


def is_ordinary(state: ServerState) -> bool:
    """Whether the model has values that training gives it; where it has not, no single client is the cause."""
    return largest({"w": state.w})["w"] <= FACTOR


def largest(rows: Mapping[K, Tensor]) -> dict[K, float]:
    """The largest absolute value of each tensor; not finite if any value is not. The device is waited for once."""
    maxima: dict[K, Tensor] = {}
    for key, tensor in rows.items():
        if tensor.numel():
            is_integer = not (tensor.is_floating_point() or tensor.is_complex())
            maxima[key] = torch.linalg.vector_norm(tensor.double() if is_integer else tensor, torch.inf).double()
    sizes = dict.fromkeys(rows, 0.0)
    if maxima:
        sizes |= dict(zip(maxima, torch.stack(list(maxima.values())).tolist(), strict=True))
    return sizes


def close_round(
    algorithm: Algorithm,
    state: ServerState,
    server: Server,
    ends: Mapping[int, LocalEnd],
    examples: Mapping[int, int],
    policy: BufferPolicy,
    collector: Collector = PLAIN,
    asked: int | None = None,
) -> tuple[ServerState, dict[int, float]]:
    """The server's state after the round, and the share each client had in it.

    Clients count by their examples, unless the collector counts them the same; `asked` says how many there would have
    been had none been lost.
    """
    order = sorted(ends)  # the same sum in the same order, whichever client was first
    share = shares([examples[client] for client in order], state.w, equally=collector.counts_equally)
    up, weights = stack([ends[client].up for client in order]), share
    if collector is not PLAIN:
        collector.check(up, state.w.shape[1])
        up, weights = collector.collect(Sent(up, share, server.round, len(order) if asked is None else asked))
    new = algorithm.aggregate(state.w, read_only(up, "up"), weights, server)
    w, memory = two_of(new, f"{type(algorithm).__name__}.aggregate()", "the model and the server's memory")
    if w.shape != state.w.shape:
        raise ValueError(f"aggregate() must return a model {tuple(state.w.shape)}, got {tuple(w.shape)}")
    if server.lr != 1:
        w = state.w + server.lr * (w - state.w)
    buffers = state.buffers
    if buffers:
        buffers = close_buffers(policy, buffers, stack([ends[client].buffers for client in order]), share)
    return ServerState(w, buffers, check(memory, 1, "aggregate() memory")), {
        client: float(part) for client, part in zip(order, share, strict=True)
    }
