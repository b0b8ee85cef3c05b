"""Programs: sequences of layers with hand-written kernels for many rows, and the modules they can replace.

An `nn.Sequential` of small convolutions with ReLU and 2 x 2 max-pool, linear layers with or without ReLU, dropout and
`Flatten` has a program, and so has any other module with convolutions whose `forward` can be traced
(`engines.layers.traced_layers`). Others are run by `torch.func.vmap`, which is slower and gives the same results up to
rounding.

Kernels compute in the run's precision, in which a comparison cannot tell a wrong layer from a rounded one: in bf16 a
rounded activation may win a max-pool it should have lost, and gradients of single weights may be off by their own size.
Therefore two comparisons are made. The reference of the layers, in torch operations, must equal the module's forward
pass in float64 to nine digits: this detects a misread module. The kernels' outputs and gradients must be close to this
reference, within a tolerance for the precision: this detects kernels that fail for these sizes or on this GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedgg import kernels
from fedgg.core.layout import Layout
from fedgg.core.model import Net
from fedgg.engines.base import Precision
from fedgg.engines.fused.conv_pool import is_2x2_max_pool
from fedgg.engines.layers.row_layers import RowConvolution, TokenDense
from fedgg.engines.layers.stacked_layers import (
    HERE,
    Convolution,
    ConvolutionReluPool,
    Dense,
    Dropout,
    Flatten,
    Layer,
    MaskKeys,
    Pair,
    Parameters,
    SideWork,
    WideDense,
)
from fedgg.engines.layers.traced_layers import traced_layers
from fedgg.engines.module_equivalence import STEP, Trial, agree, is_plain, parts_in_order, shares_parameters

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
    ):
        """`inputs`: the values that each layer reads, if not the one before; 0 is the input, n layer n's output."""
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
        self._spans = _spans(self.layers, layout)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Parts of the row, first and last parameter each, whose gradients are complete one after another."""
        return tuple(sorted(self._spans.values()))

    @contextmanager
    def stepping(self, short: Tensor | None, side: SideWork, written: Callable[[Tensor, int], None]) -> Iterator[None]:
        """Within, forward passes read `short` for the rows in the type of products, if there is one.

        In backward passes, `written` is called with the gradient and the number of a span as soon as all that completes
        it is launched, as side work or before; its parameters are not read any more.
        """
        self._short, self._side, self._written = short, side, written
        try:
            yield
        finally:
            self._short, self._side, self._written = None, HERE, None

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

    def backward(self, w: Tensor, grad: Tensor, saved: list[Any], to_last: Tensor | None = None) -> Tensor:
        """The rows' gradient, from those of the outputs and of the last layer's input (`to_last`)."""
        result = padded_rows(w)
        parameters, *saved = saved
        parameters = replace(parameters, side=self._side)
        into = self.layout.unflatten(result)
        upstream = {len(self.layers): grad}  # the gradients of values
        for number in reversed(range(self._first, len(self.layers))):
            layer, inputs = self.layers[number], self.inputs[number]
            of_output = upstream.pop(number + 1)
            if self._deferred is not None and number == self._first and isinstance(layer, WideDense):
                self._deferred.append(layer.deferred(of_output, saved[number], into))
                return result
            to_input = any(self._depends[value] for value in inputs)
            if not (layer.parameter_names or to_input):
                continue  # no span ends here: one that does has parameters
            grads = layer.backward(of_output, saved[number], parameters, into, to_input)
            for value, of_value in zip(inputs, grads if isinstance(grads, tuple) else (grads,), strict=True):
                if self._depends[value] and of_value is not None:
                    upstream[value] = upstream[value] + of_value if value in upstream else of_value
            if self._written is not None and number in self._spans:
                self._written(result, self.spans.index(self._spans[number]))
            if to_last is not None and number == len(self.layers) - 1 and inputs[0] in upstream:
                of_input = upstream[inputs[0]]
                upstream[inputs[0]] = of_input + to_last.to(of_input.dtype)
        return result


def padded_rows(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised rows `[K, P]` that start at aligned addresses."""
    length = like.shape[1]
    return like.new_empty((len(like), -(-length // ALIGNMENT) * ALIGNMENT), dtype=dtype)[:, :length]


SPAN = 1 << 20  # parameters of a span, at least: shorter ones cost more launches than they save time


def _spans(layers: Sequence[Layer], layout: Layout) -> dict[int, tuple[int, int]]:
    """By the number of the layer whose backward pass completes it, the part of the row behind earlier parts' start.

    Backward passes run from the last layer to the first, so that parts are complete from the end of the row.
    """
    ends = dict(zip(layout.names, accumulate(layout.sizes), strict=True))
    missing = {name: end - size for (name, end), size in zip(ends.items(), layout.sizes, strict=True)}
    spans: dict[int, tuple[int, int]] = {}
    behind = layout.total
    for number in reversed(range(len(layers))):
        for name in layers[number].parameter_names:
            missing.pop(name, None)
        start = max((ends[name] for name in missing), default=0)
        if behind - start >= SPAN or (not missing and start < behind):
            spans[number], behind = (start, behind), start
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


# Tolerated relative distances from float64, of outputs and of gradients. In gradients, the distance due to rounding is
# of the order of the square root of the share of ReLUs and max-pools that it flips: measured in bf16, up to 0.22 for
# the library's CNN and 0.36 for VGG-16 (outputs: 0.007). Unrelated results are at a distance of 1 or more.
NEAR: dict[Precision, tuple[float, float]] = {
    "fp64": (1e-9, 1e-9), "fp32": (1e-3, 0.05), "tf32": (0.02, 0.5), "bf16": (0.1, 0.7)
}  # fmt: skip

Match = tuple[Layer, int]  # a layer, and how many of the module's parts it replaces
Convolutions = Callable[[str, list[nn.Module]], Match | None]  # of the parameter names' prefix and the next parts


def program_of(net: Net, precision: Precision) -> Program | None:
    """The net's program for many rows, or None if it has none: not on a GPU, not float32, or without one that agrees.

    A net in the pixelwise layout has the program of its traced layers, others that of a sequence of small layers.
    """
    key = f"program {precision} {net.layout.pixelwise}"
    if key not in net.facts:
        build = _traced_program if net.layout.pixelwise else _small_program
        can_run = net.start.is_cuda and net.start.dtype == torch.float32 and kernels.available()
        program = build(net, precision) if can_run else None
        net.facts[key] = None if program is None else checked(program, net, precision, rows=2)
    program_: Program | None = net.facts[key]
    return program_


def runs_rows(net: Net, precision: Precision) -> bool:
    """Whether many rows are best run by the program of the net's traced layers, in the pixelwise layout."""
    return program_of(net, precision) is None and program_of(net.arranged(), precision) is not None


def _traced_program(net: Net, precision: Precision) -> Program | None:
    """With convolutions of all rows in one launch: models without any are as fast under `torch.func.vmap`."""
    traced = traced_layers(net, precision)
    if traced is None or not any(isinstance(layer, RowConvolution) for layer in traced.layers):
        return None
    return Program(traced.layers, net.layout, net.products, traced.inputs)


def _small_program(net: Net, precision: Precision) -> Program | None:
    def convolution(prefix: str, parts: list[nn.Module]) -> Match | None:
        first = parts[0]
        assert isinstance(first, nn.Conv2d)
        if len(parts) < 3 or not is_plain(parts[1], nn.ReLU) or not _has_kernels(first, parts[2]):
            return None
        return ConvolutionReluPool(f"{prefix}weight", f"{prefix}bias", first.kernel_size[0], precision), 3

    layers = layers_of(net, convolution)
    return Program(_with_wide_first_layer(layers, net.layout, precision), net.layout) if layers else None


def large_program_of(net: Net) -> Program | None:
    """The program of a large net in channels-last order, for one client at a time, or None if it has none.

    Its convolutions are cuDNN's. Models with other layers (BatchNorm) are run by autograd.
    """
    if not net.start.is_cuda or net.start.dtype != torch.float32 or not kernels.available():
        return None
    layers = layers_of(net, _large_convolution)
    if not layers:
        return None
    precision: Precision = "tf32" if net.products is None else "bf16"
    return checked(Program(layers, net.layout, net.products), net, precision, rows=1)


def checked(program: Program, net: Net, precision: Precision, rows: int) -> Program | None:
    """The program if it computes the same as the module, else None."""
    if not matches_module(program, net):
        return None
    trial = Trial.of(net, rows)
    if trial is None:
        return None

    def by_kernels(w: Tensor, train: bool) -> Tensor:
        keys = trial.keys if train else None
        return program(w.float(), trial.x.float().contiguous(), keys, STEP).to(w.dtype)

    def by_torch(w: Tensor, train: bool) -> Tensor:
        return program.by_torch(w, trial.x, trial.keys if train else None, STEP)

    def outputs(run: Callable[[Tensor, bool], Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [run(trial.w, train) for train in (True, False)]

    of_outputs, of_gradients = NEAR[precision]
    near = agree(partial(outputs, by_torch), partial(outputs, by_kernels), of_outputs)
    near = near and agree(partial(trial.measured, by_torch), partial(trial.measured, by_kernels), of_gradients)
    return program if near else None


def matches_module(program: Program, net: Net) -> bool:
    """Whether the reference of the layers equals the module's forward pass, to rounding in float64; on any device."""
    trial = Trial.of(net, rows=2)
    if trial is None:
        return False

    def by_torch(w: Tensor, train: bool) -> Tensor:
        return program.by_torch(w, trial.x, trial.keys if train else None, STEP)

    by_module = partial(trial.measured, partial(trial.alone, x=trial.x))
    return agree(by_module, partial(trial.measured, by_torch), trial.tolerance)


def _with_wide_first_layer(layers: list[Layer], layout: Layout, precision: Precision) -> list[Layer]:
    """With `WideDense` as the first linear layer if its kernels support it; exact products are left to cuBLAS."""
    from fedgg.kernels import dense

    first = next(n for n, layer in enumerate(layers) if not isinstance(layer, Flatten))
    layer = layers[first]
    if not isinstance(layer, Dense) or precision not in ("tf32", "bf16") or layout.names[0] != layer.weight:
        return layers
    outputs, inputs = layout.shapes[0]
    if not dense.supports(inputs, outputs):
        return layers
    return [*layers[:first], WideDense(layer.weight, layer.bias, layer.relu, precision), *layers[first + 1 :]]


def layers_of(net: Net, convolution: Convolutions) -> list[Layer] | None:
    """The layers that replace the parts of nested `nn.Sequential`s, or None if a part is not supported."""
    if shares_parameters(net.module):
        return None
    parts, names = list(parts_in_order(net.module)), set(net.layout.names)
    layers: list[Layer] = []
    index = 0
    while index < len(parts):
        prefix, part = parts[index]
        upcoming = [later for _, later in parts[index : index + 3]]
        has_both = {f"{prefix}weight", f"{prefix}bias"} <= names
        match: Match | None = None
        if is_plain(part, nn.Conv2d) and has_both:
            match = convolution(prefix, upcoming)
        elif is_plain(part, nn.Linear) and has_both:
            relu = len(upcoming) > 1 and is_plain(upcoming[1], nn.ReLU)
            match = Dense(f"{prefix}weight", f"{prefix}bias", relu), 2 if relu else 1
        elif isinstance(part, nn.Dropout) and is_plain(part, nn.Dropout) and 0 < part.p < 1:
            match = Dropout(1 + sum(isinstance(layer, Dropout) for layer in layers), part.p), 1
        elif isinstance(part, nn.Flatten) and is_plain(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1):
            match = Flatten(), 1
        if match is None:
            return None
        layers.append(match[0])
        index += match[1]
    return layers


def _has_kernels(convolution: nn.Conv2d, pool: nn.Module) -> bool:
    kernel = convolution.kernel_size
    return (
        kernel[0] == kernel[1]
        and kernel[0] % 2 == 1
        and (convolution.stride, convolution.dilation, convolution.groups) == ((1, 1), (1, 1), 1)
        and convolution.padding in ((0, 0), "valid")
        and convolution.in_channels <= 16
        and convolution.out_channels <= 32
        and is_2x2_max_pool(pool)
    )


def _large_convolution(prefix: str, parts: list[nn.Module]) -> Match | None:
    part = parts[0]
    assert isinstance(part, nn.Conv2d)
    usual = part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)
    if not usual or len(parts) < 2 or not is_plain(parts[1], nn.ReLU):
        return None
    pool = len(parts) == 3 and is_2x2_max_pool(parts[2])
    geometry = (_pair(part.stride), _pair(part.padding), _pair(part.dilation))
    return Convolution(f"{prefix}weight", f"{prefix}bias", *geometry, pool), 3 if pool else 2


def _pair(value: Any) -> Pair:
    return (value[0], value[1]) if isinstance(value, tuple) else (value, value)
