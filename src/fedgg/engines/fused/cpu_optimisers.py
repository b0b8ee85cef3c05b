"""Client optimisers for the fused step on a CPU: SGD, Adam and AdamW, in place and piece by piece.

Model, optimiser state and drift are updated in place: for a model of a million parameters, allocating every
intermediate costs as much as the model's own arithmetic. Large parameters are processed in pieces that stay in the
cache from one operation to the next. With inner products by layer (FedGG with one cosine for each layer) no piece
crosses a layer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fedgg.core.algorithm import Client
from fedgg.core.local import LocalState
from fedgg.core.optimisers import CLIP_EPSILON, SGD, Adam, AdamW, Optimiser
from fedgg.core.tensor_rows import Rows, length
from fedgg.engines.fused.term_analysis import StepTerms

PIECE = 1 << 18  # elements
SMALL = 1 << 17  # parameters: smaller models are one piece, since calls cost more than memory traffic


@dataclass(frozen=True)
class Piece:
    """Views of the same range of elements in all vectors."""

    layer: int  # its number in the layout; 0 if coefficients are those of the whole model
    w: Tensor
    optimiser_state: Rows
    step: Tensor  # the last step, but for a factor: `FusedOptimiser.step_factor`
    gradient: Tensor | None  # with the terms, where they are added before the optimiser's arithmetic
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


class FusedOptimiser:
    """An optimiser on pieces of one row, with settings as Python floats.

    Products are added by `addcmul` with a factor of one: torch then rounds the product before the addition, as the rest
    of the library does in two operations, but reads and writes memory once. `add` with an `alpha` would round once, and
    algorithms at their neutral setting would no longer equal FedAvg bit for bit.
    """

    terms_first: bool = False  # whether terms are added to the gradient before the optimiser's arithmetic

    def __init__(
        self,
        optimiser: Optimiser,
        state: LocalState,
        client: Client,
        terms: StepTerms,
        point: Tensor,
        scale: Any,  # by what `Algorithm.nudge` multiplies steps: a number or a column
    ):
        self.terms, self.clips = terms, "clip_norm" in optimiser.used
        self.lr, self.scale = float(optimiser.lr), float(scale)
        self.decay = float(optimiser.weight_decay) if "weight_decay" in optimiser.used else None
        self.clip_norm, self.one = optimiser.clip_norm, torch.ones_like(optimiser.lr[0, 0])
        self.step_row, self.step_factor = self.start(optimiser, state)
        self.gradient_row = torch.empty_like(state.w) if self.clips or (self.terms_first and terms.vectors) else None
        # The inner products are computed with `step_row`.
        self.scales = {pair: self.step_factor ** pair.split(".").count("step") for pair in _pairs(terms)}
        self.pieces = self._pieces(state, point, client)

    def start(self, optimiser: Optimiser, state: LocalState) -> tuple[Tensor, float]:
        """The row of the last step before the first one, and the factor by which that row becomes the step."""
        raise NotImplementedError

    def move(self, piece: Piece, grad: Tensor, coefficients: Sequence[float]) -> None:
        """The step of a piece, with the terms that have coefficients. Does not modify the gradient: autograd may return
        one tensor for two parameters.
        """
        raise NotImplementedError

    def displace(self, coefficients: Sequence[Sequence[float]]) -> None:
        """Sets the points at which the gradient is taken; `coefficients` by layer."""
        for piece in self.pieces:
            piece.point.copy_(piece.w)
            for vector, coefficient in zip(piece.displacement, coefficients[piece.layer], strict=True):
                piece.point.addcmul_(vector, self.one, value=coefficient)

    def step(self, grads: Sequence[Tensor], coefficients: Sequence[Sequence[float]]) -> InnerProducts:
        """Takes one step in place and returns the inner products after it; `coefficients` by layer."""
        products, cut = [], _cut(grads, self.pieces)
        if self.gradient_row is not None:
            cut, coefficients = self._with_terms(cut, coefficients), [()] * len(coefficients)
        for piece, grad in zip(self.pieces, cut, strict=True):
            self.move(piece, grad, coefficients[piece.layer])
            products.append(piece.inner_products())
        if self.terms.layer_products:
            return self._sums_by_layer(products)
        single = len(products) == 1
        totals = products[0] if single else [torch.stack(parts).sum() for parts in zip(*products, strict=True)]
        return InnerProducts(
            [total.item() * scale for total, scale in zip(totals, self.scales.values(), strict=True)], [()]
        )

    def first_products(self) -> InnerProducts:
        """The inner products before the first step: zero, but for those by layer of notes."""
        if self.terms.layer_products:
            return self._sums_by_layer([piece.inner_products() for piece in self.pieces], is_first=True)
        return InnerProducts([0.0] * len(self.terms.inner_products), [()])

    def _with_terms(self, grads: Sequence[Tensor], coefficients: Sequence[Sequence[float]]) -> list[Tensor]:
        """The gradient with the terms, scaled down where it is longer than `clip_norm`."""
        assert self.gradient_row is not None
        steered = []
        for piece, grad in zip(self.pieces, grads, strict=True):
            assert piece.gradient is not None
            steered.append(piece.gradient.copy_(grad))
            for vector, coefficient in zip(piece.terms, coefficients[piece.layer], strict=True):
                piece.gradient.addcmul_(vector, self.one, value=coefficient)
        if self.clips:
            factor = (self.clip_norm / (length(self.gradient_row) + CLIP_EPSILON)).clamp_max(1.0)
            if float(factor) != 1.0:
                self.gradient_row.mul_(factor)
        return steered

    def _sums_by_layer(self, products: list[list[Tensor]], is_first: bool = False) -> InnerProducts:
        """`is_first`: there was no step, though clients may have kept a velocity."""
        pieces = self.pieces
        layers = [dict.fromkeys(self.scales, 0.0) for _ in range(pieces[-1].layer + 1)]
        values = torch.stack([product for of_piece in products for product in of_piece]).view(len(pieces), -1).tolist()
        for piece, of_piece in zip(pieces, values, strict=True):
            for (pair, scale), value in zip(self.scales.items(), of_piece, strict=True):
                layers[piece.layer][pair] += 0.0 if is_first and "step" in pair.split(".") else value * scale
        return InnerProducts(
            [sum(sums[pair] for sums in layers) for pair in self.terms.inner_products],
            [[sums[pair] for pair in self.terms.layer_products] for sums in layers],
        )

    def _pieces(self, state: LocalState, point: Tensor, client: Client) -> list[Piece]:
        layout, terms = client.net.layout, self.terms
        layers = layout.layers if terms.layer_products else ((0, layout.total),)
        lengths = [end - start for start, end in layers]
        if layout.total > SMALL:  # each parameter by itself, whose gradients need not be joined
            lengths = [len(part) for size in layout.sizes for part in torch.empty(size, device="meta").split(PIECE)]
        ends = [end for _, end in layers]
        rows = {"w": state.w, "step": self.step_row} | {name: client.notes[name] for name in terms.notes}
        if terms.drift:
            rows["drift"] = torch.zeros_like(client.w)
        cuts, points = {name: vector[0].split(lengths) for name, vector in rows.items()}, point[0].split(lengths)
        vectors = {name: x for name, x in state.optimiser_state.items() if x.shape == state.w.shape}
        of_state = {name: vector[0].split(lengths) for name, vector in vectors.items()}
        gradients = None if self.gradient_row is None else self.gradient_row[0].split(lengths)
        pairs = [pair.split(".") for pair in _pairs(terms)]
        return [
            Piece(
                layer=bisect_left(ends, end),
                w=cuts["w"][i],
                optimiser_state={name: parts[i] for name, parts in of_state.items()},
                step=cuts["step"][i],
                gradient=gradients and gradients[i],
                drift=cuts["drift"][i] if terms.drift else None,
                terms=tuple(cuts[name][i] for name in terms.vectors),
                point=points[i],
                displacement=tuple(cuts[name][i] for name in terms.displacement),
                products=tuple((cuts[a][i], cuts[b][i]) for a, b in pairs),
            )
            for i, end in enumerate(accumulate(lengths))
        ]


class FusedSGD(FusedOptimiser):
    """The row of the last step is the velocity."""

    def start(self, optimiser: Optimiser, state: LocalState) -> tuple[Tensor, float]:
        self.momentum = float(optimiser.momentum) if "momentum" in optimiser.used else None
        return state.optimiser_state["velocity"], -self.lr * self.scale

    def move(self, piece: Piece, grad: Tensor, coefficients: Sequence[float]) -> None:
        velocity = piece.step
        if self.momentum is None:
            velocity.copy_(grad)
        else:
            torch.addcmul(grad, velocity, self.one, value=self.momentum, out=velocity)
        terms = () if self.gradient_row is not None else piece.terms  # those are in the gradient
        for vector, coefficient in zip(terms, coefficients, strict=True):
            velocity.addcmul_(vector, self.one, value=coefficient)
        if self.decay is not None:
            velocity.addcmul_(piece.w, self.one, value=self.decay)
        piece.w.addcmul_(velocity, self.one, value=self.step_factor)
        if piece.drift is not None:
            piece.drift.addcmul_(velocity, self.one, value=self.step_factor)


class FusedAdam(FusedOptimiser):
    """Adam and AdamW."""

    terms_first = True

    def start(self, optimiser: Optimiser, state: LocalState) -> tuple[Tensor, float]:
        assert isinstance(optimiser, Adam)
        self.adam, self.count = optimiser, state.optimiser_state["count"]
        self.beta1, self.beta2, self.epsilon = (
            float(value) for value in (optimiser.beta1, optimiser.beta2, optimiser.epsilon)
        )
        self.buffer = torch.empty_like(state.w[0, : min(max(PIECE, SMALL), state.w.shape[1])])
        return torch.empty_like(state.w), 1.0

    def step(self, grads: Sequence[Tensor], coefficients: Sequence[Sequence[float]]) -> InnerProducts:
        self.count.add_(1)
        self.corrections = [float(1 - beta**self.count) for beta in (self.adam.beta1, self.adam.beta2)]
        return super().step(grads, coefficients)

    def move(self, piece: Piece, grad: Tensor, coefficients: Sequence[float]) -> None:
        step, buffer = piece.step, self.buffer[: len(piece.w)]
        first, second = piece.optimiser_state["first"], piece.optimiser_state["second"]
        if self.decay is not None and not self.adam.decoupled:
            grad = torch.addcmul(grad, piece.w, self.one, value=self.decay, out=step)
        first.mul_(self.beta1).addcmul_(grad, self.one, value=1 - self.beta1)
        torch.mul(grad, grad, out=buffer)
        second.mul_(self.beta2).addcmul_(buffer, self.one, value=1 - self.beta2)
        torch.div(second, self.corrections[1], out=buffer).sqrt_().add_(self.epsilon)
        torch.div(first, self.corrections[0], out=step).mul_(-self.lr).div_(buffer)
        if self.decay is not None and self.adam.decoupled:
            step.addcmul_(piece.w, self.one, value=-self.lr * self.decay)
        if self.scale != 1.0:
            step.mul_(self.scale)
        piece.w.add_(step)
        if piece.drift is not None:
            piece.drift.add_(step)


FUSED: dict[type[Optimiser], type[FusedOptimiser]] = {SGD: FusedSGD, Adam: FusedAdam, AdamW: FusedAdam}


def _pairs(terms: StepTerms) -> list[str]:
    """The inner products that are computed, of the model or by layer."""
    return list(dict.fromkeys((*terms.inner_products, *terms.layer_products)))


def _cut(grads: Sequence[Tensor], pieces: list[Piece]) -> list[Tensor]:
    flat = [grad.reshape(-1) for grad in grads]
    if sum(map(len, flat)) > SMALL:
        return [part for grad in flat for part in grad.split(PIECE)]
    return list(torch.cat(flat).split([len(piece.w) for piece in pieces]))
