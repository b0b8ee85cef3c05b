"""Which modules have a program: what a user brings, looked at part by part.

An `nn.Sequential` made of convolution, ReLU and 2 x 2 max-pool, of linear layers with or without ReLU, of dropout and
of `Flatten` is run by layers of ours. Whatever else there is, `torch.func.vmap` runs: slower, the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from fedgg import kernels
from fedgg.core.layout import Layout
from fedgg.core.net import Net
from fedgg.core.quick import halves
from fedgg.engines.layers import ConvolutionReluPool, Dense, Dropout, Flatten, Layer, WideDense
from fedgg.engines.precision import Precision
from fedgg.engines.program import Program

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
