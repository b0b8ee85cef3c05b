"""The local training of a round, for one client or many: the reference step, which the engine `loop` runs.

Engines that have a faster step (`engines.fused`) are tested against `local_step`.

Rows are ordered by their number of steps, longest first. A batch has as many rows as still train; rows that have taken
all their steps leave the stack and cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Client, with_vectors
from fedgg.core.evaluation import Probe
from fedgg.core.forward import DropoutKey, RowsForward, mask_keys
from fedgg.core.model import Net
from fedgg.core.optimisers import Optimiser, kept_state, with_kept_state
from fedgg.core.personal import ALONE, OPTIMISER, kept_rows, optimiser_state_in, probe_with
from fedgg.core.tensor_rows import Rows, check, each_row, two_of
from fedgg.errors import UserError

RECORDED = {"client", "name", "examples", "steps", "loss"}  # keys of a client's record in the history


@dataclass(frozen=True)
class LocalStart:
    """What the rows of a round start from."""

    w: Tensor  # [K, P] the global model as received
    down: Rows
    memory: Rows
    buffers: Rows  # copies, which training changes in place
    examples: Tensor  # [K, 1]
    steps: Tensor  # [K, 1], falling
    round: Tensor  # [K, 1]
    dropout: Sequence[DropoutKey]
    probe: Probe | None = None
    many: RowsForward | None = None  # a faster way to run all rows, where an engine has one
    per_row: Rows = field(default_factory=dict)  # frozen parameters and constant buffers in which rows differ
    keeps_optimiser_state: bool = False  # whether it is part of the client state
    personal: Rows = field(default_factory=dict)  # parameters that do not travel, see `core.personal.open_personal`


@dataclass(frozen=True)
class LocalEnd:
    """The result of the rows' local training."""

    up: Rows
    memory: Rows
    buffers: Rows
    diagnostics: Rows
    loss: Tensor  # [K, 1] mean training loss over the examples as they were seen
    note: str = ""  # a remark on this client's round; recorded, never computed with


@dataclass(frozen=True)
class LocalState:
    """The rows between two steps."""

    w: Tensor
    optimiser_state: Rows
    last_step: Tensor | None  # None where an engine keeps its inner products instead
    step: Tensor
    loss_sum: Tensor
    seen: Tensor
    personal: Rows = field(default_factory=dict)  # as in `LocalStart`


def local_round(
    algorithm: Algorithm,
    net: Net,
    optimiser: Optimiser,
    start: LocalStart,
    batches: Iterable[Batch],
    opened: tuple[LocalState, Client] | None = None,
) -> LocalEnd:
    """Train all rows on their batches. `opened`: what `open_round` returned, where it has been called already."""
    running, client = open_round(algorithm, net, optimiser, start) if opened is None else opened
    finished: list[LocalState] = []  # rows that have taken all their steps, shortest first
    here, settings = client, (algorithm, optimiser)  # of the rows that still train
    for number, batch in enumerate(batches):
        rows = len(batch.mask)
        if rows < len(running.w):
            finished.append(each_row(running, slice(rows, None)))
            running, here, settings = each_row((running, here, (algorithm, optimiser)), slice(rows))
        here.net.step = number
        running = local_step(*settings, running, here, batch)
    if finished:
        running = _combined(torch.cat, [running, *reversed(finished)])
    return end_round(algorithm, start, running, client)


def open_round(algorithm: Algorithm, net: Net, optimiser: Optimiser, start: LocalStart) -> tuple[LocalState, Client]:
    """Rows before their first step, and what their algorithm may read."""
    zero = start.w.new_zeros(len(start.w), 1)
    memory, state = kept_state(start.memory) if start.keeps_optimiser_state else (start.memory, {})
    state = state or optimiser.start(start.w)
    running = LocalState(start.w, state, torch.zeros_like(start.w), zero, zero, zero, start.personal)
    steps = start.steps - start.personal[ALONE] if ALONE in start.personal else start.steps  # of the shared parameters
    is_random = bool(start.dropout) and (net.drops or net.draws_random_numbers)
    keys = mask_keys(start.dropout, start.w.device) if is_random else None
    client = Client(
        net=net.bind(start.buffers, train=True, keys=keys, many=start.many, per_row=start.per_row),
        probe=start.probe,
        down=start.down,
        memory=memory,
        notes={},
        steps=steps,
        effective_steps=optimiser.effective_steps(steps),
        lr=optimiser.lr,
        momentum=optimiser.momentum,
        examples=start.examples,
        round=start.round,
        step=running.step,
        w=start.w,
        last_step=running.last_step,
        sums={},
    )
    return running, replace(client, notes=check(algorithm.begin(start.w, client), len(start.w), "begin()"))


