"""The fused step on a CPU, for one client whose steps are sums of terms.

Gradients are read from the tensors autograd returns, and the optimiser works in place (`cpu_optimisers`). Compared with
FedAvg, FedGG then costs the memory traffic of two more vectors, one of which is updated, and three inner products; its
coefficients are one function of Python floats, which is called once for each layer where inner products are by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Client, Number
from fedgg.core.local import LocalEnd, LocalStart, LocalState, end_round, local_round, open_round, second_point
from fedgg.core.model import Net
from fedgg.core.optimisers import Optimiser
from fedgg.core.tensor_rows import Rows
from fedgg.engines.fused.cpu_optimisers import FUSED
from fedgg.engines.fused.net import FusedForward, fused_net
from fedgg.engines.fused.step_scale import step_scale
from fedgg.engines.fused.term_analysis import (
    StepTerms,
    analyse_terms,
    constant_columns,
    later_terms,
    takes_second_gradient,
    trace_terms,
)
from fedgg.engines.fused.term_coefficients import as_python_function
from fedgg.errors import UserError

# Of the step's index, the inner products, and those of one layer.
CoefficientFunction = Callable[[int, Sequence[float], Sequence[float]], Sequence[float]]


def fused_round(
    algorithm: Algorithm, net: Net, optimiser: Optimiser, start: LocalStart, batches: Iterable[Batch]
) -> LocalEnd:
    """`core.local.local_round` with the fused step where `_fused_terms` finds that it computes the same.

    Otherwise with the reference step.
    """
    net = fused_net(net)
    running, client = open_round(algorithm, net, optimiser, start)
    terms, scale = _fused_terms(algorithm, optimiser, start, client), step_scale(algorithm, client)
    coefficients = None if terms is None else _coefficients(algorithm, client, terms)
    if terms is None or coefficients is None or scale is None:
        return local_round(algorithm, net, optimiser, start, batches, (running, client))
    if start.keeps_optimiser_state:  # these rows are the client's
        running = replace(running, optimiser_state={name: x.clone() for name, x in running.optimiser_state.items()})
    running, sums = fused_steps(algorithm, optimiser, running, client, terms, coefficients, scale, batches)
    return end_round(algorithm, start, running, client, sums)


def _fused_terms(algorithm: Algorithm, optimiser: Optimiser, start: LocalStart, client: Client) -> StepTerms | None:
    """The terms of a single row on a CPU whose objective is the supervised loss; None: the reference step is taken."""
    if len(start.w) > 1 or start.w.device.type != "cpu" or start.many is not None or start.personal:
        return None
    if type(optimiser) not in FUSED or type(algorithm).loss is not Algorithm.loss:
        return None
    return analyse_terms(algorithm, client)


def fused_steps(
    algorithm: Algorithm,
    optimiser: Optimiser,
    running: LocalState,
    client: Client,
    terms: StepTerms,
    coefficients: CoefficientFunction,
    scale: Number,
    batches: Iterable[Batch],
) -> tuple[LocalState, Rows]:
    """All steps of one row: the final state and its inner products. Changes `running.optimiser_state` in place.

    `scale`: by what `nudge` multiplies steps.
    """
    forward = client.net
    assert isinstance(forward, FusedForward)
    zero = torch.zeros_like(client.w[:, :1])
    state = replace(running, w=client.w.clone(), step=zero.clone(), loss_sum=zero.clone(), seen=zero.clone())
    point = torch.empty_like(state.w) if terms.displacement else state.w
    fused = FUSED[type(optimiser)](optimiser, state, client, terms, point, scale)
    sums, takes_two, views = fused.first_products(), takes_second_gradient(algorithm), _parameters(forward, point)
    for number, batch in enumerate(batches):
        forward.step = number
        factors = [coefficients(number, sums.model, of_layer) for of_layer in sums.layers]
        if terms.displacement:
            fused.displace([of_layer[len(terms.vectors) :] for of_layer in factors])
        statistics_before = forward.with_copied_buffers() if takes_two else forward
        loss, grads = _gradient(forward, views, batch)
        if takes_two:  # the statistics that remain, and the loss, are those of the first pass
            last_step = fused.step_factor * fused.step_row if number else torch.zeros_like(state.w)
            current = _tensors(terms, sums.model, zero)
            here = replace(client, step=state.step, w=state.w, last_step=last_step, sums=current)
            second = second_point(algorithm, torch.cat([grad.reshape(-1) for grad in grads])[None], state.w, here)
            if second is not None:
                _, grads = _gradient(statistics_before, _parameters(forward, second), batch)
        with torch.no_grad():
            sums = fused.step(grads, [of_layer[: len(terms.vectors)] for of_layer in factors])
            count = batch.mask.sum(1, keepdim=True)
            state.step.add_(1)
            state.loss_sum.add_(loss * count)
            state.seen.add_(count)
    return replace(state, last_step=fused.step_factor * fused.step_row), _tensors(terms, sums.model, zero)


def _parameters(forward: FusedForward, row: Tensor) -> list[Tensor]:
    return list(forward.layout.unflatten(row[0]).values())


def _gradient(forward: FusedForward, parameters: Sequence[Tensor], batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss of one row and its gradient, parameter by parameter."""
    leaves = [parameter.detach().requires_grad_() for parameter in parameters]
    loss = forward.loss_with(leaves, batch.x, batch.y, batch.mask)
    # Without grad_outputs, which are ones for a loss of one element: to compare shapes torch would import sympy.
    return loss.detach(), torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


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
