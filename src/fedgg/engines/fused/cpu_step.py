"""The fused step on a CPU, for one client whose steps are sums of terms.

Model, velocity and drift are updated in place, and gradients are read from the tensors autograd returns: for a model of
a million parameters, allocating every intermediate costs as much as the model's own arithmetic. Large parameters are
processed in pieces that stay in the cache from one operation to the next. Compared with FedAvg, FedGG then costs the
memory traffic of two more vectors, one of which is updated, and three inner products; its coefficients are one function
of Python floats. With inner products by layer (FedGG with one cosine for each layer) no piece crosses a layer, and the
function is called once for each layer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Client
from fedgg.core.local import LocalEnd, LocalStart, LocalState, end_round, local_round, open_round
from fedgg.core.model import Net
from fedgg.core.optimisers import SGD, Optimiser
from fedgg.core.tensor_rows import Rows
from fedgg.engines.fused.net import FusedForward, fused_net
from fedgg.engines.fused.term_analysis import StepTerms, analyse_terms, constant_columns, later_terms, trace_terms
from fedgg.engines.fused.term_coefficients import as_python_function
from fedgg.errors import UserError

# Of the step's index, the inner products, and those of one layer.
CoefficientFunction = Callable[[int, Sequence[float], Sequence[float]], Sequence[float]]

PIECE = 1 << 18  # elements
SMALL = 1 << 17  # parameters: smaller models are one piece, since calls cost more than memory traffic


@dataclass(frozen=True)
class Piece:
    """Views of the same range of elements in all vectors."""

    layer: int  # its number in the layout; 0 if coefficients are those of the whole model
    w: Tensor
    velocity: Tensor
    drift: Tensor | None  # if a term or an inner product needs it
    terms: tuple[Tensor, ...]  # vectors that are added, each times a coefficient
    point: Tensor  # where the gradient is taken: w itself, or a displaced copy of it
    displacement: tuple[Tensor, ...]
    products: tuple[tuple[Tensor, Tensor], ...]  # pairs whose inner products are needed: `_pairs`

    def inner_products(self) -> list[Tensor]:
        return [torch.dot(a, b) for a, b in self.products]


@dataclass(frozen=True)
class InnerProducts:
    """The inner products after a step."""

    model: Sequence[float]  # of `StepTerms.inner_products`
    layers: Sequence[Sequence[float]]  # of `StepTerms.layer_products`, for each layer; of the model: one, empty


def fused_round(
    algorithm: Algorithm, net: Net, optimiser: Optimiser, start: LocalStart, batches: Iterable[Batch]
) -> LocalEnd:
    """`core.local.local_round` with the fused step if a single row on a CPU takes SGD steps that are a sum of terms.

    Otherwise with the reference step.
    """
    net = fused_net(net)
    running, client = open_round(algorithm, net, optimiser, start)
    alone = len(start.w) == 1 and start.w.device.type == "cpu" and start.many is None
    terms = None
    if alone and can_fuse(optimiser, start) and type(algorithm).loss is Algorithm.loss:
        terms = analyse_terms(algorithm, client)
    coefficients = None if terms is None else _coefficients(algorithm, client, terms)
    if terms is None or coefficients is None:
        return local_round(algorithm, net, optimiser, start, batches, (running, client))
    assert isinstance(optimiser, SGD)
    running, sums = fused_steps(optimiser, client, terms, coefficients, batches)
    return end_round(algorithm, start, running, client, sums)


def can_fuse(optimiser: Optimiser, start: LocalStart) -> bool:
    """Whether the fused steps compute this: SGD from a zero velocity in shared parameters alone; on a CPU unclipped."""
    clips = "clip_norm" in optimiser.used and not start.w.is_cuda
    return type(optimiser) is SGD and not clips and not start.keeps_optimiser_state and not start.personal


def fused_steps(
    sgd: SGD, client: Client, terms: StepTerms, coefficients: CoefficientFunction, batches: Iterable[Batch]
) -> tuple[LocalState, Rows]:
    """All steps of one row whose objective is the supervised loss: the final state and its inner products."""
    forward = client.net
    assert isinstance(forward, FusedForward)
    zero = torch.zeros_like(client.w[:, :1])
    state = LocalState(
        w=client.w.clone(),
        optimiser_state={"velocity": torch.zeros_like(client.w)},
        last_step=None,
        step=zero.clone(),
        loss_sum=zero.clone(),
        seen=zero.clone(),
    )
    point = torch.empty_like(state.w) if terms.displacement else state.w
    pieces, optimiser = _pieces(state, point, client, terms), FusedSGD.of(sgd, terms)
    sums = optimiser.first_products(pieces)
    views = list(forward.layout.unflatten(point[0]).values())
    for number, batch in enumerate(batches):
        forward.step = number
        factors = [coefficients(number, sums.model, of_layer) for of_layer in sums.layers]
        if terms.displacement:
            optimiser.displace(pieces, [of_layer[len(terms.vectors) :] for of_layer in factors])
        leaves = [view.detach().requires_grad_() for view in views]
        loss = forward.loss_with(leaves, batch.x, batch.y, batch.mask)
        # Without grad_outputs, which are ones for a loss of one element: to compare shapes torch would import sympy.
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            steps = [of_layer[: len(terms.vectors)] for of_layer in factors]
            sums = optimiser.step(pieces, _cut(grads, pieces), steps)
            count = batch.mask.sum(1, keepdim=True)
            state.step.add_(1)
            state.loss_sum.add_(loss.detach() * count)
            state.seen.add_(count)
    return replace(state, last_step=-sgd.lr * state.optimiser_state["velocity"]), _tensors(terms, sums.model, zero)


def _coefficients(algorithm: Algorithm, client: Client, terms: StepTerms) -> CoefficientFunction | None:
    """The function that computes the coefficients of a step: of its terms, then of its displacement, in their order.

    None where they are by layer and `terms` cannot be traced: it may combine values of several layers.
    """
    trace = trace_terms(algorithm, client, terms)
    zero = torch.zeros_like(client.w[:, :1])

    def by_tensors(number: int, sums: Sequence[float], of_layer: Sequence[float]) -> Sequence[float]:
        inner_products = _CurrentInnerProducts(_tensors(terms, sums, zero))
        coefficients = later_terms(algorithm, replace(client, sums=inner_products), number, terms)
        return [float(coefficient) for coefficient in coefficients.values()]

    if trace is None:
        return None if terms.layer_products else by_tensors
    function = as_python_function(trace)
    constants = [column.item() for column in constant_columns(trace, algorithm, client)]
    largest = torch.finfo(client.w.dtype).max  # a larger value is infinite in the rows' precision
    return lambda number, sums, of_layer: [
        x if -largest <= x <= largest or x != x else math.copysign(math.inf, x)
        for x in function(number, *sums, *of_layer, *constants)
    ]


def _tensors(terms: StepTerms, sums: Sequence[float], like: Tensor) -> Rows:
    values = torch.tensor(sums, dtype=torch.float64).to(like.dtype)  # too large a value becomes infinite
    return {pair: values[number].view(1, 1) for number, pair in enumerate(terms.inner_products)}


class _CurrentInnerProducts(dict[str, Tensor]):
    """The inner products of the current step; UserError for another one of drift or step, which is not up to date."""

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self and not {"drift", "step"}.isdisjoint(name.split(".")):
            raise UserError(
                f"terms() reads the inner product {name} in a later step but not in the first two: read it in every "
                f"step"
            )
        return super().get(name, default)


@dataclass(frozen=True)
class FusedSGD:
    """SGD on pieces, with settings as Python floats.

    Products are added by `addcmul` with a factor of one: torch then rounds the product before the addition, as the rest
    of the library does in two operations, but reads and writes memory once. `add` with an `alpha` would round once, and
    algorithms at their neutral setting would no longer equal FedAvg bit for bit.
    """

    lr: float
    momentum: float | None
    decay: float | None
    one: Tensor
    terms: StepTerms
    scales: dict[str, float]  # of the inner products, which are computed with velocity = step / -lr

    @classmethod
    def of(cls, sgd: SGD, terms: StepTerms) -> FusedSGD:
        momentum = float(sgd.momentum) if "momentum" in sgd.used else None
        decay = float(sgd.weight_decay) if "weight_decay" in sgd.used else None
        lr = float(sgd.lr)
        scales = {pair: (-lr) ** pair.split(".").count("step") for pair in _pairs(terms)}
        return cls(lr, momentum, decay, torch.ones_like(sgd.lr[0, 0]), terms, scales)

    def displace(self, pieces: list[Piece], coefficients: Sequence[Sequence[float]]) -> None:
        """Sets the points at which the gradient is taken; `coefficients` by layer."""
        for piece in pieces:
            piece.point.copy_(piece.w)
            for vector, coefficient in zip(piece.displacement, coefficients[piece.layer], strict=True):
                piece.point.addcmul_(vector, self.one, value=coefficient)

    def step(
        self, pieces: list[Piece], grads: Sequence[Tensor], coefficients: Sequence[Sequence[float]]
    ) -> InnerProducts:
        """Takes one step in place and returns the inner products after it; `coefficients` by layer."""
        products = []
        for piece, grad in zip(pieces, grads, strict=True):
            self._step(piece, grad, coefficients[piece.layer])
            products.append(piece.inner_products())
        if self.terms.layer_products:
            return self._sums_by_layer(pieces, products)
        single = len(products) == 1
        totals = products[0] if single else [torch.stack(parts).sum() for parts in zip(*products, strict=True)]
        return InnerProducts(
            [total.item() * scale for total, scale in zip(totals, self.scales.values(), strict=True)], [()]
        )

    def first_products(self, pieces: list[Piece]) -> InnerProducts:
        """The inner products before the first step: zero, but for those by layer of notes."""
        if self.terms.layer_products:
            return self._sums_by_layer(pieces, [piece.inner_products() for piece in pieces])
        return InnerProducts([0.0] * len(self.terms.inner_products), [()])

    def _sums_by_layer(self, pieces: list[Piece], products: list[list[Tensor]]) -> InnerProducts:
        layers = [dict.fromkeys(self.scales, 0.0) for _ in range(pieces[-1].layer + 1)]
        values = torch.stack([product for of_piece in products for product in of_piece]).view(len(pieces), -1).tolist()
        for piece, of_piece in zip(pieces, values, strict=True):
            for (pair, scale), value in zip(self.scales.items(), of_piece, strict=True):
                layers[piece.layer][pair] += value * scale
        return InnerProducts(
            [sum(sums[pair] for sums in layers) for pair in self.terms.inner_products],
            [[sums[pair] for pair in self.terms.layer_products] for sums in layers],
        )

    def _step(self, piece: Piece, grad: Tensor, coefficients: Sequence[float]) -> None:
        """Does not modify the gradient: autograd may return one tensor for two parameters."""
        velocity = piece.velocity
        if self.momentum is None:
            velocity.copy_(grad)
        else:
            torch.addcmul(grad, velocity, self.one, value=self.momentum, out=velocity)
        for vector, coefficient in zip(piece.terms, coefficients, strict=True):
            velocity.addcmul_(vector, self.one, value=coefficient)
        if self.decay is not None:
            velocity.addcmul_(piece.w, self.one, value=self.decay)
        piece.w.addcmul_(velocity, self.one, value=-self.lr)
        if piece.drift is not None:
            piece.drift.addcmul_(velocity, self.one, value=-self.lr)


def _pieces(state: LocalState, point: Tensor, client: Client, terms: StepTerms) -> list[Piece]:
    layout = client.net.layout
    layers = layout.layers if terms.layer_products else ((0, layout.total),)
    lengths = [end - start for start, end in layers]
    if layout.total > SMALL:  # each parameter by itself, whose gradients need not be joined
        lengths = [len(part) for size in layout.sizes for part in torch.empty(size, device="meta").split(PIECE)]
    ends = [end for _, end in layers]
    # Under the names algorithms use; "step" is the velocity, which differs from the step by the factor -lr.
    rows = {"w": state.w, "step": state.optimiser_state["velocity"]} | {
        name: client.notes[name] for name in terms.notes
    }
    if terms.drift:
        rows["drift"] = torch.zeros_like(client.w)
    cuts, points = {name: vector[0].split(lengths) for name, vector in rows.items()}, point[0].split(lengths)
    pairs = [pair.split(".") for pair in _pairs(terms)]
    return [
        Piece(
            layer=bisect_left(ends, end),
            w=cuts["w"][i],
            velocity=cuts["step"][i],
            drift=cuts["drift"][i] if terms.drift else None,
            terms=tuple(cuts[name][i] for name in terms.vectors),
            point=points[i],
            displacement=tuple(cuts[name][i] for name in terms.displacement),
            products=tuple((cuts[a][i], cuts[b][i]) for a, b in pairs),
        )
        for i, end in enumerate(accumulate(lengths))
    ]


def _pairs(terms: StepTerms) -> list[str]:
    """The inner products that are computed, of the model or by layer."""
    return list(dict.fromkeys((*terms.inner_products, *terms.layer_products)))


def _cut(grads: tuple[Tensor, ...], pieces: list[Piece]) -> list[Tensor]:
    flat = [grad.reshape(-1) for grad in grads]
    if sum(map(len, flat)) > SMALL:
        return [part for grad in flat for part in grad.split(PIECE)]
    return list(torch.cat(flat).split([len(piece.w) for piece in pieces]))
