"""The fused step on a GPU: terms, momentum, weight decay and update of all rows in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedgg import kernels
from fedgg.core.algorithm import Algorithm, Batch, Client
from fedgg.core.local import LocalState, gradient
from fedgg.core.optimisers import SGD
from fedgg.core.tensor_rows import Rows
from fedgg.engines.fused.term_analysis import (
    StepTerms,
    analyse_terms,
    check_later_terms,
    is_independent_of_values,
    trace_terms,
)
from fedgg.engines.fused.term_coefficients import Coefficients, SplitTrace, split_trace
from fedgg.engines.layers.program import Program
from fedgg.engines.layers.stacked_layers import SideWork

if TYPE_CHECKING:
    from fedgg.kernels.optimiser_step import Pass, Shared, Wide


@dataclass(frozen=True)
class FusedPlan:
    """The terms of an algorithm's steps and how their coefficients are computed."""

    terms: StepTerms
    split: SplitTrace | None  # None: coefficients are computed by calling `Algorithm.terms`
    reusable: bool  # whether the plan does not depend on values, so that it holds for later rounds

    @classmethod
    def of(cls, algorithm: Algorithm, client: Client) -> FusedPlan | None:
        """None if the kernel cannot take the step: not a sum of terms, too many of them, or a gradient not at w."""
        from fedgg.kernels import optimiser_step

        terms = analyse_terms(algorithm, client)
        if (
            terms is None
            or terms.displacement
            or len(terms.notes) > optimiser_step.VECTORS
            or len(terms.inner_products) > optimiser_step.MOST_SUMS
        ):
            return None
        check_later_terms(algorithm, client, terms)
        trace = trace_terms(algorithm, client, terms.inner_products)
        split = split_trace(trace, _places(terms)) if trace else None
        has_nudge = type(algorithm).nudge is not Algorithm.nudge
        names = terms.inner_products
        reusable = not has_nudge and trace is not None and is_independent_of_values(trace, algorithm, client, names)
        return cls(terms, split, reusable)


