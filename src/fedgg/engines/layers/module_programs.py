"""The programs of modules: which module has one, and whether it computes the same.

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

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedgg import kernels
from fedgg.core.layout import Layout
from fedgg.core.model import Net
from fedgg.engines.base import Precision
from fedgg.engines.fused.conv_pool import is_2x2_max_pool
from fedgg.engines.layers.program import Program
from fedgg.engines.layers.row_layers import RowConvolution, RowDense
from fedgg.engines.layers.stacked_layers import (
    Convolution,
    ConvolutionReluPool,
    Dense,
    Dropout,
    Flatten,
    Layer,
    Pair,
    WideDense,
)
from fedgg.engines.layers.traced_layers import TracedLayers, traced_layers
from fedgg.engines.module_equivalence import STEP, Trial, agree, is_plain, parts_in_order, shares_parameters

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
    return Program(traced.layers, net.layout, net.products, traced.inputs, _stepped(traced, net))


def _stepped(traced: TracedLayers, net: Net) -> list[str]:
    """Names of the weights whose step the kernel of their gradient can take."""
    from fedgg.kernels import row_convolution_by_copies, weight_gradient_step

    if net.products != torch.bfloat16 or not row_convolution_by_copies.has_copies(net.start.device):
        return []
    shapes = dict(zip(net.layout.names, net.layout.shapes, strict=True))
    result = []
    for layer in traced.layers:
        if isinstance(layer, RowConvolution | RowDense):
            outputs, channels = shapes[layer.weight][:2]
            if weight_gradient_step.supports(outputs, channels, layer.geometry, *traced.sides[layer.weight]):
                result.append(layer.weight)
    return result


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
