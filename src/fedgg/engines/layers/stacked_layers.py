"""Layers for all rows of a stack at once, forward and backward; gradients are written directly into the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgg.core.forward import keep
from fedgg.engines.base import Precision

if TYPE_CHECKING:
    from fedgg.kernels.optimiser_step import Wide

Pair = tuple[int, int]
Views = dict[str, Tensor]  # views [K, *shape] into rows


class SideWork:
    """Work of a backward pass that no earlier layer waits for, on a stream of its own: gradients of parameters.

    The tensors it reads are kept until `end`, since the memory of a tensor that is dropped may be written again by the
    main stream.
    """

    def __init__(self, stream: torch.cuda.Stream | None):
        """None: the work is done at once."""
        self._stream = stream
        self._kept: list[Tensor] = []

    def run(self, work: Callable[[], object], *tensors: Tensor) -> None:
        """Runs the work, which reads these tensors, after all that was launched so far."""
        if self._stream is None:
            work()
            return
        self._kept.extend(tensors)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            work()

    def end(self) -> None:
        """After the main stream has waited for this one."""
        self._kept.clear()


HERE = SideWork(None)


class Stepper(Protocol):
    """Takes the optimiser's step of some weights in the kernel that computes their gradient."""

    @property
    def weights(self) -> Mapping[str, int]:
        """By name, the place in the row."""

    def take(self, name: str, x: Tensor, grad: Tensor, geometry: Any) -> None:
        """From pixelwise inputs and the gradient of the outputs; nothing may read the weights afterwards."""


@dataclass(frozen=True)
class Parameters:
    """Views into the rows, and into a copy of them in the type of matrix products; and where work is done."""

    exact: Views
    products: Views
    side: SideWork = HERE
    stepper: Stepper | None = None  # None: all gradients are written

    def steps(self, weight: str) -> bool:
        """Whether the backward pass takes the step of these weights instead of writing their gradient."""
        return self.stepper is not None and weight in self.stepper.weights

    def take(self, weight: str, x: Tensor, grad: Tensor, geometry: Any) -> None:
        assert self.stepper is not None
        self.stepper.take(weight, x, grad, geometry)

    def __getitem__(self, name: str) -> Tensor:
        return self.products[name]


MaskKeys = tuple[Tensor | None, Tensor | int]  # keys [K, 1] and step of the dropout masks; None: no dropout
# fp32 products are composed of three TF32 products: as exact as fp32 and several times faster.
PRODUCTS = {"fp64": "ieee", "fp32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}


def pixelwise(x: Tensor) -> Tensor:
    """`[K, B, H, W, C]` of images `[K, B, C, H, W]`, without a copy if they lie so in memory."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def channelwise(x: Tensor) -> Tensor:
    """A view `[K, B, C, H, W]` of pixelwise images."""
    return x.permute(0, 1, 4, 2, 3)


class Layer(Protocol):
    """A layer with one or more inputs."""

    @property
    def parameter_names(self) -> tuple[str, ...]: ...

    @property
    def forward(self) -> Callable[..., tuple[Tensor, Any]]:
        """Of an input, `Parameters`, `MaskKeys` and further inputs: the output, and what `backward` needs."""

    @property
    def backward(self) -> Callable[..., Tensor | tuple[Tensor | None, ...] | None]:
        """Of the output's gradient, what was saved, `Parameters`, the views that the parameters' gradients are written
        into, and whether the inputs' gradients are needed: these, one or as many as there are inputs."""

    @property
    def by_torch(self) -> Callable[..., Tensor]:
        """The reference: `forward` for one row, `[B, ...]`, in torch operations, on any device."""


@dataclass(frozen=True)
class Flatten:
    parameter_names: ClassVar[tuple[str, ...]] = ()

    def by_torch(self, x: Tensor, parameters: Views, mask_keys: MaskKeys) -> Tensor:
        return x.flatten(1)

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys) -> tuple[Tensor, Any]:
        return x.reshape(*x.shape[:2], -1), x.shape

    def backward(self, grad: Tensor, saved: Any, parameters: Parameters, into: Views, to_input: bool) -> Tensor | None:
        return grad.view(saved)


@dataclass(frozen=True)
class Dense:
    """A linear layer, optionally followed by ReLU."""

    weight: str
    bias: str
    relu: bool

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self.weight, self.bias

    def by_torch(self, x: Tensor, parameters: Views, mask_keys: MaskKeys) -> Tensor:
        y = F.linear(x, parameters[self.weight], parameters[self.bias])
        return y.relu() if self.relu else y

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys) -> tuple[Tensor, Any]:
        x = x.to(parameters[self.weight].dtype)
        y = torch.baddbmm(parameters[self.bias][:, None], x, parameters[self.weight].mT)
        y = y.relu_() if self.relu else y
        return y, (x, y)

    def backward(self, grad: Tensor, saved: Any, parameters: Parameters, into: Views, to_input: bool) -> Tensor | None:
        x, y = saved
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
    """A first layer that is most of the model: its weight gradient can be computed in the optimiser step."""

    precision: Precision

    @staticmethod
    def supports(batch: int) -> bool:
        from fedgg.kernels import dense

        return batch <= dense.MOST_EXAMPLES

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys) -> tuple[Tensor, Any]:
        from fedgg.kernels import dense

        if not self.supports(x.shape[1]):
            return super().forward(x, parameters, mask_keys)
        x = x.to(torch.bfloat16 if self.precision == "bf16" else parameters[self.weight].dtype).contiguous()
        y = dense.forward(x, parameters[self.weight], parameters[self.bias], self.relu, PRODUCTS[self.precision])
        return y, (x, y)

    def deferred(self, grad: Tensor, saved: Any, into: Views) -> Wide:
        """Writes the bias's gradient and returns the factors of the weight's gradient."""
        from fedgg.kernels import dense
        from fedgg.kernels.optimiser_step import Wide

        x, y = saved
        return Wide(x, dense.back(grad, y, self.relu, x.dtype, into[self.bias]), PRODUCTS[self.precision])


