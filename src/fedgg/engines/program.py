"""A module as a program over rows, with kernels of its own: for stacks of small models on a GPU.

An `nn.Sequential` made of convolution, ReLU and 2 x 2 max-pool, of linear layers with or without ReLU, of dropout and
of `Flatten` is run layer by layer for all rows at once, forwards and backwards; gradients go straight to their place in
the row. Whatever else a user brings is run by `torch.func.vmap`: slower, the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fedgg import kernels
from fedgg.core.layout import Layout
from fedgg.core.net import Net
from fedgg.core.quick import halves
from fedgg.engines.precision import Precision

if TYPE_CHECKING:
    from fedgg.kernels.advance import Wide

Parameters = dict[str, Tensor]  # views [K, *shape] into rows
Moment = tuple[Tensor | None, Tensor | int]  # keys [K, 1] and step of the dropout masks; no keys: nothing is dropped
# fp32 products are put together from three TF32 ones: as exact as fp32, and several times faster.
PRODUCTS = {"fp64": "ieee", "fp32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}
ALIGNMENT = 64  # row lengths are padded to this many numbers, since matrix kernels read aligned words


class Layer(Protocol):
    def forward(self, x: Tensor, parameters: Parameters, moment: Moment) -> tuple[Tensor, Any]: ...
    def backward(
        self, grad: Tensor, kept: Any, parameters: Parameters, into: Parameters, to_input: bool
    ) -> Tensor | None: ...


@dataclass(frozen=True)
class Flatten:
    def forward(self, x: Tensor, parameters: Parameters, moment: Moment) -> tuple[Tensor, Any]:
        return x.reshape(*x.shape[:2], -1), x.shape

    def backward(
        self, grad: Tensor, kept: Any, parameters: Parameters, into: Parameters, to_input: bool
    ) -> Tensor | None:
        return grad.view(kept)


@dataclass(frozen=True)
class Dense:
    """A linear layer, with ReLU behind it or not."""

    weight: str
    bias: str
    relu: bool

    def forward(self, x: Tensor, parameters: Parameters, moment: Moment) -> tuple[Tensor, Any]:
        x = x.to(parameters[self.weight].dtype)
        y = torch.baddbmm(parameters[self.bias][:, None], x, parameters[self.weight].mT)
        y = y.relu_() if self.relu else y
        return y, (x, y)

    def backward(
        self, grad: Tensor, kept: Any, parameters: Parameters, into: Parameters, to_input: bool
    ) -> Tensor | None:
        x, y = kept
        grad = grad.to(x.dtype)
        if self.relu:
            grad = torch.where(y > 0, grad, 0)
        if x.dtype == into[self.weight].dtype:
            torch.bmm(grad.mT, x, out=into[self.weight])
        else:
            into[self.weight].copy_(torch.bmm(grad.mT, x))
        torch.sum(grad, 1, dtype=into[self.bias].dtype, out=into[self.bias])
        return torch.bmm(grad, parameters[self.weight]) if to_input else None


@dataclass(frozen=True)
class WideDense(Dense):
    """The first layer, when it is most of the model: its gradient can be left to the pass that uses it."""

    precision: Precision

    @staticmethod
    def takes(batch: int) -> bool:
        from fedgg.kernels import dense

        return batch <= dense.MOST_EXAMPLES

    def forward(self, x: Tensor, parameters: Parameters, moment: Moment) -> tuple[Tensor, Any]:
        from fedgg.kernels import dense

        if not self.takes(x.shape[1]):
            return super().forward(x, parameters, moment)
        x = x.to(torch.bfloat16 if self.precision == "bf16" else parameters[self.weight].dtype).contiguous()
        y = dense.forward(x, parameters[self.weight], parameters[self.bias], self.relu, PRODUCTS[self.precision])
        return y, (x, y)

    def withheld(self, grad: Tensor, kept: Any, into: Parameters) -> Wide:
        """The bias's gradient, and what the weight's is made of."""
        from fedgg.kernels import dense
        from fedgg.kernels.advance import Wide

        x, y = kept
        return Wide(x, dense.back(grad, y, self.relu, x.dtype, into[self.bias]), PRODUCTS[self.precision])


@dataclass(frozen=True)
class Dropout:
    """With counted masks: its place among the dropouts of the model, from 1, and the share it drops."""

    place: int
    share: float

    def forward(self, x: Tensor, parameters: Parameters, moment: Moment) -> tuple[Tensor, Any]:
        return self._dropped(x, moment), moment

    def backward(
        self, grad: Tensor, kept: Any, parameters: Parameters, into: Parameters, to_input: bool
    ) -> Tensor | None:
        return self._dropped(grad, kept)

    def _dropped(self, x: Tensor, moment: Moment) -> Tensor:
        from fedgg.kernels.layers import drop

        keys, step = moment
        if keys is None:
            return x
        steps = step if isinstance(step, Tensor) else torch.full_like(keys, step)
        return drop(x, keys, steps, self.place, self.share)


@dataclass(frozen=True)
class ConvolutionReluPool:
    weight: str
    bias: str
    kernel: int
    precision: Precision

    def forward(self, x: Tensor, parameters: Parameters, moment: Moment) -> tuple[Tensor, Any]:
        from fedgg.kernels import convolution

        weight = parameters[self.weight]
        channels, height, width = x.shape[2:]
        shape = convolution.Shape(channels, height, width, weight.shape[1], self.kernel)
        dtype = torch.bfloat16 if self.precision == "bf16" else x.dtype
        x = convolution.packed(x.to(dtype), shape.lanes_in)
        kernels = convolution.spread(weight, shape, dtype)
        y, winner = convolution.forward(x, kernels, parameters[self.bias], shape, self.product)
        return y, (x, kernels, winner, shape)

    def backward(
        self, grad: Tensor, kept: Any, parameters: Parameters, into: Parameters, to_input: bool
    ) -> Tensor | None:
        from fedgg.kernels import convolution

        x, kernels, winner, shape = kept
        grad = convolution.packed(grad.to(x.dtype), shape.lanes_out)
        convolution.weight_gradient(x, grad, winner, shape, self.product, into[self.weight], into[self.bias])
        if not to_input:
            return None
        return convolution.input_gradient(grad, winner, kernels, shape, x.shape[1], self.product)

    @property
    def product(self) -> str:
        return PRODUCTS[self.precision]


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
        found: Tensor = _MeanLoss.apply(outputs, y, mask)  # type: ignore[no-untyped-call]
        return found

    def forward(self, w: Tensor, x: Tensor, moment: Moment = (None, 0)) -> tuple[Tensor, list[Any]]:
        """Outputs, and what the backward pass needs: the parameters as they were used, and each layer's notes."""
        parameters = self.layout.unflatten(w if self.products is None else w.to(self.products))
        kept: list[Any] = [parameters]
        for layer in self.layers:
            x, remembered = layer.forward(x, parameters, moment)
            kept.append(remembered)
        return x.to(w.dtype), kept

    def into_last(self, kept: list[Any], like: Tensor) -> Tensor:
        """What went into the last layer, of what the forward pass has kept; nothing where that layer keeps no input."""
        if not isinstance(self.layers[-1], Dense):
            return like.new_empty(0)
        x: Tensor = kept[-1][0]
        return x.detach().to(like.dtype)  # a tensor of its own: what goes out must not hold what is kept

    def backward(self, w: Tensor, grad: Tensor, kept: list[Any], to_last: Tensor | None = None) -> Tensor:
        """The rows' gradient from that of the outputs, and from that of what went into the last layer, if any."""
        result = padded_rows(w)
        parameters, *kept = kept
        into = self.layout.unflatten(result)
        back: Tensor | None = grad
        for number in reversed(range(self._first, len(self.layers))):
            assert back is not None
            layer = self.layers[number]
            if self._withheld is not None and number == self._first and isinstance(layer, WideDense):
                self._withheld.append(layer.withheld(back, kept[number], into))
                return result
            back = layer.backward(back, kept[number], parameters, into, number > self._first)
            if to_last is not None and back is not None and number == len(self.layers) - 1:
                back = back + to_last.to(back.dtype)
        return result


