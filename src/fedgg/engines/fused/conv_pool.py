"""Convolution, ReLU and 2 x 2 max-pool as one, for a CPU.

The maximum of ReLUs is the ReLU of the maximum, so that ReLU is done on a quarter of the pixels, and torch's own
max-pool, which looks for the maximum one window at a time, becomes the maximum of four tensors:

pairs   of a convolution with few channels, which leaves most of a vector register empty: two outputs side by side are
        two kernels over one patch, the kernel and the same shifted by a pixel, so that one convolution of stride 2 with
        twice the channels has them in two planes, whose maximum is quickly found;
views   of any other: four strided views of what the convolution gave.

What is built here is used only where `engines.equivalence` finds it equal to the module (`engines.fused.net`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.engines.module_equivalence import is_plain, shares_parameters

FEW_IN, FEW_OUT = 4, 8  # channels: twice as many outputs still fit into the 16 numbers of a register


def with_fused_pooling(module: nn.Module) -> nn.Module:
    """A container of the same parts under the same names, or the module itself where nothing can be gained."""
    if shares_parameters(module):  # two places would need the same replacement
        return module
    return _fused(module)


def _fused(module: nn.Module) -> nn.Module:
    if not is_plain(module, nn.Sequential) or None in module._modules.values():
        return module
    before = {name: part for name, part in module._modules.items() if part is not None}  # a part may stand in it twice
    parts = OrderedDict((name, _fused(part)) for name, part in before.items())
    names = list(parts)
    for place, name in enumerate(names):
        earlier = [parts[one] for one in names[max(place - 2, 0) : place]]
        if not is_2x2_max_pool(parts[name]):
            continue
        if not earlier or not is_plain(earlier[-1], nn.ReLU):
            parts[name] = FusedPool()
            continue
        parts[names[place - 1]], parts[name] = FusedPool(), nn.ReLU()
        if len(earlier) == 2 and _has_few_channels(earlier[0]):
            parts[names[place - 2]], parts[names[place - 1]] = FusedConvolutionPool(earlier[0]), nn.Identity()
    return module if all(parts[name] is before[name] for name in names) else nn.Sequential(parts)


class FusedPool(nn.Module):
    """A max-pool over windows of 2 x 2 pixels."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] % 2 or x.shape[-1] % 2:
            return F.max_pool2d(x, 2)
        pooled, _, _ = _OfViews.apply(x)  # type: ignore[no-untyped-call]
        return pooled  # type: ignore[no-any-return]


class FusedConvolutionPool(nn.Module):
    """A convolution and the max-pool behind it, with the convolution's own parameters."""

    def __init__(self, convolution: nn.Conv2d):
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias
        self._padding = convolution.padding

    def forward(self, x: Tensor) -> Tensor:
        assert not isinstance(self._padding, str)
        sides = [
            size + 2 * pad - kernel + 1
            for size, pad, kernel in zip(x.shape[-2:], self._padding, self.weight.shape[-2:], strict=True)
        ]
        if sides[0] % 2 or sides[1] % 2:
            return F.max_pool2d(F.conv2d(x, self.weight, self.bias, padding=self._padding), 2)
        shifted = [F.pad(self.weight, (0, 1)), F.pad(self.weight, (1, 0))]
        bias = None if self.bias is None else self.bias.repeat(2)
        pairs = F.conv2d(x, torch.cat(shifted), bias, stride=(1, 2), padding=self._padding)
        best, _ = _OfPairs.apply(pairs.unflatten(1, (2, -1)))  # type: ignore[no-untyped-call]
        return best  # type: ignore[no-any-return]


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
        is_plain(part, nn.Conv2d)
        and isinstance(part, nn.Conv2d)
        and part.in_channels <= FEW_IN
        and part.out_channels <= FEW_OUT
        and (part.stride, part.dilation, part.groups, part.padding_mode) == ((1, 1), (1, 1), 1, "zeros")
        and not isinstance(part.padding, str)
    )


class _OfPairs(torch.autograd.Function):
    """The maximum over the two planes of dimension 1, then over pairs of rows; of equals the first counts, as in torch.

    Comparisons are kept as numbers, which is far quicker than choosing by booleans.
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
        of_rows = torch.empty_like(rows)
        upper, lower = of_rows[..., 0::2, :], of_rows[..., 1::2, :]
        torch.ge(rows[..., 0::2, :], rows[..., 1::2, :], out=upper).mul_(grad)
        torch.sub(grad, upper, out=lower)
        back = torch.empty_like(y)
        left, right = back[:, 0], back[:, 1]
        torch.ge(y[:, 0], y[:, 1], out=left).mul_(of_rows)
        torch.sub(of_rows, left, out=right)
        return back


class _OfViews(torch.autograd.Function):
    """A 2 x 2 max-pool; where the maximum was is found in the backward pass, for torch's own scatter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top = torch.maximum(x[..., 0::2, 0::2], x[..., 0::2, 1::2])
        low = torch.maximum(x[..., 1::2, 0::2], x[..., 1::2, 1::2])
        return torch.maximum(top, low), top, low

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, top, low = output
        ctx.mark_non_differentiable(top, low)
        ctx.save_for_backward(*inputs, top, low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        x, top, low = ctx.saved_tensors
        high, wide = x.shape[-2:]
        below = low > top  # of equals the first counts, as in torch
        on_top, beneath = top != x[..., 0::2, 0::2], low != x[..., 1::2, 0::2]
        right = on_top ^ (below & (on_top ^ beneath))  # a choice between the two
        corner = torch.arange(0, high, 2)[:, None] * wide + torch.arange(0, wide, 2)
        where = torch.add(corner, below, alpha=wide).add_(right)
        window = [2, 2], [2, 2], [0, 0], [1, 1], False
        back: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *window, where)
        return back
