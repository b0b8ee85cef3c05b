"""Convolutions and 2 x 2 max-pools in faster forms on a CPU.

The maximum of ReLUs is the ReLU of the maximum: in an `nn.Sequential`, ReLU is applied after the max-pool, to a quarter
of the pixels. torch's max-pool, which handles one window at a time, is replaced by the elementwise maximum of whole
tensors:

pairs   for a convolution with few channels, which leaves most of a vector register unused: two neighbouring outputs are
        the products of one patch with the kernel and with the kernel shifted by a pixel. One convolution of stride 2
        with twice the output channels computes both, and the maximum is taken over the two halves of the channels;
views   for other convolutions: the maximum of four strided views of the output.

Networks without such a max-pool whose convolutions are narrow, such as ResNet-20, compute in the channels-last order
of memory.

A changed module is used only if `engines.module_equivalence` finds it equal to the original (`engines.fused.cpu_step`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.engines.module_equivalence import is_plain, shares_parameters

FEW_IN, FEW_OUT = 4, 8  # channels: twice as many outputs still fit into a vector register of 16 floats


NARROW = 1 << 16  # weights of a convolution: torch converts those of wider ones for longer than the order gains


def with_faster_layers(module: nn.Module) -> nn.Module:
    """A module with such layers in place of others, under the same names, or the module itself if there are none."""
    if shares_parameters(module):  # a shared part would have to be replaced in both places
        return module
    pooled = _pooled(module)
    return _channels_last(module) if pooled is module and _is_narrow(module) else pooled


def _pooled(module: nn.Module) -> nn.Module:
    parts = _replaced(module, _pooled)
    if is_plain(module, nn.Sequential):
        names = list(parts)
        for i, name in enumerate(names):
            preceding = [parts[earlier] for earlier in names[max(i - 2, 0) : i]]
            if not is_2x2_max_pool(parts[name]) or not preceding or not is_plain(preceding[-1], nn.ReLU):
                continue
            parts[names[i - 1]], parts[name] = FusedPool(), nn.ReLU()
            if len(preceding) == 2 and _has_few_channels(preceding[0]):
                parts[names[i - 2]], parts[names[i - 1]] = FusedConvolutionPool(preceding[0]), nn.Identity()
    for name, part in parts.items():
        if is_2x2_max_pool(part):
            parts[name] = FusedPool()
    return _with_parts(module, parts)


def _channels_last(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.Conv2d):
        return ChannelsLastConvolution(module) if _is_ordinary(module) else module
    return _with_parts(module, _replaced(module, _channels_last))


def _replaced(module: nn.Module, replace: Callable[[nn.Module], nn.Module]) -> dict[str, nn.Module]:
    """The parts of a module, each replaced; none of a module that does more than to call its class's `forward`."""
    if not is_plain(module, type(module)) or None in module._modules.values():
        return {}
    return {name: replace(part) for name, part in module._modules.items() if part is not None}


