"""Programs: graphs of layers with hand-written kernels for many rows, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedgg.core.layout import Layout
from fedgg.engines.layers.row_layers import RowConvolution, TokenDense
from fedgg.engines.layers.stacked_layers import (
    HERE,
    Dense,
    Flatten,
    Layer,
    MaskKeys,
    Parameters,
    SideWork,
    Stepper,
    WideDense,
)

if TYPE_CHECKING:
    from fedgg.kernels.optimiser_step import Wide


ALIGNMENT = 64  # row lengths are padded to multiples of this, since matrix kernels read aligned words


class Program:
    """The layers in order; called with rows and inputs, differentiable in the rows."""

    def __init__(
        self,
        layers: Sequence[Layer],
        layout: Layout,
        products: torch.dtype | None = None,
        inputs: Sequence[tuple[int, ...]] | None = None,
        stepped: Sequence[str] = (),
    ):
        """`inputs`: the values that each layer reads, if not the one before; 0 is the input, n layer n's output.

        `stepped`: weights whose step the kernel of their gradient can take.
        """
        self.layers = tuple(layers)
        self.inputs = tuple(inputs or [(number,) for number in range(len(layers))])
        self.layout = layout
        self.products = products  # the type of matrix products, if not that of the rows
        self._first = next(n for n, layer in enumerate(self.layers) if not isinstance(layer, Flatten))
        self._depends = [False]  # whether each value depends on the rows
        for layer, of_layer in zip(self.layers, self.inputs, strict=True):
            self._depends.append(bool(layer.parameter_names) or any(self._depends[value] for value in of_layer))
        self._deferred: list[Wide] | None = None
        self._short: Tensor | None = None
        self._written: Callable[[Tensor, int], None] | None = None
        self._side = HERE
        self._stepper: Stepper | None = None
        starts = dict(zip(layout.names, accumulate(layout.sizes, initial=0), strict=False))
        self.stepped = {name: starts[name] for name in stepped}  # the place of these weights in the row
        self._spans = {True: _spans(self.layers, layout, self.stepped), False: _spans(self.layers, layout)}

    def spans(self, *, stepped: bool) -> tuple[tuple[int, int], ...]:
        """Parts of the row, first and last parameter each, whose gradients are complete one after another.

        With `stepped`, all but the weights whose step the kernel of their gradient takes.
        """
        return tuple(sorted(span for spans in self._spans[stepped].values() for span in spans))

    @contextmanager
    def stepping(
        self, short: Tensor | None, side: SideWork, written: Callable[[Tensor, int], None], stepper: Stepper | None
    ) -> Iterator[None]:
        """Within, forward passes read `short` for the rows in the type of products, if there is one.

        In backward passes, `written` is called with the gradient and the number of a span as soon as all that completes
        it is launched, as side work or before; its parameters are not read any more. With `stepper`, spans are all but
        what that steps.
        """
        self._short, self._side, self._written, self._stepper = short, side, written, stepper
        try:
            yield
        finally:
            self._short, self._side, self._written, self._stepper = None, HERE, None, None

    def short_rows(self, w: Tensor) -> Tensor | None:
        """A copy of the rows in the type of matrix products; None where that is their own."""
        if self.products is None:
            return None
        if not w.is_cuda:
            return w.to(self.products)
        from fedgg.kernels import cast_rows

        return cast_rows.cast(w, padded_rows(w, self.products))

    @property
    def first(self) -> Layer:
        """The first layer that is not `Flatten`."""
        return self.layers[self._first]

    @property
    def _last_linear(self) -> Dense | None:
        """The last layer if it is a linear one with inputs `[K, B, F]`."""
        last = self.layers[-1]
        return last if isinstance(last, Dense) and not isinstance(last, TokenDense) else None

    def can_defer(self, batch: int) -> bool:
        """Whether the first layer's weight gradient can be computed in the optimiser step, for this batch size."""
        return isinstance(self.first, WideDense) and self.first.supports(batch)

    @contextmanager
    def deferring(self) -> Iterator[list[Wide]]:
        """Backward passes within append the factors of the first layer's weight gradient instead of computing it."""
        self._deferred = []
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def __call__(self, w: Tensor, x: Tensor, keys: Tensor | None = None, step: Tensor | int = 0) -> Tensor:
        return self.seen(w, x, keys, step)[0]

    def seen(self, w: Tensor, x: Tensor, keys: Tensor | None = None, step: Tensor | int = 0) -> tuple[Tensor, Tensor]:
        """The outputs, and the input of the last layer."""
        outputs: tuple[Tensor, Tensor] = _Run.apply(w, x, self, (keys, step))  # type: ignore[no-untyped-call]
        return outputs

    def offers(self, head: str) -> bool:
        """Whether the last layer is the linear layer of this name and not the only layer."""
        last = self._last_linear
        return last is not None and last.weight == f"{head}.weight" and self._first < len(self.layers) - 1

    def mean_loss(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor | None:
        """Mean cross entropy `[K, 1]` by one kernel, or None if there are too many outputs for it."""
        from fedgg.kernels import loss

        if not loss.supports(*outputs.shape[1:]):
            return None
        loss_: Tensor = _MeanLoss.apply(outputs, y, mask)  # type: ignore[no-untyped-call]
        return loss_

    def forward(self, w: Tensor, x: Tensor, mask_keys: MaskKeys = (None, 0)) -> tuple[Tensor, list[Any]]:
        """Outputs, and a list for the backward pass: the parameters used, then what each layer saves."""
        exact = self.layout.unflatten(w)
        if self.products is None:
            parameters = Parameters(exact, exact)
        else:
            short = self.short_rows(w) if self._short is None else self._short
            assert short is not None
            parameters = Parameters(exact, self.layout.unflatten(short))
        saved: list[Any] = [parameters]
        values = [x]
        for layer, inputs in zip(self.layers, self.inputs, strict=True):
            first, *others = (values[number] for number in inputs)
            y, layer_saved = layer.forward(first, parameters, mask_keys, *others)
            values.append(y)
            saved.append(layer_saved)
        return values[-1].to(w.dtype), saved

    def by_torch(self, w: Tensor, x: Tensor, keys: Tensor | None = None, step: int = 0) -> Tensor:
        """The reference: the same row by row, in torch operations and the rows' precision."""
        outputs = []
        for k in range(len(w)):
            values, parameters = [x[k]], self.layout.unflatten(w[k])
            if self.layout.pixelwise:
                parameters = {name: parameter.flatten().view(parameter.shape) for name, parameter in parameters.items()}
            for layer, inputs in zip(self.layers, self.inputs, strict=True):
                first, *others = (values[number] for number in inputs)
                values.append(layer.by_torch(first, parameters, (None if keys is None else keys[k], step), *others))
            outputs.append(values[-1])
        return torch.stack(outputs)

    def into_last(self, saved: list[Any], like: Tensor) -> Tensor:
        """The input of the last layer, as saved by the forward pass; empty if that layer is not linear."""
        if self._last_linear is None:
            return like.new_empty(0)
        x: Tensor = saved[-1][0]
        return x.detach().to(like.dtype)  # detached: an output must not refer to a saved tensor

    def _write_gradients_of(self, names: Sequence[str]) -> None:
        """Excludes weights that no kernel computes a gradient of from those stepped by it: seen in the first pass."""
        if any(name in self.stepped for name in names):
            assert self._stepper is None, "which layers the loss depends on has changed"
            self.stepped = {name: place for name, place in self.stepped.items() if name not in names}
            self._spans[True] = _spans(self.layers, self.layout, self.stepped)

    def _report(self, grad: Tensor, number: int) -> None:
        """That the backward pass of this layer is launched."""
        if self._written is not None:
            stepped = self._stepper is not None
            for span in self._spans[stepped].get(number, ()):
                self._written(grad, self.spans(stepped=stepped).index(span))

    def backward(self, w: Tensor, grad: Tensor, saved: list[Any], to_last: Tensor | None = None) -> Tensor:
        """The rows' gradient, from those of the outputs and of the last layer's input (`to_last`)."""
        result = padded_rows(w)
        parameters, *saved = saved
        parameters = replace(parameters, side=self._side, stepper=self._stepper)
        into = self.layout.unflatten(result)
        upstream = {len(self.layers): grad}  # the gradients of values
        for number in reversed(range(self._first, len(self.layers))):
            layer, inputs = self.layers[number], self.inputs[number]
            of_output = upstream.pop(number + 1, None)
            if of_output is None:  # the loss does not depend on it
                for name in layer.parameter_names:
                    into[name].zero_()
                self._write_gradients_of(layer.parameter_names)
                self._report(result, number)
                continue
            if self._deferred is not None and number == self._first and isinstance(layer, WideDense):
                self._deferred.append(layer.deferred(of_output, saved[number], into))
                return result
            to_input = any(self._depends[value] for value in inputs)
            if not (layer.parameter_names or to_input):
                continue  # no span ends here: one that does has parameters
            joined = []  # a gradient of the same value that the layer adds to its own
            if isinstance(layer, RowConvolution) and inputs[0] in upstream:
                joined.append(upstream.pop(inputs[0]))
            grads = layer.backward(of_output, saved[number], parameters, into, to_input, *joined)
            for value, of_value in zip(inputs, grads if isinstance(grads, tuple) else (grads,), strict=True):
                if self._depends[value] and of_value is not None:
                    upstream[value] = upstream[value] + of_value if value in upstream else of_value
            self._report(result, number)
            if to_last is not None and number == len(self.layers) - 1 and inputs[0] in upstream:
                of_input = upstream[inputs[0]]
                upstream[inputs[0]] = of_input + to_last.to(of_input.dtype)
        return result


def padded_rows(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised rows `[K, P]` that start at aligned addresses."""
    length = like.shape[1]
    return like.new_empty((len(like), -(-length // ALIGNMENT) * ALIGNMENT), dtype=dtype)[:, :length]


SPAN = 1 << 19  # parameters of a span, at least: shorter ones cost more launches than they save time


def _spans(layers: Sequence[Layer], layout: Layout, stepped: Container[str] = ()) -> dict[int, list[tuple[int, int]]]:
    """By the number of the layer whose backward pass completes them, parts of the row behind earlier parts' start.

    Backward passes run from the last layer to the first, so that parts are complete from the end of the row. Weights
    that are stepped elsewhere are in no part.
    """
    ends = dict(zip(layout.names, accumulate(layout.sizes), strict=True))
    missing = {name: end - size for (name, end), size in zip(ends.items(), layout.sizes, strict=True)}
    runs: list[list[str]] = [[]]  # of neighbouring parameters
    for name in layout.names:
        if name in stepped:
            runs.append([])
        else:
            runs[-1].append(name)
    unfinished = [(missing[run[0]], ends[run[-1]], run) for run in runs if run]
    spans: dict[int, list[tuple[int, int]]] = {}
    for number in reversed(range(len(layers))):
        for name in layers[number].parameter_names:
            missing.pop(name, None)
        for place, (begin, behind, run) in enumerate(unfinished):
            left = [name for name in run if name in missing]
            start = max((ends[name] for name in left), default=begin)
            if behind - start >= SPAN or (not left and start < behind):
                spans.setdefault(number, []).append((start, behind))
                unfinished[place] = (begin, start, run)
    return spans


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, program: Program, mask_keys: MaskKeys) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        outputs, ctx.saved = program.forward(w.detach(), x, mask_keys)
        ctx.w, ctx.program, ctx.shape = w.detach(), program, outputs.shape
        return outputs, program.into_last(ctx.saved, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, to_last: Tensor | None) -> tuple[Tensor, None, None, None]:
        if grad is None:  # the loss depends on the representation only
            grad = ctx.w.new_zeros(ctx.shape)
        return ctx.program.backward(ctx.w, grad, ctx.saved, to_last), None, None, None


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        from fedgg.kernels import loss

        mean, ctx.slope = loss.mean_cross_entropy(outputs.detach(), y, mask)
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.slope * grad[:, :, None], None, None
