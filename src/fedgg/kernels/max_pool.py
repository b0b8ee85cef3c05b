"""Max-pool of pixelwise images `[N, H, W, C]` with any window, and its backward pass in a fixed order of sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedgg.kernels.row_convolution import Geometry

SIZE = 512


@triton.jit
def _forward(
    x, y, winner, elements, height, width, channels, high, wide,
    kh: tl.constexpr, kw: tl.constexpr, sy: tl.constexpr, sx: tl.constexpr, py: tl.constexpr, px: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    c, ox, oy = at % channels, at // channels % wide, at // (channels * wide) % high
    image = at // (channels * wide * high)
    best = tl.full((size,), float("-inf"), tl.float32)
    which = tl.full((size,), -1, tl.int32)
    for number in tl.static_range(kh * kw):
        iy, ix = oy * sy - py + number // kw, ox * sx - px + number % kw
        inside = (at < elements) & (iy >= 0) & (iy < height) & (ix >= 0) & (ix < width)
        value = tl.load(x + ((image * height + iy) * width + ix) * channels + c, mask=inside, other=0.0).to(tl.float32)
        better = inside & ((value > best) | (value != value) | (which < 0))
        which = tl.where(better, number, which)
        best = tl.where(better, value, best)
    tl.store(y + at, best, mask=at < elements)
    tl.store(winner + at, which.to(tl.int8), mask=at < elements)


@triton.jit
def _backward(
    grad, winner, out, elements, height, width, channels, high, wide,
    kh: tl.constexpr, kw: tl.constexpr, sy: tl.constexpr, sx: tl.constexpr, py: tl.constexpr, px: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    c, ix, iy = at % channels, at // channels % width, at // (channels * width) % height
    image = at // (channels * width * height)
    total = tl.zeros((size,), tl.float32)
    for number in tl.static_range(kh * kw):
        from_y, from_x = iy + py - number // kw, ix + px - number % kw
        oy, ox = from_y // sy, from_x // sx
        hit = (from_y >= 0) & (from_y % sy == 0) & (oy < high) & (from_x >= 0) & (from_x % sx == 0) & (ox < wide)
        hit = hit & (at < elements)
        place = ((image * high + oy) * wide + ox) * channels + c
        won = tl.load(winner + place, mask=hit, other=-1).to(tl.int32) == number
        total += tl.where(won, tl.load(grad + place, mask=hit, other=0.0).to(tl.float32), 0.0)
    tl.store(out + at, total, mask=at < elements)


def forward(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The maxima, and the number of the pixel of the window that each came from."""
    images, height, width, channels = x.shape
    high, wide = geometry.outputs(height, width)
    y = x.new_empty((images, high, wide, channels))
    winner = torch.empty_like(y, dtype=torch.int8)
    _forward[(-(-y.numel() // SIZE),)](
        x, y, winner, y.numel(), height, width, channels, high, wide,
        *geometry.kernel, *geometry.stride, *geometry.padding, SIZE,
    )  # fmt: skip
    return y, winner


def backward(grad: Tensor, winner: Tensor, height: int, width: int, geometry: Geometry) -> Tensor:
    """The gradient of images of this height and width."""
    images, high, wide, channels = grad.shape
    out = grad.new_empty((images, height, width, channels))
    _backward[(-(-out.numel() // SIZE),)](
        grad, winner, out, out.numel(), height, width, channels, high, wide,
        *geometry.kernel, *geometry.stride, *geometry.padding, SIZE,
    )  # fmt: skip
    return out
