"""One client's round on a CPU, without a tensor more than it needs: the twin of `local_step` for sums of terms.

Gradients stay where autograd leaves them, one for each parameter, and model, velocity and drift are moved in place: for
a model of a million parameters, fresh memory for every intermediate costs as much as the model's own arithmetic. Long
parameters are done piece by piece, so that a piece is still in the cache when its next operation comes. What FedGG
costs beside FedAvg is reading and writing: two vectors more, one of which moves, and three inner products; what stands
between these and its factors is one function of plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Site
from fedgg.core.local import LocalEnd, LocalStart, Running, end_round, open_round, take_steps
from fedgg.core.net import Net
from fedgg.core.rows import Rows
from fedgg.core.sgd import SGD
from fedgg.engines.fused.net import FusedForward, fused_net
from fedgg.engines.fused.terms import Asked, asked, later_terms
from fedgg.engines.fused.tracing import as_function, lasting, recipe_of
from fedgg.errors import UserError

Factors = Callable[[int, Sequence[float]], Sequence[float]]  # from the number of the step and the inner products

PIECE = 1 << 18  # numbers
SMALL = 1 << 17  # models that are done in one piece: for them, asking costs more than moving


@dataclass(frozen=True)
class Piece:
    """A stretch of the row, in every vector there is: views, which move with what they look at."""

    w: Tensor
    velocity: Tensor
    drift: Tensor | None  # where it is asked for
    terms: tuple[Tensor, ...]  # what is added, each times a factor
    products: tuple[tuple[Tensor, Tensor], ...]  # whose inner products are asked for


def fused_round(algorithm: Algorithm, net: Net, sgd: SGD, start: LocalStart, batches: Iterable[Batch]) -> LocalEnd:
    """`core.local.local_round` with the fused step, where one row on a CPU takes steps that are a sum of terms.

    Other rows take the reference step.
    """
    net = fused_net(net)
    running, site = open_round(algorithm, net, sgd, start)
    alone = len(start.w) == 1 and start.w.device.type == "cpu" and start.many is None
    terms = asked(algorithm, site) if alone and type(algorithm).loss is Algorithm.loss else None
    if terms is None:
        return take_steps(algorithm, sgd, start, running, site, batches)
    running, sums = fused_steps(algorithm, sgd, site, terms, batches)
    return end_round(algorithm, start, running, site, sums)


def fused_steps(
    algorithm: Algorithm, sgd: SGD, site: Site, asked: Asked, batches: Iterable[Batch]
) -> tuple[Running, Rows]:
    """All steps of one row whose objective is the supervised loss: where it stands then, and its inner products."""
    forward = site.net
    assert isinstance(forward, FusedForward)
    zero = torch.zeros_like(site.w[:, :1])
    client = Running(
        w=site.w.clone(),
        velocity=torch.zeros_like(site.w),
        last_step=None,
        step=zero.clone(),
        loss_sum=zero.clone(),
        seen=zero.clone(),
    )
    pieces, optimiser, factors = _pieces(client, site, asked), Rule.of(sgd, asked), _factors(algorithm, site, asked)
    sums: Sequence[float] = [0.0] * len(asked.pairs)
    views = list(forward.layout.unflatten(client.w[0]).values())
    for number, batch in enumerate(batches):
        forward.at_step(number)
        leaves = [view.detach().requires_grad_() for view in views]
        loss = forward.loss_with(leaves, batch.x, batch.y, batch.mask)
        grads = torch.autograd.grad(loss, leaves, torch.ones_like(loss), allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            sums = optimiser.move(pieces, _cut(grads, len(pieces) == 1), factors(number, sums))
            count = batch.mask.sum(1, keepdim=True)
            client.step.add_(1)
            client.loss_sum.add_(loss.detach() * count)
            client.seen.add_(count)
    return client, _tensors(asked, sums, zero)


def _factors(algorithm: Algorithm, site: Site, asked: Asked) -> Factors:
    """What a step's terms are multiplied by, in their order."""
    recipe, zero = recipe_of(algorithm, site, asked.pairs), torch.zeros_like(site.w[:, :1])

    def by_tensors(number: int, sums: Sequence[float]) -> Sequence[float]:
        known = _Known(_tensors(asked, sums, zero))
        terms = later_terms(algorithm, replace(site, sums=known), number, asked)
        return [float(factor) for factor in terms.values()]

    if recipe is None:
        return by_tensors
    function, rest = as_function(recipe), [column.item() for column in lasting(recipe, algorithm, site)]
    most = torch.finfo(site.w.dtype).max  # beyond it a number of the rows' precision is infinite, and the run diverges
    return lambda number, sums: [
        factor if -most <= factor <= most or factor != factor else math.copysign(math.inf, factor)
        for factor in function(number, *sums, *rest)
    ]


