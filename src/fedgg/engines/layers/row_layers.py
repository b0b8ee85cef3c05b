"""Layers of large models for all rows of a stack: convolutions, group normalisation, pools, and any other operation.

On a GPU they are kernels of fedgg, elsewhere torch operations, row by row where rows have weights of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedgg.engines.base import Precision
from fedgg.engines.layers.stacked_layers import (
    PRODUCTS,
    Dense,
    MaskKeys,
    Pair,
    Parameters,
    Views,
    channelwise,
    pixelwise,
)


@dataclass(frozen=True)
class RowConvolution:
    """A convolution with zero padding, optionally with bias, ReLU, and a 2 x 2 max-pool after them.

    Weights are in the pixelwise layout. Where the convolution before it ends in a ReLU and nothing else reads that,
    the backward pass of this layer includes that of the ReLU and writes the gradient of the bias before it.
    """

    weight: str
    bias: str | None
    kernel: Pair
    stride: Pair
    padding: Pair
    precision: Precision
    relu: bool = False
    pool: bool = False
    bias_before: str | None = None  # of the convolution before it, whose ReLU belongs to this backward pass
    relu_by_next: bool = False  # whether the ReLU belongs to the next layer's backward pass

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def by_torch(self, x: Tensor, parameters: Views, mask_keys: MaskKeys) -> Tensor:
        bias = None if self.bias is None else parameters[self.bias]
        y = F.conv2d(x, parameters[self.weight], bias, self.stride, self.padding)
        y = y.relu() if self.relu else y
        return F.max_pool2d(y, 2) if self.pool else y

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys) -> tuple[Tensor, Any]:
        from fedgg.kernels import narrow_convolution, relu_pool_dropout, row_convolution, row_convolution_by_copies

        w = _weights(parameters[self.weight])
        bias = None if self.bias is None else parameters.exact[self.bias]
        of_product = None if self.pool else bias
        relu, product = self.relu and not self.pool, PRODUCTS[self.precision]
        if narrow_convolution.supports(w, self.geometry):
            x = narrow_convolution.packed(x.to(w.dtype))
            y = narrow_convolution.forward(x, w, of_product, self.geometry, relu, product)
        else:
            x = pixelwise(x.to(w.dtype))
            if row_convolution_by_copies.supports(x, w, self.geometry):
                y = row_convolution_by_copies.forward(x, w, of_product, self.geometry, relu)
            else:
                y = row_convolution.forward(x, w, of_product, self.geometry, relu, product)
        if not self.pool:
            return channelwise(y), (x, w, y if relu else None)
        assert bias is not None
        pooled, winner = relu_pool_dropout.bias_relu_pool(y, bias)
        return channelwise(pooled), (x, w, (winner, *y.shape[2:4]))

    def backward(
        self,
        grad: Tensor,
        saved: Any,
        parameters: Parameters,
        into: Views,
        to_input: bool,
        added: Tensor | None = None,
    ) -> Tensor | None:
        """`added`: another gradient of the input, which becomes part of the result."""
        x, w, activation = saved
        grad = self._before_activation(pixelwise(grad.to(x.dtype)), activation, parameters, into)
        if not parameters.steps(self.weight):
            parameters.side.run(self._weight_gradient(x, grad, w, _weights(into[self.weight])), x, grad)
        grad_x = self._of_input(grad, x, w, parameters, into, added) if to_input else None
        if parameters.steps(self.weight):  # after the last use of the weights
            parameters.take(self.weight, x, grad, self.geometry)
        return None if grad_x is None else channelwise(grad_x)

    def _before_activation(self, grad: Tensor, activation: Any, parameters: Parameters, into: Views) -> Tensor:
        """The gradient before ReLU and pool; writes that of the bias."""
        from fedgg.kernels import relu_pool_dropout

        if self.relu_by_next:
            return grad
        if self.bias is None:
            return torch.where(activation > 0, grad, 0) if self.relu else grad
        parts = grad
        if self.pool:
            grad, parts = relu_pool_dropout.pool_back(grad, *activation)
        elif self.relu:
            grad, parts = relu_pool_dropout.relu_back(grad, activation)
        _sum_parts(parts, into[self.bias], parameters)
        return grad

    def _of_input(
        self, grad: Tensor, x: Tensor, w: Tensor, parameters: Parameters, into: Views, added: Tensor | None
    ) -> Tensor:
        from fedgg.kernels import row_convolution, row_convolution_by_copies
        from fedgg.kernels.row_convolution import Finish

        relu = x if self.bias_before is not None else None
        finish = Finish(None if added is None else pixelwise(added.to(grad.dtype)), relu)
        height, width = x.shape[2:4]
        if row_convolution_by_copies.supports(x, w, self.geometry):
            grad_x = row_convolution_by_copies.input_gradient(grad, w, height, width, self.geometry, finish)
        else:
            product = PRODUCTS[self.precision]
            grad_x = row_convolution.input_gradient(grad, w, height, width, self.geometry, product, finish)
        if self.bias_before is not None:
            assert finish.sums is not None
            _sum_parts(finish.sums, into[self.bias_before], parameters)
        return grad_x

    def _weight_gradient(self, x: Tensor, grad: Tensor, w: Tensor, into: Tensor) -> Callable[[], None]:
        from fedgg.kernels import narrow_convolution, row_convolution, row_convolution_by_copies

        if row_convolution_by_copies.supports(x, w, self.geometry):
            return partial(row_convolution_by_copies.weight_gradient, x, grad, into, self.geometry)
        kernels = narrow_convolution if narrow_convolution.supports(w, self.geometry) else row_convolution
        return partial(kernels.weight_gradient, x, grad, into, self.geometry, PRODUCTS[self.precision])

    @property
    def geometry(self) -> Any:
        from fedgg.kernels.row_convolution import Geometry

        return Geometry(self.kernel, self.stride, self.padding)


def _sum_parts(parts: Tensor, into: Tensor, parameters: Parameters) -> None:
    """Writes the sums of `[K, ..., C]` over all but rows and channels, as side work."""
    parameters.side.run(partial(torch.sum, parts.flatten(1, -2), 1, dtype=into.dtype, out=into), parts)


def _weights(view: Tensor) -> Tensor:
    """Weights `[K, O, C, kh, kw]` as they lie in pixelwise rows, `[K, O, kh, kw, C]`: a view, since rows have gaps."""
    return view.permute(0, 1, 3, 4, 2)


@dataclass(frozen=True)
class RowGroupNorm:
    """Group normalisation of images; with `shortcut`, a second input is added to it; optionally followed by ReLU."""

    weight: str
    bias: str
    groups: int
    epsilon: float
    shortcut: bool = False
    relu: bool = False

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self.weight, self.bias

    def by_torch(self, x: Tensor, parameters: Views, mask_keys: MaskKeys, *shortcut: Tensor) -> Tensor:
        y = F.group_norm(x, self.groups, parameters[self.weight], parameters[self.bias], self.epsilon)
        y = y + shortcut[0] if self.shortcut else y
        return y.relu() if self.relu else y

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys, *shortcut: Tensor) -> tuple[Tensor, Any]:
        from fedgg.kernels import row_group_norm

        x = pixelwise(x)
        scale, shift = parameters.exact[self.weight], parameters.exact[self.bias]
        added = pixelwise(shortcut[0]) if self.shortcut else None
        y, mean, deviation = row_group_norm.forward(x, scale, shift, self.groups, self.epsilon, added, self.relu)
        return channelwise(y), (x, y if self.relu else x, mean, deviation)

    def backward(
        self, grad: Tensor, saved: Any, parameters: Parameters, into: Views, to_input: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        from fedgg.kernels import row_group_norm

        x, y, mean, deviation = saved
        grad_x, of_shortcut, parts = row_group_norm.backward(
            pixelwise(grad.to(x.dtype)), x, y, parameters.exact[self.weight], mean, deviation, self.relu, self.shortcut
        )
        sums = partial(row_group_norm.add_images, parts, into[self.weight], into[self.bias])
        parameters.side.run(sums, parts)
        return channelwise(grad_x) if of_shortcut is None else (channelwise(grad_x), channelwise(of_shortcut))


@dataclass(frozen=True)
class MaxPool:
    """A max-pool of images."""

    parameter_names: ClassVar[tuple[str, ...]] = ()
    kernel: Pair
    stride: Pair
    padding: Pair

    def by_torch(self, x: Tensor, parameters: Views, mask_keys: MaskKeys) -> Tensor:
        return F.max_pool2d(x, self.kernel, self.stride, self.padding)

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys) -> tuple[Tensor, Any]:
        from fedgg.kernels import max_pool

        x = pixelwise(x)
        y, winner = max_pool.forward(x.flatten(0, 1), self._geometry)
        return channelwise(y.unflatten(0, x.shape[:2])), (winner, x.shape)

    def backward(self, grad: Tensor, saved: Any, parameters: Parameters, into: Views, to_input: bool) -> Tensor:
        from fedgg.kernels import max_pool

        winner, shape = saved
        height, width = shape[2:4]
        out = max_pool.backward(pixelwise(grad).flatten(0, 1), winner, height, width, self._geometry)
        return channelwise(out.view(shape))

    @property
    def _geometry(self) -> Any:
        from fedgg.kernels.row_convolution import Geometry

        return Geometry(self.kernel, self.stride, self.padding)


@dataclass(frozen=True)
class MeanPool:
    """The mean over all pixels of each channel, `[K, B, C, 1, 1]`."""

    parameter_names: ClassVar[tuple[str, ...]] = ()

    def by_torch(self, x: Tensor, parameters: Views, mask_keys: MaskKeys) -> Tensor:
        return x.mean((-2, -1), keepdim=True)

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys) -> tuple[Tensor, Any]:
        return x.mean((-2, -1), keepdim=True), x.shape

    def backward(self, grad: Tensor, saved: Any, parameters: Parameters, into: Views, to_input: bool) -> Tensor:
        spread: Tensor = (grad / (saved[-2] * saved[-1])).expand(saved)
        return spread


@dataclass(frozen=True)
class RowDense(Dense):
    """A linear layer whose gradient of the weights is that of a convolution of images of one pixel, where it can be."""

    def backward(self, grad: Tensor, saved: Any, parameters: Parameters, into: Views, to_input: bool) -> Tensor | None:
        from fedgg.kernels import row_convolution_by_copies

        x, y = saved
        if x.dtype == into[self.weight].dtype:
            return super().backward(grad, saved, parameters, into, to_input)
        geometry, steps = self.geometry, parameters.steps(self.weight)
        images, weights, into_w = (_as_images(t) for t in (x.contiguous(), parameters[self.weight], into[self.weight]))
        if not steps and not row_convolution_by_copies.supports(images, weights, geometry):
            return super().backward(grad, saved, parameters, into, to_input)
        grad = grad.to(x.dtype).contiguous()
        if self.relu:
            grad = torch.where(y > 0, grad, 0)
        _sum_parts(grad, into[self.bias], parameters)
        slopes = _as_images(grad)
        if not steps:
            of_weights = partial(row_convolution_by_copies.weight_gradient, images, slopes, into_w, geometry)
            parameters.side.run(of_weights, images, grad)
        grad_x = torch.bmm(grad, parameters[self.weight]) if to_input else None
        if steps:  # after the last use of the weights
            parameters.take(self.weight, images, slopes, geometry)
        return grad_x

    @property
    def geometry(self) -> Any:
        from fedgg.kernels.row_convolution import Geometry

        return Geometry((1, 1), (1, 1), (0, 0))


def _as_images(rows: Tensor) -> Tensor:
    """`[K, N, F]` as `[K, N, 1, 1, F]`."""
    return rows[:, :, None, None]


@dataclass(frozen=True)
class TokenDense(Dense):
    """A linear layer on the last dimension of inputs with further dimensions, `[K, B, ..., F]`."""

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys) -> tuple[Tensor, Any]:
        y, saved = super().forward(x.flatten(1, -2), parameters, mask_keys)
        return y.unflatten(1, x.shape[1:-1]), (saved, x.shape)

    def backward(self, grad: Tensor, saved: Any, parameters: Parameters, into: Views, to_input: bool) -> Tensor | None:
        of_layer, shape = saved
        grad_x = super().backward(grad.flatten(1, -2), of_layer, parameters, into, to_input)
        return None if grad_x is None else grad_x.view(shape)


@dataclass(frozen=True, eq=False)
class AnyOperation:
    """An operation without kernels of its own: run for all rows by `torch.func.vmap`, differentiated by autograd."""

    function: Callable[[Sequence[Tensor], Views], Tensor]  # of the inputs and the parameters of one row
    parameter_names: tuple[str, ...]
    products: torch.dtype | None = None
    contiguous: bool = False  # whether it takes no images that are pixelwise in memory

    def by_torch(self, x: Tensor, parameters: Views, mask_keys: MaskKeys, *others: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.function((x, *others), {name: parameters[name] for name in self.parameter_names})

    def forward(self, x: Tensor, parameters: Parameters, mask_keys: MaskKeys, *others: Tensor) -> tuple[Tensor, Any]:
        inputs = [(value.contiguous() if self.contiguous else value).detach() for value in (x, *others)]
        leaves = {name: parameters.exact[name].detach() for name in self.parameter_names}
        for tensor in (*inputs, *leaves.values()):
            tensor.requires_grad_(tensor.is_floating_point())
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), self._products(x.device):
            y = vmap(lambda rows, row: self.function(rows, row))(inputs, leaves)
        return y.detach(), (y, inputs, leaves)

    def backward(
        self, grad: Tensor, saved: Any, parameters: Parameters, into: Views, to_input: bool
    ) -> tuple[Tensor | None, ...]:
        y, inputs, leaves = saved
        wanted = [*(value for value in inputs if value.requires_grad), *leaves.values()]
        grads: Iterator[Tensor | None]
        grads = iter(torch.autograd.grad(y, wanted, grad.to(y.dtype), allow_unused=True))
        of_inputs = [next(grads) if value.requires_grad else None for value in inputs]
        for name, of_parameter in zip(self.parameter_names, grads, strict=True):
            into[name].copy_(torch.zeros_like(into[name]) if of_parameter is None else of_parameter)
        return tuple(of_inputs)

    def _products(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self.products, enabled=self.products is not None, cache_enabled=False)
