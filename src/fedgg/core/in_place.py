"""One client's round on a CPU, without a tensor more than it needs: the twin of `local_step` for sums of terms.

Gradients stay where autograd leaves them, one for each parameter, and model, velocity and drift are moved in place: for
a model of a million parameters, fresh memory for every intermediate costs as much as the model's own arithmetic. Long
parameters are done piece by piece, so that a piece is still in the cache when its next operation comes. What FedGG
costs beside FedAvg is reading and writing: two vectors more, one of which moves, and three inner products.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Site
from fedgg.core.rows import Rows
from fedgg.core.sgd import SGD
from fedgg.core.terms import Asked

PIECE = 1 << 18  # numbers
SMALL = 1 << 17  # models that are done in one piece: for them, asking costs more than moving


@dataclass(frozen=True)
class Piece:
    """A stretch of the row, in every vector there is: views, which move with what they look at."""

    w: Tensor
    velocity: Tensor
    drift: Tensor | None  # where it is asked for
    notes: Rows

    def vector(self, name: str) -> Tensor:
        """By the name an algorithm calls it; for the step the velocity, which is the step but for its factor, -lr."""
        if name == "step":
            return self.velocity
        if name == "drift":
            assert self.drift is not None
            return self.drift
        return self.notes[name]


@dataclass
class Walk:
    """A client on its way; its tensors are its own, and move."""

    w: Tensor  # [1, P]
    velocity: Tensor  # [1, P]
    step: Tensor  # [1, 1]
    loss_sum: Tensor
    seen: Tensor
    sums: Rows


def walk(algorithm: Algorithm, sgd: SGD, site: Site, asked: Asked, batches: Iterable[Batch]) -> Walk:
    """All steps of one row whose objective is the supervised loss."""
    zero = torch.zeros_like(site.w[:, :1])
    client = Walk(
        w=site.w.clone(),
        velocity=torch.zeros_like(site.w),
        step=zero,
        loss_sum=zero.clone(),
        seen=zero.clone(),
        sums=dict.fromkeys(asked.pairs, zero),
    )
    pieces, optimiser = _pieces(client, site, asked), Rule.of(sgd)
    views = list(site.net.layout.unflatten(client.w[0]).values())
    for number, batch in enumerate(batches):
        site.net.at_step(number)
        here = replace(site, step=client.step, w=client.w, last_step=None, sums=client.sums)
        leaves = [view.detach().requires_grad_() for view in views]
        loss = site.net.loss_with(leaves, batch.x, batch.y, batch.mask)
        grads = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
        with torch.no_grad():
            factors = {name: float(factor) for name, factor in algorithm.terms(here).items()}
            client.sums = optimiser.move(pieces, _cut(grads, len(pieces) == 1), factors, asked.pairs)
            count = batch.mask.sum(1, keepdim=True)
            client.step = client.step + 1
            client.loss_sum += loss.detach() * count
            client.seen += count
    return client


@dataclass(frozen=True)
class Rule:
    """The optimiser's settings as numbers.

    Everything is added by `addcmul` with a factor that is one: torch then rounds a product before it is added, which is
    what the rest of the library does in two operations, and reads and writes every number once. `add` with an `alpha`
    would round once, and algorithms at their neutral setting would no longer be FedAvg bit for bit.
    """

    lr: float
    momentum: float | None
    decay: float | None
    one: Tensor

    @classmethod
    def of(cls, sgd: SGD) -> Rule:
        momentum = float(sgd.momentum) if sgd.has_momentum else None
        decay = float(sgd.weight_decay) if sgd.has_decay else None
        return cls(float(sgd.lr), momentum, decay, torch.ones_like(sgd.lr[0, 0]))

    def move(self, pieces: list[Piece], grads: list[Tensor], factors: dict[str, float], pairs: tuple[str, ...]) -> Rows:
        """One step of every piece; the inner products of where they stand then."""
        parts: dict[str, list[Tensor]] = {both: [] for both in pairs}
        for piece, grad in zip(pieces, grads, strict=True):
            self._move(piece, grad, factors)
            for both in pairs:
                a, b = both.split(".")
                parts[both].append(torch.dot(piece.vector(a), piece.vector(b)))
        return {both: _total(found) * (-self.lr) ** both.split(".").count("step") for both, found in parts.items()}

    def _move(self, piece: Piece, grad: Tensor, factors: dict[str, float]) -> None:
        """The gradient is only read: autograd may have given the same one to two parameters."""
        velocity = piece.velocity
        if self.momentum is None:
            velocity.copy_(grad)
        else:
            torch.addcmul(grad, velocity, self.one, value=self.momentum, out=velocity)
        for name, factor in factors.items():
            velocity.addcmul_(piece.vector(name), self.one, value=factor)
        if self.decay is not None:
            velocity.addcmul_(piece.w, self.one, value=self.decay)
        piece.w.addcmul_(velocity, self.one, value=-self.lr)
        if piece.drift is not None:
            piece.drift.addcmul_(velocity, self.one, value=-self.lr)


def _pieces(client: Walk, site: Site, asked: Asked) -> list[Piece]:
    drift = torch.zeros_like(site.w) if asked.drift else None
    sizes = site.net.layout.sizes
    lengths = [sum(sizes)]
    if lengths[0] > SMALL:
        lengths = [len(part) for size in sizes for part in torch.empty(size, device="meta").split(PIECE)]
    vectors = {"w": client.w, "velocity": client.velocity} | {name: site.notes[name] for name in asked.notes}
    cut = {name: rows[0].split(lengths) for name, rows in vectors.items()}
    drifts = [None] * len(lengths) if drift is None else drift[0].split(lengths)
    return [
        Piece(cut["w"][i], cut["velocity"][i], drifts[i], {name: cut[name][i] for name in asked.notes})
        for i in range(len(lengths))
    ]


def _cut(grads: tuple[Tensor, ...], whole: bool) -> list[Tensor]:
    flat = [grad.reshape(-1) for grad in grads]
    return [torch.cat(flat)] if whole else [part for grad in flat for part in grad.split(PIECE)]


def _total(found: list[Tensor]) -> Tensor:
    return (found[0] if len(found) == 1 else torch.stack(found).sum()).view(1, 1)