def local_step(
    algorithm: Algorithm, optimiser: Optimiser, running: LocalState, client: Client, batch: Batch
) -> LocalState:
    """One step of every row."""
    client = replace(client, step=running.step, w=running.w, last_step=running.last_step)
    if running.personal:
        return _masked(batch.at_work, _joint_step(algorithm, optimiser, running, client, batch), running)
    kind = type(algorithm)
    if kind.displacement is Algorithm.displacement and kind.second_displacement is Algorithm.second_displacement:
        loss, grad = gradient(algorithm, running.w, batch, client)
    else:
        loss, grad = displaced_gradient(algorithm, running.w, batch, client)
    with torch.no_grad():
        w = running.w
        grad = algorithm.steer(grad, w, client)
        if "clip_norm" in optimiser.used:
            grad = optimiser.clipped(grad)
        move, state = optimiser.move(grad, w, running.optimiser_state)
        move = algorithm.nudge(move, w, client)
        count = batch.mask.sum(1, keepdim=True)
        new = LocalState(w + move, state, move, running.step + 1, running.loss_sum + loss * count, running.seen + count)
        return new if batch.at_work is None else _masked(batch.at_work, new, running)


def _masked(at_work: Tensor | None, new: LocalState, old: LocalState) -> LocalState:
    """The new state of the rows that take the step, and the old one of the others."""
    if at_work is None:
        return new
    with torch.no_grad():
        return _combined(lambda pair: torch.where(at_work, pair[0], pair[1]), [new, old])


def _joint_step(
    algorithm: Algorithm, optimiser: Optimiser, running: LocalState, client: Client, batch: Batch
) -> LocalState:
    """One step of every row in its shared and its personal parameters, of which the algorithm sees the shared ones.

    Rows with steps that train the personal parameters alone take those first; afterwards they train the shared ones
    alone (FedRep). Displacements are of the shared parameters, in steps that train them.
    """
    w, personal_w = running.w, running.personal["w"]
    personal_state, alone = optimiser_state_in(running.personal), running.personal.get(ALONE)
    if alone is not None:
        client = replace(client, step=(running.step - alone).clamp_min(0))
    fixed = None if alone is None else running.step < alone  # [K, 1]: whether the shared parameters are
    loss, grad = displaced_gradient(algorithm, w, batch, client, personal_w, fixed)
    with torch.no_grad():
        sizes = [w.shape[1], personal_w.shape[1]]
        grad, personal_grad = grad.split(sizes, 1)
        grad = algorithm.steer(grad, w, client)
        if fixed is not None:
            grad, personal_grad = torch.where(fixed, 0, grad), torch.where(fixed, personal_grad, 0)
        if "clip_norm" in optimiser.used:  # one gradient of one model
            grad, personal_grad = optimiser.clipped(torch.cat([grad, personal_grad], 1)).split(sizes, 1)
        move, state = optimiser.move(grad, w, running.optimiser_state)
        personal_move, new_personal_state = optimiser.move(personal_grad, personal_w, personal_state)
        move = algorithm.nudge(move, w, client)
        if fixed is not None:
            move, personal_move = torch.where(fixed, 0, move), torch.where(fixed, personal_move, 0)
            state = {name: torch.where(fixed, running.optimiser_state[name], rows) for name, rows in state.items()}
            new_personal_state = {
                name: torch.where(fixed, rows, personal_state[name]) for name, rows in new_personal_state.items()
            }
        personal = running.personal | {"w": personal_w + personal_move}
        personal |= {f"{OPTIMISER}{name}": rows for name, rows in new_personal_state.items()}
        count = batch.mask.sum(1, keepdim=True)
        loss_sum, seen = running.loss_sum + loss * count, running.seen + count
        return LocalState(w + move, state, move, running.step + 1, loss_sum, seen, personal)


