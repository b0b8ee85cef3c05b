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
from fedgg.core.algorithm import Algorithm, Batch, Client, Number
from fedgg.core.local import LocalState, gradient
from fedgg.core.optimisers import CLIP_EPSILON, SGD
from fedgg.core.tensor_rows import Rows
from fedgg.engines.fused.step_scale import step_scale
from fedgg.engines.fused.term_analysis import (
    DISPLACED,
    StepTerms,
    analyse_terms,
    check_later_terms,
    is_independent_of_values,
    takes_second_gradient,
    trace_terms,
)
from fedgg.engines.fused.term_coefficients import Coefficients, SplitTrace, split_trace
from fedgg.engines.layers.program import Program, padded_rows
from fedgg.engines.layers.stacked_layers import SideWork

if TYPE_CHECKING:
    from fedgg.kernels.clip_gradient import Clipping
    from fedgg.kernels.optimiser_step import Pass, Shared, Span, Wide


@dataclass(frozen=True)
class FusedPlan:
    """The terms of an algorithm's steps and how their coefficients are computed."""

    terms: StepTerms
    split: SplitTrace | None  # None: coefficients are computed by calling `Algorithm.terms`
    displaced: SplitTrace | None  # the same of the displacement's
    reusable: bool  # whether the plan does not depend on values, so that it holds for later rounds

    @classmethod
    def of(cls, algorithm: Algorithm, client: Client) -> FusedPlan | None:
        """None if the kernel cannot take the step: not a sum of terms, too many of them, or factors by layer."""
        from fedgg.kernels import optimiser_step

        terms = analyse_terms(algorithm, client)
        if (
            terms is None
            or terms.layer_products  # the kernel has one coefficient for each vector
            or max(len(terms.of_step.notes), len(terms.of_displacement.notes)) > optimiser_step.VECTORS
            or len(terms.inner_products) > optimiser_step.MOST_SUMS
        ):
            return None
        check_later_terms(algorithm, client, terms)
        trace = trace_terms(algorithm, client, terms)
        split = split_trace(trace, _places(terms.of_step)) if trace else None
        places = tuple(f"{DISPLACED}{name}" for name in _places(terms.of_displacement))
        displaced = split_trace(trace, places) if trace and terms.displacement else None
        reusable = trace is not None and is_independent_of_values(trace, algorithm, client, terms)
        return cls(terms, split, displaced, reusable)


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
    displaced: Coefficients | None  # the same of the displacement; None also where there is none
    lr: Tensor  # [K, 1] with what `Algorithm.nudge` multiplies steps by
    clipping: Clipping | None
    second: bool  # whether `Algorithm.second_displacement` asks for another gradient
    side: torch.cuda.Stream
    gradient_stream: torch.cuda.Stream  # gradients of parameters, beside the backward pass of the layers before them
    step_stream: torch.cuda.Stream  # steps of parts of the rows, likewise

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        client: Client,
        sgd: SGD,
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

        scale, plan = step_scale(algorithm, client), plans.get(rule) or FusedPlan.of(algorithm, client)
        if scale is None or plan is None:
            return None
        if plan.reusable:
            plans[rule] = plan
        terms = plan.terms
        shared = (["anchor"] if terms.drift else []) + list(terms.notes)
        rows, length = client.w.shape
        plain = type(algorithm).loss is Algorithm.loss  # one forward pass, so one weight gradient to defer
        program = program if plain else None
        clips = "clip_norm" in sgd.used  # with clipping, steps are taken when all gradients are there
        wide = program if program is not None and not clips and program.can_defer(width) else None
        stepped = _blocks_of_stepped(program) if program is not None and not clips else {}
        spans = program.spans(stepped=not clips) if program is not None and wide is None else ()
        if len(spans) < 2 and not stepped:
            program, spans = None, ()  # small rows take one step
        wide_parameters = math.prod(client.net.layout.shapes[0]) if wide else 0
        short = program.short_rows(client.w) if program and not terms.displacement else None
        blocks = optimiser_step.blocks(length, wide_parameters, () if clips else spans) + sum(stepped.values())
        return cls(
            terms,
            client.w.new_zeros(rows, len(terms.inner_products), blocks),
            {name: optimiser_step.leads(client.notes[name], owners) for name in shared},
            plain,
            wide,
            program,
            short,
            plan.split.of(algorithm, client) if plan.split else None,
            plan.displaced.of(algorithm, client) if plan.displaced else None,
            sgd.lr * scale,
            _clipping(sgd.clip_norm, client.w, spans) if clips else None,
            takes_second_gradient(algorithm),
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
            sums = {} if self.plain and self._all_traced and not self.second else self.sums()
            client = replace(client, step=running.step, w=running.w, last_step=None, sums=sums)
            move = self._pass(algorithm, sgd, running, client, at_work)
            factors = self._displacement(algorithm, running, client)
        if not self.plain or self.second or factors is not None:
            here.wait_stream(self.side)  # the algorithm's `loss` may read the sums
        point, short = (running.w, self.short) if factors is None else self._displaced(running.w, client, factors)
        side, first_loss = _SideWorks(SideWork(self.gradient_stream), SideWork(self.step_stream)), None
        if self.program is not None:
            for stream in (self.gradient_stream, self.step_stream):
                stream.wait_stream(here)  # both are part of a captured step, whatever they are used for
        if self.second:
            statistics_before = client.net.with_copied_buffers()  # those that remain are of the first pass
            with self._stepping(None, side, short):
                first_loss, grad = gradient(algorithm, point, batch, client)
            self._end_side_work(here, side)
            point, short = _moved(algorithm, grad, running.w, client), None
            client = replace(client, net=statistics_before)
        deferring: AbstractContextManager[list[Wide]] = self.wide.deferring() if self.wide else nullcontext([])
        with deferring as deferred, self._stepping(move, side, short):
            loss, grad = gradient(algorithm, point, batch, client)
        loss = loss if first_loss is None else first_loss
        here.wait_stream(self.side)
        with self._on_side_stream(here):
            count = batch.mask.sum(1, keepdim=True) * at_work
            running.step.add_(at_work)
            running.loss_sum.add_(torch.where(at_work, loss, 0) * count)
            running.seen.add_(count)
        self._end_side_work(here, side)
        if self.clipping is not None:
            self._set_clip_factors(self.clipping, move, grad)
        if self.program is None or self.clipping is not None:
            with torch.no_grad():
                optimiser_step.advance(move, grad, *deferred)
        here.wait_stream(self.side)

    def _stepping(self, move: Pass | None, side: _SideWorks, short: Tensor | None) -> AbstractContextManager[None]:
        """Within, gradients of parameters are computed beside the backward pass, and parts of the rows stepped.

        With clipping, only the squares of the spans are summed there. Without `move`, gradients are all.
        """
        from fedgg.kernels import clip_gradient, optimiser_step

        if self.program is None:
            return nullcontext()

        def written(grad: Tensor, span: int) -> None:
            if move is None:
                return
            if self.clipping is not None:
                self.gradient_stream.wait_stream(self.side)  # the coefficients
                side.gradients.run(partial(clip_gradient.sum_squares, move, grad, self.clipping, span), grad)
            else:
                self.step_stream.wait_stream(self.side)
                self.step_stream.wait_stream(self.gradient_stream)
                side.steps.run(partial(optimiser_step.advance_span, move, grad, span), grad)

        if move is None or self.clipping is not None:
            return self.program.stepping(short, side.gradients, written, None)
        blocks = _blocks_of_stepped(self.program)
        first = self.parts.shape[2] - sum(blocks.values())
        places = dict(zip(blocks, accumulate(blocks.values(), initial=first), strict=False))
        stepper = _StepperOfWeights(self.program.stepped, places, move, side.steps, self.side, self.step_stream)
        return self.program.stepping(short, side.gradients, written, stepper)

    def _end_side_work(self, here: torch.cuda.Stream, side: _SideWorks) -> None:
        for stream in (self.gradient_stream, self.step_stream) if self.program is not None else ():
            here.wait_stream(stream)  # without a program they are not part of the captured step
        side.gradients.end()
        side.steps.end()

    def _set_clip_factors(self, clipping: Clipping, move: Pass, grad: Tensor) -> None:
        from fedgg.kernels import clip_gradient

        if self.program is None:
            clip_gradient.sum_squares(move, grad, clipping)
        clip_gradient.set_factors(clipping, CLIP_EPSILON)

    def _displaced(self, w: Tensor, client: Client, factors: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows at which the gradient is taken, and their copy in the program's type of matrix products."""
        from fedgg.kernels import displaced_rows

        terms, products = self.terms.of_displacement, self.program.products if self.program else None
        point, short = padded_rows(w), None if products is None else padded_rows(w, products)
        anchor = self._shared("anchor", client) if terms.drift else None
        displaced_rows.displace(w, anchor, [self._shared(name, client) for name in terms.notes], factors, point, short)
        return point, short

    @property
    def captured(self) -> object:
        """The part that a captured graph contains as constants."""
        traced = [part and (part.operations, part.results) for part in (self.coefficients, self.displaced)]
        return self.terms, tuple(traced)

    @property
    def _all_traced(self) -> bool:
        return self.coefficients is not None and not (self.terms.displacement and self.displaced is None)

    @contextmanager
    def _on_side_stream(self, here: torch.cuda.Stream) -> Iterator[None]:
        """Runs on the side stream after the work launched so far; in a captured step, a branch of the graph."""
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side), torch.no_grad():
            yield

    def _pass(self, algorithm: Algorithm, sgd: SGD, running: LocalState, client: Client, at_work: Tensor) -> Pass:
        from fedgg.kernels.optimiser_step import Pass

        terms = self.terms.of_step
        return Pass(
            w=running.w,
            velocity=running.optimiser_state["velocity"],
            anchor=self._shared("anchor", client) if terms.drift else None,
            vectors=[self._shared(name, client) for name in terms.notes],
            factors=self._factors(algorithm, running, client) if terms.vectors else sgd.lr,  # not read
            has_factor=[name in terms.vectors for name in _places(terms)],
            lr=self.lr,
            momentum=sgd.momentum if "momentum" in sgd.used else None,
            decay=sgd.weight_decay if "weight_decay" in sgd.used else None,
            at_work=at_work,
            parts=self.parts,
            pairs=tuple(self._vector_numbers(pair) for pair in self.terms.inner_products),
            spans=self.program.spans(stepped=True) if self.program and not self.clipping else (),
            short=self.short,
            clip=self.clipping.factor if self.clipping else None,
        )

    def _factors(self, algorithm: Algorithm, running: LocalState, client: Client) -> Tensor:
        if self.coefficients is not None:
            return self.coefficients.at(running.step, self.parts)
        return _factors_of(algorithm.terms(client), self.terms.of_step, running.step)

    def _displacement(self, algorithm: Algorithm, running: LocalState, client: Client) -> Tensor | None:
        """The factors of the displacement; None: there is none."""
        if not self.terms.displacement:
            return None
        if self.displaced is not None:
            return self.displaced.at(running.step, self.parts)
        return _factors_of(algorithm.displacement(client), self.terms.of_displacement, running.step)

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
        order = ["drift", "step", *self.terms.of_step.notes]
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


@dataclass(frozen=True)
class _SideWorks:
    gradients: SideWork
    steps: SideWork


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


def _factors_of(factors: Mapping[str, Number], terms: StepTerms, like: Tensor) -> Tensor:
    return torch.cat([_column(factors.get(name, 0.0), like) for name in _places(terms)], 1)


def _column(value: float | Tensor, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full_like(like, value)


def _clipping(longest: Tensor, w: Tensor, spans: tuple[Span, ...]) -> Clipping:
    from fedgg.kernels import clip_gradient

    parts = w.new_zeros(len(w), clip_gradient.blocks(w.shape[1], spans))
    return clip_gradient.Clipping(longest, parts, torch.ones_like(longest), spans)


def _moved(algorithm: Algorithm, grad: Tensor, w: Tensor, client: Client) -> Tensor:
    """Where the second gradient is taken."""
    with torch.no_grad():
        second = algorithm.second_displacement(grad, w, client)
        return w if second is None else torch.add(w, second, out=padded_rows(w))