def padded_rows(like: Tensor) -> Tensor:
    """Room for rows `[K, P]` that start at aligned addresses."""
    length = like.shape[1]
    return like.new_empty((len(like), -(-length // ALIGNMENT) * ALIGNMENT))[:, :length]


Taken = tuple[Layer, int]  # a layer, and how many of a module's parts it stands for
Convolutions = Callable[[str, list[nn.Module]], Taken | None]  # prefix of the names, and the next parts


def program_of(net: Net, precision: Precision, device: torch.device) -> Program | None:
    """The net's program, or None where it has none: another device or precision, other layers."""
    if device.type != "cuda" or net.start.dtype != torch.float32 or not kernels.available():
        return None

    def convolution(prefix: str, parts: list[nn.Module]) -> Taken | None:
        first = parts[0]
        assert isinstance(first, nn.Conv2d)
        if [type(part) for part in parts[1:]] != [nn.ReLU, nn.MaxPool2d] or not _is_plain(first, parts[2]):
            return None
        return ConvolutionReluPool(f"{prefix}weight", f"{prefix}bias", first.kernel_size[0], precision), 3

    layers = layers_of(net, convolution)
    return Program(_widened(layers, net.layout, precision), net.layout) if layers else None


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
    parts, names = list(_leaves(net.module)), set(net.layout.names)
    layers: list[Layer] = []
    at = 0
    while at < len(parts):
        prefix, part = parts[at]
        following = [later for _, later in parts[at : at + 3]]
        own = {f"{prefix}weight", f"{prefix}bias"} <= names
        taken: Taken | None = None
        if isinstance(part, nn.Conv2d) and own:
            taken = convolution(prefix, following)
        elif isinstance(part, nn.Linear) and own:
            relu = len(following) > 1 and type(following[1]) is nn.ReLU
            taken = Dense(f"{prefix}weight", f"{prefix}bias", relu), 2 if relu else 1
        elif isinstance(part, nn.Dropout) and 0 < part.p < 1:
            taken = Dropout(1 + sum(isinstance(layer, Dropout) for layer in layers), part.p), 1
        elif isinstance(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1):
            taken = Flatten(), 1
        if taken is None:
            return None
        layers.append(taken[0])
        at += taken[1]
    return layers


def _leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The parts of nested `nn.Sequential`s in the order they run, with the prefix of their parameters' names."""
    if type(module) is not nn.Sequential:
        yield prefix, module
        return
    for name, part in module.named_children():
        yield from _leaves(part, f"{prefix}{name}.")


def _is_plain(convolution: nn.Conv2d, pool: nn.Module) -> bool:
    kernel = convolution.kernel_size
    return (
        kernel[0] == kernel[1]
        and kernel[0] % 2 == 1
        and (convolution.stride, convolution.dilation, convolution.groups) == ((1, 1), (1, 1), 1)
        and convolution.padding in ((0, 0), "valid")
        and convolution.in_channels <= 16
        and convolution.out_channels <= 32
        and halves(pool)
    )


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, program: Program, moment: Moment) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        outputs, ctx.kept = program.forward(w.detach(), x, moment)
        ctx.w, ctx.program, ctx.shape = w.detach(), program, outputs.shape
        return outputs, program.into_last(ctx.kept, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, to_last: Tensor | None) -> tuple[Tensor, None, None, None]:
        if grad is None:  # a loss of nothing but the representation
            grad = ctx.w.new_zeros(ctx.shape)
        return ctx.program.backward(ctx.w, grad, ctx.kept, to_last), None, None, None


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        from fedgg.kernels import loss

        found, ctx.slope = loss.mean_cross_entropy(outputs.detach(), y, mask)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.slope * grad[:, :, None], None, None
