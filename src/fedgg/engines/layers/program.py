"""A sequence of layers as a program over rows with kernels of its own, and which modules have one.

An `nn.Sequential` made of convolution, ReLU and 2 x 2 max-pool, of linear layers with or without ReLU, of dropout and
of `Flatten` is run by layers of ours. Whatever else there is, `torch.func.vmap` runs: slower, the same numbers.

Kernels compute in the run's precision, in which a comparison cannot tell a wrong layer from a rounded one: in bf16 a
rounded activation may win a max-pool it should have lost, and gradients of single weights are off by their own size.
Two comparisons are made instead. What the layers stand for, in torch's own operations, must equal the module's forward
in float64 to nine digits: this finds every mistake in reading the module. The kernels' outputs and gradients must lie
near it, by a distance that suits the precision: this finds kernels that are broken for these sizes or on this GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedgg import kernels
from fedgg.core.layout import Layout
from fedgg.core.model import Net
from fedgg.engines.base import Precision
from fedgg.engines.fused.conv_pool import is_2x2_max_pool
from fedgg.engines.layers.layer_types import (
    Convolution,
    ConvolutionReluPool,
    Dense,
    Dropout,
    Flatten,
    Layer,
    Moment,
    Pair,
    WideDense,
)
from fedgg.engines.module_equivalence import STEP, Trial, agree, is_plain, parts_in_order, shares_parameters

if TYPE_CHECKING:
    from fedgg.kernels.optimiser_step import Wide


ALIGNMENT = 64  # row lengths are padded to this many numbers, since matrix kernels read aligned words


class Program:
    """The layers in order; called with rows and inputs, differentiable in the rows."""

    def __init__(self, layers: Sequence[Layer], layout: Layout, products: torch.dtype | None = None):
        self.layers = tuple(layers)
        self.layout = layout
        self.products = products  # what layers take, if not what rows are made of
        self._first = next(n for n, layer in enumerate(self.layers) if not isinstance(layer, Flatten))
        self._withheld: list[Wide] | None = None

    @property
    def first(self) -> Layer:
        """The first layer that computes."""
        return self.layers[self._first]

    def withholds(self, batch: int) -> bool:
        """Whether the first layer's gradient can be left to the pass that uses it, for batches of this width."""
        return isinstance(self.first, WideDense) and self.first.takes(batch)

    @contextmanager
    def withholding(self) -> Iterator[list[Wide]]:
        """Within, backward passes leave the first layer's weight gradient unmade, and say here what it is made of."""
        self._withheld = []
        try:
            yield self._withheld
        finally:
            self._withheld = None

    def __call__(self, w: Tensor, x: Tensor, keys: Tensor | None = None, step: Tensor | int = 0) -> Tensor:
        return self.seen(w, x, keys, step)[0]

    def seen(self, w: Tensor, x: Tensor, keys: Tensor | None = None, step: Tensor | int = 0) -> tuple[Tensor, Tensor]:
        """The outputs, and what went into the last layer."""
        both: tuple[Tensor, Tensor] = _Run.apply(w, x, self, (keys, step))  # type: ignore[no-untyped-call]
        return both

    def offers(self, head: str) -> bool:
        """Whether the last layer is the one of this name, with others in front of it."""
        last = self.layers[-1]
        return isinstance(last, Dense) and last.weight == f"{head}.weight" and self._first < len(self.layers) - 1

    def mean_loss(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor | None:
        """Mean cross entropy `[K, 1]` by a kernel of its own, or None where there are too many outputs for it."""
        from fedgg.kernels import loss

        if not loss.takes(*outputs.shape[1:]):
            return None
        loss_: Tensor = _MeanLoss.apply(outputs, y, mask)  # type: ignore[no-untyped-call]
        return loss_

    def forward(self, w: Tensor, x: Tensor, moment: Moment = (None, 0)) -> tuple[Tensor, list[Any]]:
        """Outputs, and what the backward pass needs: the parameters as they were used, and each layer's notes."""
        parameters = self.layout.unflatten(w if self.products is None else w.to(self.products))
        saved: list[Any] = [parameters]
        for layer in self.layers:
            x, remembered = layer.forward(x, parameters, moment)
            saved.append(remembered)
        return x.to(w.dtype), saved

    def by_torch(self, w: Tensor, x: Tensor, keys: Tensor | None = None, step: int = 0) -> Tensor:
        """The same, row by row, in torch's own operations and the rows' own precision: what the layers stand for."""
        outputs = []
        for k in range(len(w)):
            y, parameters = x[k], self.layout.unflatten(w[k])
            for layer in self.layers:
                y = layer.by_torch(y, parameters, (None if keys is None else keys[k], step))
            outputs.append(y)
        return torch.stack(outputs)

    def into_last(self, saved: list[Any], like: Tensor) -> Tensor:
        """What went into the last layer, as the forward pass saved it; nothing where that layer saves no input."""
        if not isinstance(self.layers[-1], Dense):
            return like.new_empty(0)
        x: Tensor = saved[-1][0]
        return x.detach().to(like.dtype)  # a tensor of its own: what goes out must not hold what is saved

    def backward(self, w: Tensor, grad: Tensor, saved: list[Any], to_last: Tensor | None = None) -> Tensor:
        """The rows' gradient from that of the outputs, and from that of what went into the last layer, if any."""
        result = padded_rows(w)
        parameters, *saved = saved
        into = self.layout.unflatten(result)
        back: Tensor | None = grad
        for number in reversed(range(self._first, len(self.layers))):
            assert back is not None
            layer = self.layers[number]
            if self._withheld is not None and number == self._first and isinstance(layer, WideDense):
                self._withheld.append(layer.withheld(back, saved[number], into))
                return result
            back = layer.backward(back, saved[number], parameters, into, number > self._first)
            if to_last is not None and back is not None and number == len(self.layers) - 1:
                back = back + to_last.to(back.dtype)
        return result


def padded_rows(like: Tensor) -> Tensor:
    """Room for rows `[K, P]` that start at aligned addresses."""
    length = like.shape[1]
    return like.new_empty((len(like), -(-length // ALIGNMENT) * ALIGNMENT))[:, :length]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, program: Program, moment: Moment) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        outputs, ctx.saved = program.forward(w.detach(), x, moment)
        ctx.w, ctx.program, ctx.shape = w.detach(), program, outputs.shape
        return outputs, program.into_last(ctx.saved, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, to_last: Tensor | None) -> tuple[Tensor, None, None, None]:
        if grad is None:  # a loss of nothing but the representation
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


# Relative distances from float64, of outputs and of gradients, within which kernels are taken to compute the same. In
# gradients rounding makes a distance like the root of the share of ReLUs and max-pools it decides: in bf16 up to 0.22
# for the library's CNN and 0.36 for VGG-16, of whose outputs 0.007. Numbers that have nothing to do with the right ones
# are at a distance of 1 or more.
NEAR: dict[Precision, tuple[float, float]] = {
    "fp64": (1e-9, 1e-9), "fp32": (1e-3, 0.05), "tf32": (0.02, 0.5), "bf16": (0.1, 0.7)
}  # fmt: skip

Taken = tuple[Layer, int]  # a layer, and how many of a module's parts it stands for
Convolutions = Callable[[str, list[nn.Module]], Taken | None]  # prefix of the names, and the next parts


def program_of(net: Net, precision: Precision, device: torch.device) -> Program | None:
    """The net's program, or None where it has none: another device or precision, other layers."""
    if device.type != "cuda" or net.start.dtype != torch.float32 or not kernels.available():
        return None

    def convolution(prefix: str, parts: list[nn.Module]) -> Taken | None:
        first = parts[0]
        assert isinstance(first, nn.Conv2d)
        if len(parts) < 3 or not is_plain(parts[1], nn.ReLU) or not _has_kernels(first, parts[2]):
            return None
        return ConvolutionReluPool(f"{prefix}weight", f"{prefix}bias", first.kernel_size[0], precision), 3

    layers = layers_of(net, convolution)
    if not layers:
        return None
    return proven(Program(_widened(layers, net.layout, precision), net.layout), net, precision, rows=2)


def large_program_of(net: Net) -> Program | None:
    """The program of a large net whose rows lie pixelwise, for one client at a time, or None where it has none.

    Its convolutions are cuDNN's. Models with other layers (BatchNorm) run by autograd.
    """
    if not net.start.is_cuda or net.start.dtype != torch.float32 or not kernels.available():
        return None
    layers = layers_of(net, _large_convolution)
    if not layers:
        return None
    precision: Precision = "tf32" if net.products is None else "bf16"
    return proven(Program(layers, net.layout, net.products), net, precision, rows=1)


def proven(program: Program, net: Net, precision: Precision, rows: int) -> Program | None:
    """The program, if it computes what the module does."""
    if not stands_for(program, net):
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


def stands_for(program: Program, net: Net) -> bool:
    """Whether the layers in order are the module's own forward, to rounding in float64; on any device."""
    trial = Trial.of(net, rows=2)
    if trial is None:
        return False

    def by_torch(w: Tensor, train: bool) -> Tensor:
        return program.by_torch(w, trial.x, trial.keys if train else None, STEP)

    by_module = partial(trial.measured, partial(trial.alone, x=trial.x))
    return agree(by_module, partial(trial.measured, by_torch), trial.tolerance)


def _widened(layers: list[Layer], layout: Layout, precision: Precision) -> list[Layer]:
    """With the first layer's own kernels, where it has any: exact products are left to cuBLAS."""
    from fedgg.kernels import dense

    first = next(n for n, layer in enumerate(layers) if not isinstance(layer, Flatten))
    layer = layers[first]
    if not isinstance(layer, Dense) or precision not in ("tf32", "bf16") or layout.names[0] != layer.weight:
        return layers
    outputs, inputs = layout.shapes[0]
    if not dense.takes(inputs, outputs):
        return layers
    return [*layers[:first], WideDense(layer.weight, layer.bias, layer.relu, precision), *layers[first + 1 :]]


def layers_of(net: Net, convolution: Convolutions) -> list[Layer] | None:
    """The layers of nested `nn.Sequential`s, or None if there is one we have no layer for."""
    if shares_parameters(net.module):
        return None
    parts, names = list(parts_in_order(net.module)), set(net.layout.names)
    layers: list[Layer] = []
    at = 0
    while at < len(parts):
        prefix, part = parts[at]
        following = [later for _, later in parts[at : at + 3]]
        has_both = {f"{prefix}weight", f"{prefix}bias"} <= names
        taken: Taken | None = None
        if is_plain(part, nn.Conv2d) and has_both:
            taken = convolution(prefix, following)
        elif is_plain(part, nn.Linear) and has_both:
            relu = len(following) > 1 and is_plain(following[1], nn.ReLU)
            taken = Dense(f"{prefix}weight", f"{prefix}bias", relu), 2 if relu else 1
        elif isinstance(part, nn.Dropout) and is_plain(part, nn.Dropout) and 0 < part.p < 1:
            taken = Dropout(1 + sum(isinstance(layer, Dropout) for layer in layers), part.p), 1
        elif isinstance(part, nn.Flatten) and is_plain(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1):
            taken = Flatten(), 1
        if taken is None:
            return None
        layers.append(taken[0])
        at += taken[1]
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


def _large_convolution(prefix: str, parts: list[nn.Module]) -> Taken | None:
    part = parts[0]
    assert isinstance(part, nn.Conv2d)
    usual = part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)
    if not usual or len(parts) < 2 or not is_plain(parts[1], nn.ReLU):
        return None
    pool = len(parts) == 3 and is_2x2_max_pool(parts[2])
    geometry = (_two(part.stride), _two(part.padding), _two(part.dilation))
    return Convolution(f"{prefix}weight", f"{prefix}bias", *geometry, pool), 3 if pool else 2


def _two(value: Any) -> Pair:
    return (value[0], value[1]) if isinstance(value, tuple) else (value, value)
