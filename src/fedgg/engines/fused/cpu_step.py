"""The fused step on a CPU, for one client whose steps are sums of terms: everything in place, vectors read once.

Gradients stay where autograd leaves them, one for each parameter, and model, velocity and drift are moved in place: for
a model of a million parameters, fresh memory for every intermediate costs as much as the model's own arithmetic. Long
parameters are done piece by piece, so that a piece is still in the cache when its next operation comes. What FedGG
costs beside FedAvg is reading and writing: two vectors more, one of which moves, and three inner products; its
coefficients are one function of plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedgg.core.algorithm import Algorithm, Batch, Client
from fedgg.core.client_rows import Rows
from fedgg.core.forward import Forward, RowsForward
from fedgg.core.local import SGD, LocalEnd, LocalStart, LocalState, end_round, local_round, open_round
from fedgg.core.model import Net
from fedgg.engines.fused import per_example_gradients
from fedgg.engines.fused.conv_pool import with_fused_pooling
from fedgg.engines.fused.term_analysis import StepTerms, analyse_terms, constant_columns, later_terms, trace_terms
from fedgg.engines.fused.term_coefficients import as_python_function
from fedgg.engines.module_equivalence import Trial, agree
from fedgg.errors import UserError


class FusedNet(Net):
    """Made by `fused_net`."""

    row_module: nn.Module  # on a CPU with fused pooling, where there is something to fuse

    def bind(
        self,
        buffers: Rows,
        *,
        train: bool,
        keys: Tensor | None = None,
        many: RowsForward | None = None,
        per_row: Rows | None = None,
    ) -> FusedForward:
        return FusedForward(self, buffers, train, keys, 0, many, per_row or {})

    def fisher(self, row: Tensor, buffers: Rows, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        return per_example_gradients.fisher(self, row, buffers, chunks)


class FusedForward(Forward):
    """Single rows on a CPU, with fused pooling."""

    _net: FusedNet

    def loss_with(self, parameters: Sequence[Tensor], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """`loss` for one row whose parameters are given one by one, in the layout's order."""
        net = self._net
        net.set_mode(self._train)
        outputs = self._alone(dict(zip(net.layout.names, parameters, strict=True)), x[0], 0)
        return self.mean_loss(outputs[None], y, mask)


def fused_net(net: Net) -> FusedNet:
    """The same net for the fused step: one object for each net, with that net's settings of this moment."""
    if isinstance(net, FusedNet):
        return net
    twin: FusedNet = net.facts.setdefault("fused net", FusedNet.__new__(FusedNet))
    pooled = vars(twin).get("row_module")
    vars(twin).update(vars(net))
    twin.row_module = _pooled(net) if pooled is None else pooled
    return twin


def _pooled(net: Net) -> nn.Module:
    """The module with fused pooling, if there is something to fuse and it computes the same."""
    module = with_fused_pooling(net.module)
    if module is net.module or net.start.is_cuda:
        return net.module
    trial = Trial.of(net)
    if trial is None:
        return net.module
    candidate = FusedNet.__new__(FusedNet)
    vars(candidate).update(vars(trial.net), row_module=with_fused_pooling(trial.net.module))
    same = agree(partial(trial.with_buffers, trial.net), partial(trial.with_buffers, candidate), trial.tolerance)
    return module if same else net.module


CoefficientFunction = Callable[
    [int, Sequence[float]], Sequence[float]
]  # from the number of the step and the inner products

PIECE = 1 << 18  # numbers
SMALL = 1 << 17  # models that are done in one piece: calls cost more than memory there


@dataclass(frozen=True)
class Piece:
    """A stretch of the row, in every vector: views."""

    w: Tensor
    velocity: Tensor
    drift: Tensor | None  # where a term or an inner product needs it
    terms: tuple[Tensor, ...]  # what is added, each times a coefficient
    products: tuple[tuple[Tensor, Tensor], ...]  # whose inner products are needed


def fused_round(algorithm: Algorithm, net: Net, sgd: SGD, start: LocalStart, batches: Iterable[Batch]) -> LocalEnd:
    """`core.local.local_round` with the fused step, where one row on a CPU takes steps that are a sum of terms.

    Other rows take the reference step.
    """
    net = fused_net(net)
    running, client = open_round(algorithm, net, sgd, start)
    alone = len(start.w) == 1 and start.w.device.type == "cpu" and start.many is None
    terms = analyse_terms(algorithm, client) if alone and type(algorithm).loss is Algorithm.loss else None
    if terms is None:
        return local_round(algorithm, net, sgd, start, batches, (running, client))
    running, sums = fused_steps(algorithm, sgd, client, terms, batches)
    return end_round(algorithm, start, running, client, sums)