def _with_parts(module: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the module with these parts, or the module itself if they are its own."""
    if all(part is module._modules[name] for name, part in parts.items()):
        return module
    changed = copy.copy(module)
    changed._modules = dict(parts)
    return changed


def _is_narrow(module: nn.Module) -> bool:
    convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    return len(convolutions) > 1 and all(part.weight.numel() <= NARROW for part in convolutions)


def _is_ordinary(part: nn.Module) -> TypeGuard[nn.Conv2d]:
    return (
        is_plain(part, nn.Conv2d)
        and isinstance(part, nn.Conv2d)
        and part.padding_mode == "zeros"
        and not isinstance(part.padding, str)
    )


class ChannelsLastConvolution(nn.Module):
    """A convolution whose inputs and outputs are in channels-last order; shares the convolution's parameters."""

    def __init__(self, convolution: nn.Conv2d):
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias
        self._geometry: Any = (convolution.stride, convolution.padding, convolution.dilation, convolution.groups)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
        return F.conv2d(x, self.weight, self.bias, *self._geometry)


class FusedPool(nn.Module):
    """A max-pool over windows of 2 x 2 pixels."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] % 2 or x.shape[-1] % 2:
            return F.max_pool2d(x, 2)
        pooled, _, _ = _ViewMaximum.apply(x)  # type: ignore[no-untyped-call]
        return pooled  # type: ignore[no-any-return]


class FusedConvolutionPool(nn.Module):
    """A convolution followed by a 2 x 2 max-pool; shares the convolution's parameters."""

    def __init__(self, convolution: nn.Conv2d):
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias
        self._padding = convolution.padding

    def forward(self, x: Tensor) -> Tensor:
        assert not isinstance(self._padding, str)
        output_size = [
            size + 2 * pad - kernel + 1
            for size, pad, kernel in zip(x.shape[-2:], self._padding, self.weight.shape[-2:], strict=True)
        ]
        if output_size[0] % 2 or output_size[1] % 2:
            return F.max_pool2d(F.conv2d(x, self.weight, self.bias, padding=self._padding), 2)
        shifted = [F.pad(self.weight, (0, 1)), F.pad(self.weight, (1, 0))]
        bias = None if self.bias is None else self.bias.repeat(2)
        pairs = F.conv2d(x, torch.cat(shifted), bias, stride=(1, 2), padding=self._padding)
        pooled, _ = _PairMaximum.apply(pairs.unflatten(1, (2, -1)))  # type: ignore[no-untyped-call]
        return pooled  # type: ignore[no-any-return]


def is_2x2_max_pool(part: nn.Module) -> bool:
    """Whether it is a max-pool over windows of 2 x 2 pixels."""
    return (
        is_plain(part, nn.MaxPool2d)
        and isinstance(part, nn.MaxPool2d)
        and (part.kernel_size, part.stride) in ((2, 2), ((2, 2), (2, 2)))
        and (part.padding, part.dilation, part.ceil_mode, part.return_indices) == (0, 1, False, False)
    )


def _has_few_channels(part: nn.Module) -> TypeGuard[nn.Conv2d]:
    return (
        _is_ordinary(part)
        and part.in_channels <= FEW_IN
        and part.out_channels <= FEW_OUT
        and (part.stride, part.dilation, part.groups) == ((1, 1), (1, 1), 1)
    )


class _PairMaximum(torch.autograd.Function):
    """The maximum over the two planes of dimension 1, then over pairs of rows; the first of equal values wins.

    The backward pass multiplies by comparisons stored as floats, which is much faster than indexing by booleans.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.maximum(y[:, 0], y[:, 1])
        return torch.maximum(rows[..., 0::2, :], rows[..., 1::2, :]), rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        y, rows = ctx.saved_tensors
        row_grad = torch.empty_like(rows)
        upper, lower = row_grad[..., 0::2, :], row_grad[..., 1::2, :]
        torch.ge(rows[..., 0::2, :], rows[..., 1::2, :], out=upper).mul_(grad)
        torch.sub(grad, upper, out=lower)
        input_grad = torch.empty_like(y)
        left, right = input_grad[:, 0], input_grad[:, 1]
        torch.ge(y[:, 0], y[:, 1], out=left).mul_(row_grad)
        torch.sub(row_grad, left, out=right)
        return input_grad


class _ViewMaximum(torch.autograd.Function):
    """A 2 x 2 max-pool; the backward pass recomputes the indices of the maxima for torch's own backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top = torch.maximum(x[..., 0::2, 0::2], x[..., 0::2, 1::2])
        bottom = torch.maximum(x[..., 1::2, 0::2], x[..., 1::2, 1::2])
        return torch.maximum(top, bottom), top, bottom

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, top, bottom = output
        ctx.mark_non_differentiable(top, bottom)
        ctx.save_for_backward(*inputs, top, bottom)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        x, top, bottom = ctx.saved_tensors
        height, width = x.shape[-2:]
        in_bottom = bottom > top  # the first of equal values wins, as in torch
        right_of_top, right_of_bottom = top != x[..., 0::2, 0::2], bottom != x[..., 1::2, 0::2]
        in_right = right_of_top ^ (in_bottom & (right_of_top ^ right_of_bottom))  # bottom's where in_bottom, else top's
        corner = torch.arange(0, height, 2)[:, None] * width + torch.arange(0, width, 2)
        indices = torch.add(corner, in_bottom, alpha=width).add_(in_right)
        window = [2, 2], [2, 2], [0, 0], [1, 1], False
        input_grad: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *window, indices)
        return input_grad
