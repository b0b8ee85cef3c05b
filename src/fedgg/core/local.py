"""What clients do in a round, for one row or many: the reference step, which the engine `loop` runs and nothing else.

Engines that hand in a faster step (`engines.fused`) are tested against `local_step`.

Rows stand in the order of their steps, longest first. A batch brings as many rows as are still at work; rows that have
done their steps leave the stack and cost nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Client
from fedgg.core.client_rows import Rows, check, each_row
from fedgg.core.dropout import DropoutKey, mask_keys
from fedgg.core.forward import RowsForward
from fedgg.core.measure import Probe
from fedgg.core.net import Net
from fedgg.core.sgd import SGD
from fedgg.errors import UserError

RECORDED = {"client", "name", "examples", "steps", "loss"}  # keys of a client's record in the history


@dataclass(frozen=True)
class LocalStart:
    """What the rows bring to a round."""

    w: Tensor  # [K, P] the global model as received
    down: Rows
    memory: Rows
    buffers: Rows  # the rows' own copies: training moves them in place
    examples: Tensor  # [K, 1]
    steps: Tensor  # [K, 1], falling
    round: Tensor  # [K, 1]
    dropout: Sequence[DropoutKey]
    probe: Probe | None = None
    many: RowsForward | None = None  # a faster way to run all rows, where an engine has one
    per_row: Rows = field(default_factory=dict)  # frozen parameters and constant buffers in which rows differ


@dataclass(frozen=True)
class LocalEnd:
    """What the rows have to show for it."""

    up: Rows
    memory: Rows
    buffers: Rows
    diagnostics: Rows
    loss: Tensor  # [K, 1] mean training loss over the examples as they were seen
    note: str = ""  # what is to be known of this client's round; recorded, never computed with


@dataclass(frozen=True)
class LocalState:
    """Rows at work: where they are, and how they got there."""

    w: Tensor
    velocity: Tensor
    last_step: Tensor | None  # None where an engine keeps what algorithms ask of it instead
    step: Tensor
    loss_sum: Tensor
    seen: Tensor


def local_round(algorithm: Algorithm, net: Net, sgd: SGD, start: LocalStart, batches: Iterable[Batch]) -> LocalEnd:
    """Train all rows on their batches."""
    running, client = open_round(algorithm, net, sgd, start)
    return take_steps(algorithm, sgd, start, running, client, batches)


def take_steps(
    algorithm: Algorithm, sgd: SGD, start: LocalStart, running: LocalState, client: Client, batches: Iterable[Batch]
) -> LocalEnd:
    """All steps of rows whose round is open, and its end."""
    here, at_work, left = client, (algorithm, sgd), list[LocalState]()
    for number, batch in enumerate(batches):
        rows = len(batch.mask)
        if rows < len(running.w):
            left.append(each_row(running, slice(rows, None)))
            running, here, at_work = each_row((running, here, (algorithm, sgd)), slice(rows))
        here.net.at_step(number)
        running = local_step(*at_work, running, here, batch)
    return end_round(algorithm, start, _together([running, *reversed(left)]), client)


def open_round(algorithm: Algorithm, net: Net, sgd: SGD, start: LocalStart) -> tuple[LocalState, Client]:
    """Rows before their first step, and what they may read."""
    zero = torch.zeros_like(start.w[:, :1])
    running = LocalState(start.w, torch.zeros_like(start.w), torch.zeros_like(start.w), zero, zero, zero)
    client = Client(
        net=net.bind(start.buffers, train=True, keys=_keys(net, start), many=start.many, per_row=start.per_row),
        probe=start.probe,
        down=start.down,
        memory=start.memory,
        notes={},
        steps=start.steps,
        effective_steps=sgd.effective_steps(start.steps),
        lr=sgd.lr,
        momentum=sgd.momentum,
        examples=start.examples,
        round=start.round,
        step=running.step,
        w=start.w,
        last_step=running.last_step,
        sums={},
    )
    return running, replace(client, notes=check(algorithm.begin(start.w, client), len(start.w), "begin()"))


def local_step(algorithm: Algorithm, sgd: SGD, running: LocalState, client: Client, batch: Batch) -> LocalState:
    """One step of every row."""
    client = replace(client, step=running.step, w=running.w, last_step=running.last_step)
    loss, grad = gradient(algorithm, running.w, batch, client)
    with torch.no_grad():
        w = running.w
        move, velocity = sgd.move(algorithm.steer(grad, w, client), w, running.velocity)
        move = algorithm.nudge(move, w, client)
        count = batch.mask.sum(1, keepdim=True)
        new = LocalState(
            w + move, velocity, move, running.step + 1, running.loss_sum + loss * count, running.seen + count
        )
        return new if batch.at_work is None else _where(batch.at_work, new, running)


def gradient(algorithm: Algorithm, w: Tensor, batch: Batch, client: Client) -> tuple[Tensor, Tensor]:
    """The local objective `[K, 1]` and its gradient `[K, P]`."""
    leaf = w.detach().requires_grad_()
    loss = algorithm.loss(leaf, batch, client)
    if loss.shape != (len(w), 1):
        raise UserError(
            f"{type(algorithm).__name__}.loss() gives a tensor of shape {tuple(loss.shape)} for {len(w)} "
            f"row{'s' if len(w) > 1 else ''}: make it [K, 1], one number for each row (a mean over dimension 1 with "
            f"keepdim=True)"
        )
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), grad


def end_round(
    algorithm: Algorithm, start: LocalStart, running: LocalState, client: Client, sums: Rows | None = None
) -> LocalEnd:
    """What rows that have done all their steps send, keep and show; `sums` are inner products that are at hand."""
    clients = len(running.w)
    client = replace(client, step=running.step, w=running.w, last_step=running.last_step, sums=sums or {})
    with torch.no_grad():
        up, memory = algorithm.finish(running.w, client)
        return LocalEnd(
            up=check(up, clients, "finish() up"),
            memory=check(memory, clients, "finish() memory"),
            buffers=start.buffers,
            diagnostics=_diagnostics(algorithm, running.w, client),
            loss=running.loss_sum / running.seen.clamp_min(1),
        )


def _diagnostics(algorithm: Algorithm, w: Tensor, client: Client) -> Rows:
    """UserError where one has a name that a client's record already has, or is not one number for each row."""
    diagnostics = check(algorithm.diagnostics(w, client), len(w), "diagnostics()")
    for name, values in diagnostics.items():
        if name in RECORDED:
            raise UserError(
                f"{type(algorithm).__name__}.diagnostics() returns {name!r}, which every client's record has already: "
                f"choose another name (taken: {', '.join(sorted(RECORDED))})"
            )
        if values.numel() != len(w):
            raise UserError(
                f"{type(algorithm).__name__}.diagnostics() returns {name!r} of shape {tuple(values.shape)}: make it "
                f"[{len(w)}, 1], one number for each row"
            )
    return diagnostics


def _keys(net: Net, start: LocalStart) -> Tensor | None:
    needed = bool(start.dropout) and (net.drops or net.draws_random_numbers)
    return mask_keys(start.dropout, start.w.device) if needed else None


def _where(condition: Tensor, new: LocalState, old: LocalState) -> LocalState:
    pairs = ((getattr(new, f.name), getattr(old, f.name)) for f in fields(LocalState))
    return LocalState(*(torch.where(condition, a, b) for a, b in pairs))


def _together(parts: list[LocalState]) -> LocalState:
    if len(parts) == 1:
        return parts[0]
    return LocalState(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(LocalState)))
