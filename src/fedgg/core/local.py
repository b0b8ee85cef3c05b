"""The local training of a round, for one client or many: the reference step, which the engine `loop` runs, and SGD.

Engines that have a faster step (`engines.fused`) are tested against `local_step`.

Rows are ordered by their number of steps, longest first. A batch has as many rows as still train; rows that have taken
all their steps leave the stack and cost nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Client
from fedgg.core.evaluation import Probe
from fedgg.core.forward import DropoutKey, RowsForward, mask_keys
from fedgg.core.model import Net
from fedgg.core.tensor_rows import Rows, check, each_row
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
    velocity: Tensor
    last_step: Tensor | None  # None where an engine keeps its inner products instead
    step: Tensor
    loss_sum: Tensor
    seen: Tensor


@dataclass(frozen=True)
class SGD:
    """The local optimiser on rows: stochastic gradient descent with momentum and weight decay, as in PyTorch.

        v <- b v + gradient + weight_decay w
        w <- w - lr v

    Momentum starts at zero in every round: clients keep no optimiser state between rounds, as in the paper's setting.
    """

    lr: Tensor  # [K, 1]
    momentum: Tensor  # [K, 1]
    weight_decay: Tensor  # [K, 1]
    has_momentum: bool  # known outside the tensors, so that plain SGD does not pay for a velocity
    has_decay: bool

    @classmethod
    def of(cls, lr: float, momentum: float, weight_decay: float, like: Tensor) -> SGD:
        """The same settings for all rows of `like`."""
        column = like[:, :1]
        return cls(
            lr=torch.full_like(column, lr),
            momentum=torch.full_like(column, momentum),
            weight_decay=torch.full_like(column, weight_decay),
            has_momentum=momentum != 0,
            has_decay=weight_decay != 0,
        )

    def move(self, grad: Tensor, w: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """The step `w_new - w` and the new velocity.

        Weight decay is added last, as in the fused step (`engines.fused`): whichever of the two trains an algorithm at
        its neutral setting, the sum is rounded in the same order and has FedAvg's bits.
        """
        velocity = self.momentum * velocity + grad if self.has_momentum else grad
        if self.has_decay:
            velocity = velocity + self.weight_decay * w
        return -self.lr * velocity, velocity

    def effective_steps(self, steps: Tensor) -> Tensor:
        """How many plain steps `steps` steps with momentum are worth under a constant gradient, `[K, 1]`.

        a_K = sum over m = 1..K of (1 - b^m)/(1 - b) = (K - b (1 - b^K)/(1 - b))/(1 - b); K itself for b = 0.
        """
        b, k = self.momentum, steps.to(self.momentum.dtype)
        return (k - b * (1 - b**k) / (1 - b)) / (1 - b)


def learning_rate(lr: float, decay: float, round_: int) -> float:
    """The local learning rate of a round, counted from zero."""
    return lr * decay**round_


def local_round(
    algorithm: Algorithm,
    net: Net,
    sgd: SGD,
    start: LocalStart,
    batches: Iterable[Batch],
    opened: tuple[LocalState, Client] | None = None,
) -> LocalEnd:
    """Train all rows on their batches. `opened`: what `open_round` returned, where it has been called already."""
    running, client = open_round(algorithm, net, sgd, start) if opened is None else opened
    finished: list[LocalState] = []  # rows that have taken all their steps, shortest first
    here, settings = client, (algorithm, sgd)  # of the rows that still train
    for number, batch in enumerate(batches):
        rows = len(batch.mask)
        if rows < len(running.w):
            finished.append(each_row(running, slice(rows, None)))
            running, here, settings = each_row((running, here, (algorithm, sgd)), slice(rows))
        here.net.step = number
        running = local_step(*settings, running, here, batch)
    if finished:
        parts = [running, *reversed(finished)]
        running = LocalState(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(LocalState)))
    return end_round(algorithm, start, running, client)


def open_round(algorithm: Algorithm, net: Net, sgd: SGD, start: LocalStart) -> tuple[LocalState, Client]:
    """Rows before their first step, and what their algorithm may read."""
    zero = torch.zeros_like(start.w[:, :1])
    running = LocalState(start.w, torch.zeros_like(start.w), torch.zeros_like(start.w), zero, zero, zero)
    is_random = bool(start.dropout) and (net.drops or net.draws_random_numbers)
    keys = mask_keys(start.dropout, start.w.device) if is_random else None
    client = Client(
        net=net.bind(start.buffers, train=True, keys=keys, many=start.many, per_row=start.per_row),
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
    """What rows that have taken all their steps send, keep and record; `sums`: inner products an engine has computed.

    UserError where a diagnostic has a name that a client's record already has, or is not one number for each row.
    """
    rows = len(running.w)
    client = replace(client, step=running.step, w=running.w, last_step=running.last_step, sums=sums or {})
    with torch.no_grad():
        up, memory = algorithm.finish(running.w, client)
        up, memory = check(up, rows, "finish() up"), check(memory, rows, "finish() memory")
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
    return LocalEnd(up=up, memory=memory, buffers=start.buffers, diagnostics=diagnostics, loss=loss)


def _where(condition: Tensor, new: LocalState, old: LocalState) -> LocalState:
    pairs = ((getattr(new, f.name), getattr(old, f.name)) for f in fields(LocalState))
    return LocalState(*(torch.where(condition, a, b) for a, b in pairs))
