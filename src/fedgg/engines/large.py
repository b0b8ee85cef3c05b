"""A large model as a program: cuDNN's convolutions, with everything around them in passes of our own.

For one client at a time: `nn.Sequential`s of convolutions with ReLU, with or without a 2 x 2 max-pool, of linear
layers, dropout and `Flatten`. Images and weights lie pixelwise. Models with other layers (BatchNorm) run by autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedgg.core.net import Net
from fedgg.engines.program import Dropout, Flatten, Layer, Moment, Parameters, Program, leaves

Pair = tuple[int, int]


@dataclass(frozen=True)
class Convolution:
    """A convolution with ReLU, and a max-pool behind it or not."""

    weight: str
    bias: str
    stride: Pair
    padding: Pair
    dilation: Pair
    pool: bool

    def forward(self, x: Tensor, parameters: Parameters, moment: Moment) -> tuple[Tensor, Any]:
        from fedgg.kernels import layers

        w, bias = parameters[self.weight][0], parameters[self.bias][0]
        x = x[0].to(w.dtype).contiguous(memory_format=torch.channels_last)
        y = torch.ops.aten.convolution(x, w, None, *self._geometry)
        y = y.contiguous(memory_format=torch.channels_last)
        if not self.pool:
            y = layers.bias_relu(y, bias)
            return y[None], (x, y)
        pooled, winner = layers.bias_relu_pool(y, bias)
        return pooled[None], (x, (winner, *y.shape[2:]))

    def backward(
        self, grad: Tensor, kept: Any, parameters: Parameters, into: Parameters, to_input: bool
    ) -> Tensor | None:
        from fedgg.kernels import layers

        x, seen = kept
        grad = grad[0].contiguous(memory_format=torch.channels_last)
        grad, to_bias = layers.pool_back(grad, *seen) if self.pool else layers.relu_back(grad, seen)
        into[self.bias][0].copy_(to_bias)
        w = parameters[self.weight][0]
        to_x, to_w, _ = torch.ops.aten.convolution_backward(grad, x, w, None, *self._geometry, [to_input, True, False])
        into[self.weight][0].copy_(to_w)
        return to_x[None] if to_input else None

    @property
    def _geometry(self) -> tuple[Any, ...]:
        return list(self.stride), list(self.padding), list(self.dilation), False, [0, 0], 1


@dataclass(frozen=True)
class Linear:
    """A linear layer of one client, with ReLU behind it or not."""

    weight: str
    bias: str
    relu: bool

    def forward(self, x: Tensor, parameters: Parameters, moment: Moment) -> tuple[Tensor, Any]:
        w = parameters[self.weight][0]
        x = x[0].to(w.dtype)
        y = torch.addmm(parameters[self.bias][0], x, w.mT)
        y = y.relu_() if self.relu else y
        return y[None], (x, y)

    def backward(
        self, grad: Tensor, kept: Any, parameters: Parameters, into: Parameters, to_input: bool
    ) -> Tensor | None:
        x, y = kept
        grad = grad[0].to(x.dtype)
        if self.relu:
            grad = torch.where(y > 0, grad, 0)
        into[self.weight][0].copy_(grad.mT @ x)
        into[self.bias][0].copy_(grad.sum(0, dtype=torch.float32))
        return (grad @ parameters[self.weight][0])[None] if to_input else None


def large_program_of(net: Net) -> Program | None:
    """The program of a net whose rows lie pixelwise, or None where it has none."""
    from fedgg import kernels

    if not net.start.is_cuda or net.start.dtype != torch.float32 or not kernels.available():
        return None
    layers = _layers(net)
    return Program(layers, net.layout, net.products) if layers else None


def _layers(net: Net) -> list[Layer] | None:
    parts, names = list(leaves(net.module)), set(net.layout.names)
    layers: list[Layer] = []
    at = 0
    while at < len(parts):
        prefix, part = parts[at]
        kinds = [type(later) for _, later in parts[at + 1 : at + 3]]
        own = {f"{prefix}weight", f"{prefix}bias"} <= names
        if isinstance(part, nn.Conv2d) and own and kinds[:1] == [nn.ReLU] and _is_usual(part):
            pool = len(kinds) == 2 and _halves(parts[at + 2][1])
            geometry = (_two(part.stride), _two(part.padding), _two(part.dilation))
            layers.append(Convolution(f"{prefix}weight", f"{prefix}bias", *geometry, pool))
            at += 3 if pool else 2
        elif isinstance(part, nn.Linear) and own:
            relu = kinds[:1] == [nn.ReLU]
            layers.append(Linear(f"{prefix}weight", f"{prefix}bias", relu))
            at += 2 if relu else 1
        elif isinstance(part, nn.Dropout) and 0 < part.p < 1:
            layers.append(Dropout(1 + sum(isinstance(layer, Dropout) for layer in layers), part.p))
            at += 1
        elif isinstance(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1):
            layers.append(Flatten())
            at += 1
        else:
            return None
    return layers


def _is_usual(part: nn.Conv2d) -> bool:
    return part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)


def _halves(part: nn.Module) -> bool:
    return (
        isinstance(part, nn.MaxPool2d)
        and (part.kernel_size, part.stride) in ((2, 2), ((2, 2), (2, 2)))
        and (part.padding, part.dilation, part.ceil_mode, part.return_indices) == (0, 1, False, False)
    )


def _two(value: Any) -> Pair:
    return (value[0], value[1]) if isinstance(value, tuple) else (value, value)
