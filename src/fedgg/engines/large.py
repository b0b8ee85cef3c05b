"""A large model as a program: cuDNN's convolutions, with everything around them in passes of our own.

For one client at a time: `nn.Sequential`s of convolutions with ReLU, with or without a 2 x 2 max-pool, of linear
layers, dropout and `Flatten`. Images and weights lie pixelwise. Models with other layers (BatchNorm) run by autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg import kernels
from fedgg.core.net import Net
from fedgg.engines.equivalence import is_plain
from fedgg.engines.fused.pooling import is_2x2_max_pool
from fedgg.engines.layers import Moment, Parameters
from fedgg.engines.precision import Precision
from fedgg.engines.program import Program
from fedgg.engines.recognise import Taken, layers_of, proven

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

    def by_torch(self, x: Tensor, parameters: Parameters, moment: Moment) -> Tensor:
        y = F.conv2d(x, parameters[self.weight], parameters[self.bias], self.stride, self.padding, self.dilation).relu()
        return F.max_pool2d(y, 2) if self.pool else y

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


def large_program_of(net: Net) -> Program | None:
    """The program of a net whose rows lie pixelwise, or None where it has none."""
    if not net.start.is_cuda or net.start.dtype != torch.float32 or not kernels.available():
        return None
    layers = layers_of(net, _convolution)
    if not layers:
        return None
    precision: Precision = "tf32" if net.products is None else "bf16"
    return proven(Program(layers, net.layout, net.products), net, precision, rows=1)


def _convolution(prefix: str, parts: list[nn.Module]) -> Taken | None:
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