def _tensors(asked: Asked, sums: Sequence[float], like: Tensor) -> Rows:
    exact = torch.tensor(sums, dtype=torch.float64).to(like.dtype)  # too large a number becomes infinite
    return {both: exact[number].view(1, 1) for number, both in enumerate(asked.pairs)}


class _Known(dict[str, Tensor]):
    """The inner products that are kept; others of what moves would be those of the round's start."""

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self and not {"drift", "step"}.isdisjoint(name.split(".")):
            raise UserError(
                f"terms() asks for the inner product {name} in a later step and not in the first two: ask for it in "
                f"every step"
            )
        return super().get(name, default)


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
    scales: tuple[float, ...]  # of the inner products: a step is the velocity but for its factor, -lr

    @classmethod
    def of(cls, sgd: SGD, asked: Asked) -> Rule:
        momentum = float(sgd.momentum) if sgd.has_momentum else None
        decay = float(sgd.weight_decay) if sgd.has_decay else None
        lr = float(sgd.lr)
        scales = tuple((-lr) ** both.split(".").count("step") for both in asked.pairs)
        return cls(lr, momentum, decay, torch.ones_like(sgd.lr[0, 0]), scales)

    def move(self, pieces: list[Piece], grads: list[Tensor], factors: Sequence[float]) -> list[float]:
        """One step of every piece; the inner products of where they stand then."""
        found = []
        for piece, grad in zip(pieces, grads, strict=True):
            self._move(piece, grad, factors)
            found.append([torch.dot(a, b) for a, b in piece.products])
        whole = found[0] if len(found) == 1 else [torch.stack(parts).sum() for parts in zip(*found, strict=True)]
        return [inner.item() * scale for inner, scale in zip(whole, self.scales, strict=True)]

    def _move(self, piece: Piece, grad: Tensor, factors: Sequence[float]) -> None:
        """The gradient is only read: autograd may have given the same one to two parameters."""
        velocity = piece.velocity
        if self.momentum is None:
            velocity.copy_(grad)
        else:
            torch.addcmul(grad, velocity, self.one, value=self.momentum, out=velocity)
        for vector, factor in zip(piece.terms, factors, strict=True):
            velocity.addcmul_(vector, self.one, value=factor)
        if self.decay is not None:
            velocity.addcmul_(piece.w, self.one, value=self.decay)
        piece.w.addcmul_(velocity, self.one, value=-self.lr)
        if piece.drift is not None:
            piece.drift.addcmul_(velocity, self.one, value=-self.lr)


def _pieces(client: Running, site: Site, asked: Asked) -> list[Piece]:
    sizes = site.net.layout.sizes
    lengths = [sum(sizes)]
    if lengths[0] > SMALL:
        lengths = [len(part) for size in sizes for part in torch.empty(size, device="meta").split(PIECE)]
    # Under the names algorithms use; for the step the velocity, which is the step but for its factor.
    rows = {"w": client.w, "step": client.velocity} | {name: site.notes[name] for name in asked.notes}
    if asked.drift:
        rows["drift"] = torch.zeros_like(site.w)
    cuts = {name: vector[0].split(lengths) for name, vector in rows.items()}
    pairs = [both.split(".") for both in asked.pairs]
    return [
        Piece(
            w=cuts["w"][i],
            velocity=cuts["step"][i],
            drift=cuts["drift"][i] if asked.drift else None,
            terms=tuple(cuts[name][i] for name in asked.factors),
            products=tuple((cuts[a][i], cuts[b][i]) for a, b in pairs),
        )
        for i in range(len(lengths))
    ]


def _cut(grads: tuple[Tensor, ...], whole: bool) -> list[Tensor]:
    flat = [grad.reshape(-1) for grad in grads]
    return [torch.cat(flat)] if whole else [part for grad in flat for part in grad.split(PIECE)]