@dataclass(frozen=True, eq=False)
class FusedStep:
    """Inputs of the kernel besides the rows, at fixed addresses."""

    terms: StepTerms
    parts: Tensor  # [K, inner products, blocks]: partial sums of the current inner products
    leads: Rows  # of the anchor and of each note: the first row with the same content, [K] int32
    plain: bool  # whether the loss is the supervised loss
    wide: Program | None  # if set, the kernel computes the weight gradient of this program's first layer
    program: Program | None  # if set, spans of its rows are stepped as soon as their gradients are complete
    short: Tensor | None  # the rows in the program's type of matrix products
    coefficients: Coefficients | None  # None: computed by calling `Algorithm.terms`
    side: torch.cuda.Stream
    gradient_stream: torch.cuda.Stream  # gradients of parameters, beside the backward pass of the layers before them
    step_stream: torch.cuda.Stream  # steps of parts of the rows, likewise

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        client: Client,
        owners: list[int],
        program: Program | None,
        width: int,
        plans: FusedPlans,
        rule: Hashable,
    ) -> FusedStep | None:
        """None if there is no kernel for it: on a CPU, or if the step is not a sum of few terms."""
        if not client.w.is_cuda or not kernels.available():
            return None
        from fedgg.kernels import optimiser_step

        plan = plans.get(rule) or FusedPlan.of(algorithm, client)
        if plan is None:
            return None
        if plan.reusable:
            plans[rule] = plan
        terms = plan.terms
        shared = (["anchor"] if terms.drift else []) + list(terms.notes)
        rows, length = client.w.shape
        plain = type(algorithm).loss is Algorithm.loss  # one forward pass, so one weight gradient to defer
        program = program if plain else None
        wide = program if program is not None and program.can_defer(width) else None
        if wide is not None or program is None or (len(program.spans) < 2 and not program.stepped):
            program = None  # small rows take one step
        wide_parameters = math.prod(client.net.layout.shapes[0]) if wide else 0
        spans = program.spans if program else ()
        blocks = optimiser_step.blocks(length, wide_parameters, spans) + sum(_blocks_of_stepped(program).values())
        short = program.short_rows(client.w) if program else None
        return cls(
            terms,
            client.w.new_zeros(rows, len(terms.inner_products), blocks),
            {name: optimiser_step.leads(client.notes[name], owners) for name in shared},
            plain,
            wide,
            program,
            short,
            plan.split.of(algorithm, client) if plan.split else None,
            torch.cuda.Stream(client.w.device, priority=-2),
            torch.cuda.Stream(client.w.device, priority=-1),
            torch.cuda.Stream(client.w.device),  # of lower priority: the backward pass does not wait for steps
        )

    def step(self, algorithm: Algorithm, sgd: SGD, running: LocalState, client: Client, batch: Batch) -> None:
        """Updates `running` and `parts` in place. Small kernels run on a second stream, beside the large ones."""
        from fedgg.kernels import optimiser_step

        here = torch.cuda.current_stream()
        at_work = torch.ones_like(running.step, dtype=torch.bool) if batch.at_work is None else batch.at_work
        with self._on_side_stream(here):
            sums = {} if self.plain and self.coefficients else self.sums()
            client = replace(client, step=running.step, w=running.w, last_step=None, sums=sums)
            move = self._pass(algorithm, sgd, running, client, at_work)
        if not self.plain:
            here.wait_stream(self.side)  # the algorithm's `loss` may read the sums
        deferring: AbstractContextManager[list[Wide]] = self.wide.deferring() if self.wide else nullcontext([])
        side, steps = SideWork(self.gradient_stream), SideWork(self.step_stream)
        with deferring as deferred, self._stepping(move, side, steps):
            loss, grad = gradient(algorithm, running.w, batch, client)
        here.wait_stream(self.side)
        with self._on_side_stream(here):
            count = batch.mask.sum(1, keepdim=True) * at_work
            running.step.add_(at_work)
            running.loss_sum.add_(torch.where(at_work, loss, 0) * count)
            running.seen.add_(count)
        if self.program is None:
            with torch.no_grad():
                optimiser_step.advance(move, grad, *deferred)
        else:
            here.wait_stream(self.gradient_stream)
            here.wait_stream(self.step_stream)
            side.end()
            steps.end()
        here.wait_stream(self.side)

    def _stepping(self, move: Pass, side: SideWork, steps: SideWork) -> AbstractContextManager[None]:
        """Within, gradients of parameters are computed beside the backward pass, and the program's spans stepped."""
        from fedgg.kernels import optimiser_step

        if self.program is None:
            return nullcontext()

        def written(grad: Tensor, span: int) -> None:
            self.step_stream.wait_stream(self.side)  # the coefficients
            self.step_stream.wait_stream(self.gradient_stream)
            steps.run(partial(optimiser_step.advance_span, move, grad, span), grad)

        blocks = _blocks_of_stepped(self.program)
        first = self.parts.shape[2] - sum(blocks.values())
        places = dict(zip(blocks, accumulate(blocks.values(), initial=first), strict=False))
        stepper = _StepperOfWeights(self.program.stepped, places, move, steps, self.side, self.step_stream)
        return self.program.stepping(self.short, side, written, stepper)

    @property
    def captured(self) -> object:
        """The part that a captured graph contains as constants."""
        return self.terms, self.coefficients and (self.coefficients.operations, self.coefficients.results)

    @contextmanager
    def _on_side_stream(self, here: torch.cuda.Stream) -> Iterator[None]:
        """Runs on the side stream after the work launched so far; in a captured step, a branch of the graph."""
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side), torch.no_grad():
            yield

    def _pass(self, algorithm: Algorithm, sgd: SGD, running: LocalState, client: Client, at_work: Tensor) -> Pass:
        from fedgg.kernels.optimiser_step import Pass

        names = _places(self.terms)
        return Pass(
            w=running.w,
            velocity=running.optimiser_state["velocity"],
            anchor=self._shared("anchor", client) if self.terms.drift else None,
            vectors=[self._shared(name, client) for name in self.terms.notes],
            factors=self._factors(algorithm, running, client) if self.terms.vectors else sgd.lr,  # not read
            has_factor=[name in self.terms.vectors for name in names],
            lr=sgd.lr,
            momentum=sgd.momentum if "momentum" in sgd.used else None,
            decay=sgd.weight_decay if "weight_decay" in sgd.used else None,
            at_work=at_work,
            parts=self.parts,
            pairs=tuple(self._vector_numbers(pair) for pair in self.terms.inner_products),
            spans=self.program.spans if self.program else (),
            short=self.short,
        )

    def _factors(self, algorithm: Algorithm, running: LocalState, client: Client) -> Tensor:
        if self.coefficients is not None:
            return self.coefficients.at(running.step, self.parts)
        terms = algorithm.terms(client)
        return torch.cat([_column(terms.get(name, 0.0), running.step) for name in _places(self.terms)], 1)

    def sums(self) -> Rows:
        """The inner products, summed from their parts in a fixed order."""
        if not self.terms.inner_products:
            return {}
        totals = self.parts.sum(2)
        return {name: totals[:, number : number + 1] for number, name in enumerate(self.terms.inner_products)}

    def _shared(self, name: str, client: Client) -> Shared:
        from fedgg.kernels.optimiser_step import Shared

        return Shared(client.notes[name], self.leads[name])

    def _vector_numbers(self, pair: str) -> tuple[int, int]:
        order = ["drift", "step", *self.terms.notes]
        a, b = pair.split(".")
        return order.index(a), order.index(b)


def _blocks_of_stepped(program: Program | None) -> dict[str, int]:
    """The number of partial sums of weights whose step the kernel of their gradient takes, by their names."""
    from fedgg.kernels import weight_gradient_step

    if program is None:
        return {}
    shapes = dict(zip(program.layout.names, program.layout.shapes, strict=True))
    sizes = {name: (shapes[name][0], math.prod(shapes[name][1:]), shapes[name][1]) for name in program.stepped}
    return {name: weight_gradient_step.blocks(*size) for name, size in sizes.items()}


@dataclass(frozen=True, eq=False)
class _StepperOfWeights:
    weights: Mapping[str, int]
    blocks: Mapping[str, int]  # the place of the first partial sum
    move: Pass
    side_work: SideWork
    coefficients: torch.cuda.Stream
    step_stream: torch.cuda.Stream

    def take(self, name: str, x: Tensor, grad: Tensor, geometry: Any) -> None:
        from fedgg.kernels import weight_gradient_step

        self.step_stream.wait_stream(self.coefficients)
        offset, first_block = self.weights[name], self.blocks[name]
        self.side_work.run(
            partial(weight_gradient_step.advance, self.move, x, grad, geometry, offset, first_block), x, grad
        )


# The key is all that a plan depends on: the algorithm's class and settings, and the shapes of its tensors.
FusedPlans = dict[Hashable, FusedPlan]


def _places(terms: StepTerms) -> tuple[str, ...]:
    """The vectors a step may add, in the kernel's order."""
    return ("drift", *terms.notes, "", "")[:3]


def _column(value: float | Tensor, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full_like(like, value)