def displaced_gradient(
    algorithm: Algorithm,
    w: Tensor,
    batch: Batch,
    client: Client,
    personal: Tensor | None = None,
    fixed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The local objective and its gradient, taken where the algorithm says: at w, elsewhere, or a second time.

    `fixed` `[K, 1]`: rows whose shared parameters do not train in this step, and are not displaced.
    """
    with torch.no_grad():
        name = f"{type(algorithm).__name__}.displacement()"
        point = with_vectors(w, algorithm.displacement(client), client, name)
        point = point if fixed is None else torch.where(fixed, w, point)
        is_twice = type(algorithm).second_displacement is not Algorithm.second_displacement
        # The statistics that remain are those of the first pass; the second one starts from those before it.
        statistics_before = client.net.with_copied_buffers() if is_twice else client.net
    loss, grad = gradient(algorithm, point, batch, client, personal)
    second = second_point(algorithm, grad[:, : w.shape[1]], w, client, fixed)
    if second is None:
        return loss, grad
    client = replace(client, net=statistics_before)
    return loss, gradient(algorithm, second, batch, client, personal)[1]


def second_point(
    algorithm: Algorithm, grad: Tensor, w: Tensor, client: Client, fixed: Tensor | None = None
) -> Tensor | None:
    """Where the gradient is taken a second time, after the first one `[K, P]`; None: the first one is used."""
    with torch.no_grad():
        second = algorithm.second_displacement(grad, w, client)
        if second is None:
            return None
        if second.shape != w.shape:
            raise UserError(
                f"{type(algorithm).__name__}.second_displacement() gives a tensor of shape {tuple(second.shape)}: make "
                f"it {list(w.shape)}, one displacement for each row, or None for a single gradient"
            )
        return w + (second if fixed is None else torch.where(fixed, 0, second))


def gradient(
    algorithm: Algorithm, w: Tensor, batch: Batch, client: Client, personal: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The local objective `[K, 1]` and its gradient `[K, P]`; with personal parameters, followed by that in them."""
    if personal is None:
        leaf = w.detach().requires_grad_()
        loss = algorithm.loss(leaf, batch, client)
    else:
        leaf = torch.cat([w, personal], 1).detach().requires_grad_()
        shared, personal_leaf = leaf.split([w.shape[1], personal.shape[1]], 1)
        loss = algorithm.loss(shared, batch, replace(client, net=client.net.with_personal(personal_leaf)))
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
    """What rows that have taken all their steps send, keep and record; `sums`: inner products an engine has computed.

    UserError where a diagnostic has a name that a client's record already has, or is not one number for each row.
    """
    rows = len(running.w)
    client = replace(client, step=running.step, w=running.w, last_step=running.last_step, sums=sums or {})
    buffers, personal_memory = start.buffers, dict[str, Tensor]()
    if running.personal:
        client, buffers, personal_memory = _end_personal(start, running, client)
    with torch.no_grad():
        finished = algorithm.finish(running.w, client)
        up, memory = two_of(finished, f"{type(algorithm).__name__}.finish()", "what is sent and the client's memory")
        up, memory = check(up, rows, "finish() up"), check(memory, rows, "finish() memory")
        if start.keeps_optimiser_state:
            memory = with_kept_state(memory, running.optimiser_state)
        if personal_memory:
            memory = memory | personal_memory
        diagnostics = check(algorithm.diagnostics(running.w, client), rows, "diagnostics()")
        loss = running.loss_sum / running.seen.clamp_min(1)
    for name, values in diagnostics.items():
        if name in RECORDED:
            raise UserError(
                f"{type(algorithm).__name__}.diagnostics() returns {name!r}, which every client's record has already: "
                f"choose another name (taken: {', '.join(sorted(RECORDED))})"
            )
        if values.numel() != rows:
            raise UserError(
                f"{type(algorithm).__name__}.diagnostics() returns {name!r} of shape {tuple(values.shape)}: make it "
                f"[{rows}, 1], one number for each row"
            )
    return LocalEnd(up=up, memory=memory, buffers=buffers, diagnostics=diagnostics, loss=loss)


def _end_personal(start: LocalStart, running: LocalState, client: Client) -> tuple[Client, Rows, Rows]:
    """What an algorithm reads at the end of a round, the buffers that are not personal, and the personal rows kept."""
    part = client.net.personal
    personal_buffers = {name: rows for name, rows in start.buffers.items() if name in part.start_buffers}
    buffers = {name: rows for name, rows in start.buffers.items() if name not in personal_buffers}
    state = optimiser_state_in(running.personal) if start.keeps_optimiser_state else {}
    w = running.personal["w"]
    alone = running.personal.get(ALONE)
    client = replace(
        client,
        net=client.net.with_personal(w),
        probe=client.probe and probe_with(client.probe, part.layout.unflatten(w) | personal_buffers),
        step=running.step if alone is None else (running.step - alone).clamp_min(0),
    )
    return client, buffers, kept_rows(w, personal_buffers, state)


def _combined(combine: Callable[[list[Tensor]], Tensor], states: Sequence[LocalState]) -> LocalState:
    """One state, each of its tensors made of those of the given ones."""

    def entry(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: combine([value[name] for value in values]) for name in values[0]}
        return None if values[0] is None else combine(values)

    return LocalState(*(entry([getattr(state, f.name) for state in states]) for f in fields(LocalState)))