def fused_steps(
    algorithm: Algorithm, sgd: SGD, client: Client, terms: StepTerms, batches: Iterable[Batch]
) -> tuple[LocalState, Rows]:
    """All steps of one row whose objective is the supervised loss: where it stands then, and its inner products."""
    forward = client.net
    assert isinstance(forward, FusedForward)
    zero = torch.zeros_like(client.w[:, :1])
    state = LocalState(
        w=client.w.clone(),
        velocity=torch.zeros_like(client.w),
        last_step=None,
        step=zero.clone(),
        loss_sum=zero.clone(),
        seen=zero.clone(),
    )
    pieces, optimiser = _pieces(state, client, terms), FusedSGD.of(sgd, terms)
    coefficients = _coefficients(algorithm, client, terms)
    sums: Sequence[float] = [0.0] * len(terms.inner_products)
    views = list(forward.layout.unflatten(state.w[0]).values())
    for number, batch in enumerate(batches):
        forward.step = number
        leaves = [view.detach().requires_grad_() for view in views]
        loss = forward.loss_with(leaves, batch.x, batch.y, batch.mask)
        grads = torch.autograd.grad(loss, leaves, torch.ones_like(loss), allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            sums = optimiser.move(pieces, _cut(grads, len(pieces) == 1), coefficients(number, sums))
            count = batch.mask.sum(1, keepdim=True)
            state.step.add_(1)
            state.loss_sum.add_(loss.detach() * count)
            state.seen.add_(count)
    return state, _tensors(terms, sums, zero)


def _coefficients(algorithm: Algorithm, client: Client, terms: StepTerms) -> CoefficientFunction:
    """The coefficients of a step's terms, in their order."""
    trace, zero = trace_terms(algorithm, client, terms.inner_products), torch.zeros_like(client.w[:, :1])

    def by_tensors(number: int, sums: Sequence[float]) -> Sequence[float]:
        known = _InnerProducts(_tensors(terms, sums, zero))
        coefficients = later_terms(algorithm, replace(client, sums=known), number, terms)
        return [float(coefficient) for coefficient in coefficients.values()]

    if trace is None:
        return by_tensors
    function, rest = as_python_function(trace), [column.item() for column in constant_columns(trace, algorithm, client)]
    most = torch.finfo(
        client.w.dtype
    ).max  # beyond it a number of the rows' precision is infinite, and the run diverges
    return lambda number, sums: [
        x if -most <= x <= most or x != x else math.copysign(math.inf, x) for x in function(number, *sums, *rest)
    ]


def _tensors(terms: StepTerms, sums: Sequence[float], like: Tensor) -> Rows:
    exact = torch.tensor(sums, dtype=torch.float64).to(like.dtype)  # too large a number becomes infinite
    return {both: exact[number].view(1, 1) for number, both in enumerate(terms.inner_products)}


class _InnerProducts(dict[str, Tensor]):
    """The inner products at hand; others of moving vectors would be those of the round's start."""

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self and not {"drift", "step"}.isdisjoint(name.split(".")):
            raise UserError(
                f"terms() asks for the inner product {name} in a later step and not in the first two: ask for it in "
                f"every step"
            )
        return super().get(name, default)


@dataclass(frozen=True)
class FusedSGD:
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
    def of(cls, sgd: SGD, terms: StepTerms) -> FusedSGD:
        momentum = float(sgd.momentum) if sgd.has_momentum else None
        decay = float(sgd.weight_decay) if sgd.has_decay else None
        lr = float(sgd.lr)
        scales = tuple((-lr) ** both.split(".").count("step") for both in terms.inner_products)
        return cls(lr, momentum, decay, torch.ones_like(sgd.lr[0, 0]), scales)

    def move(self, pieces: list[Piece], grads: list[Tensor], coefficients: Sequence[float]) -> list[float]:
        """One step of every piece; the inner products of where they stand then."""
        products = []
        for piece, grad in zip(pieces, grads, strict=True):
            self._move(piece, grad, coefficients)
            products.append([torch.dot(a, b) for a, b in piece.products])
        one = len(products) == 1
        whole = products[0] if one else [torch.stack(parts).sum() for parts in zip(*products, strict=True)]
        return [inner.item() * scale for inner, scale in zip(whole, self.scales, strict=True)]

    def _move(self, piece: Piece, grad: Tensor, coefficients: Sequence[float]) -> None:
        """The gradient is only read: autograd may have given the same one to two parameters."""
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


def _pieces(state: LocalState, client: Client, terms: StepTerms) -> list[Piece]:
    sizes = client.net.layout.sizes
    lengths = [sum(sizes)]
    if lengths[0] > SMALL:
        lengths = [len(part) for size in sizes for part in torch.empty(size, device="meta").split(PIECE)]
    # Under the names algorithms use; for the step the velocity, which is the step but for its coefficient.
    rows = {"w": state.w, "step": state.velocity} | {name: client.notes[name] for name in terms.notes}
    if terms.drift:
        rows["drift"] = torch.zeros_like(client.w)
    cuts = {name: vector[0].split(lengths) for name, vector in rows.items()}
    pairs = [both.split(".") for both in terms.inner_products]
    return [
        Piece(
            w=cuts["w"][i],
            velocity=cuts["step"][i],
            drift=cuts["drift"][i] if terms.drift else None,
            terms=tuple(cuts[name][i] for name in terms.vectors),
            products=tuple((cuts[a][i], cuts[b][i]) for a, b in pairs),
        )
        for i in range(len(lengths))
    ]


def _cut(grads: tuple[Tensor, ...], whole: bool) -> list[Tensor]:
    flat = [grad.reshape(-1) for grad in grads]
    return [torch.cat(flat)] if whole else [part for grad in flat for part in grad.split(PIECE)]