@dataclass(frozen=True)
class Dropout:
    """Dropout with counter-based masks; `place` numbers the dropout layers of the model from 1."""

    parameter_names: ClassVar[tuple[str, ...]] = ()
    place: int
    share: float

    def by_torch(self, x: Tensor, parameters: Views, mask_keys: MaskKeys) -> Tensor:
        key, step = mask_keys
        if key is None:
            return x
        return torch.where(keep(key, step, self.place, x.shape, self.share), x / (1 - self.share), 0)

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys) -> tuple[Tensor, Any]:
        return self._dropped(x, mask_keys), mask_keys

    def backward(self, grad: Tensor, saved: Any, parameters: Parameters, into: Views, to_input: bool) -> Tensor | None:
        return self._dropped(grad, saved)

    def _dropped(self, x: Tensor, mask_keys: MaskKeys) -> Tensor:
        from fedgg.kernels.relu_pool_dropout import drop

        keys, step = mask_keys
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

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self.weight, self.bias

    def by_torch(self, x: Tensor, parameters: Views, mask_keys: MaskKeys) -> Tensor:
        return F.max_pool2d(F.conv2d(x, parameters[self.weight], parameters[self.bias]).relu(), 2)

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys) -> tuple[Tensor, Any]:
        from fedgg.kernels import convolution

        weight = parameters[self.weight]
        channels, height, width = x.shape[2:]
        shape = convolution.Shape(channels, height, width, weight.shape[1], self.kernel)
        dtype = torch.bfloat16 if self.precision == "bf16" else x.dtype
        x = convolution.packed(x.to(dtype), shape.lanes_in)
        kernels = convolution.spread(weight, shape, dtype)
        y, winner = convolution.forward(x, kernels, parameters[self.bias], shape, self.product)
        return y, (x, kernels, winner, shape)

    def backward(self, grad: Tensor, saved: Any, parameters: Parameters, into: Views, to_input: bool) -> Tensor | None:
        from fedgg.kernels import convolution

        x, kernels, winner, shape = saved
        grad = convolution.packed(grad.to(x.dtype), shape.lanes_out)
        convolution.weight_gradient(x, grad, winner, shape, self.product, into[self.weight], into[self.bias])
        if not to_input:
            return None
        return convolution.input_gradient(grad, winner, kernels, shape, x.shape[1], self.product)

    @property
    def product(self) -> str:
        return PRODUCTS[self.precision]


@dataclass(frozen=True)
class Convolution:
    """A convolution by cuDNN, with bias, ReLU and optional max-pool in kernels of fedgg.

    For one row of a large model; images and weights are in channels-last order.
    """

    weight: str
    bias: str
    stride: Pair
    padding: Pair
    dilation: Pair
    pool: bool

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self.weight, self.bias

    def by_torch(self, x: Tensor, parameters: Views, mask_keys: MaskKeys) -> Tensor:
        y = F.conv2d(x, parameters[self.weight], parameters[self.bias], self.stride, self.padding, self.dilation).relu()
        return F.max_pool2d(y, 2) if self.pool else y

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys) -> tuple[Tensor, Any]:
        from fedgg.kernels import relu_pool_dropout

        w, bias = parameters[self.weight][0], parameters[self.bias]
        x = x[0].to(w.dtype).contiguous(memory_format=torch.channels_last)
        y = pixelwise(torch.ops.aten.convolution(x, w, None, *self._geometry)[None])
        if not self.pool:
            y = relu_pool_dropout.bias_relu(y, bias)
            return channelwise(y), (x, y)
        pooled, winner = relu_pool_dropout.bias_relu_pool(y, bias)
        return channelwise(pooled), (x, (winner, *y.shape[2:4]))

    def backward(self, grad: Tensor, saved: Any, parameters: Parameters, into: Views, to_input: bool) -> Tensor | None:
        from fedgg.kernels import relu_pool_dropout

        x, activation = saved
        grad = pixelwise(grad)
        if self.pool:
            grad, parts = relu_pool_dropout.pool_back(grad, *activation)
        else:
            grad, parts = relu_pool_dropout.relu_back(grad, activation)
        torch.sum(parts, 1, out=into[self.bias])
        w = parameters[self.weight][0]
        grad_x, grad_w, _ = torch.ops.aten.convolution_backward(
            channelwise(grad)[0], x, w, None, *self._geometry, [to_input, True, False]
        )
        into[self.weight][0].copy_(grad_w)
        return grad_x[None] if to_input else None

    @property
    def _geometry(self) -> tuple[Any, ...]:
        return list(self.stride), list(self.padding), list(self.dilation), False, [0, 0], 1
