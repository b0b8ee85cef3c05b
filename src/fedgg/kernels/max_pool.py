"""Max-pool of pixelwise images `[N, H, W, C]` with any window, and its backward pass in a fixed order of sums.

A program treats a part of one line of an image, so that places are short sums instead of divisions of long numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedgg.kernels.row_convolution import Geometry

SIZE = 1024


@triton.jit(do_not_specialize=["lines"])
def _forward(
    x, y, winner, lines, height, width, wide, channels: tl.constexpr,
    kh: tl.constexpr, kw: tl.constexpr, sy: tl.constexpr, sx: tl.constexpr, py: tl.constexpr, px: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    """The maxima of a part of one line of outputs, of which an image has `lines`."""
    line = tl.program_id(0)
    image, oy = (line // lines).to(tl.int64), line % lines
    at = tl.program_id(1) * size + tl.arange(0, size)
    c, ox = at % channels, at // channels
    from_x = x + image * height * width * channels
    best = tl.full((size,), float("-inf"), tl.float32)
    which = tl.full((size,), -1, tl.int32)
    for number in tl.static_range(kh * kw):
        iy, ix = oy * sy - py + number // kw, ox * sx - px + number % kw
        inside = (ox < wide) & (iy >= 0) & (iy < height) & (ix >= 0) & (ix < width)
        value = tl.load(from_x + (iy * width + ix) * channels + c, mask=inside, other=0.0).to(tl.float32)
        better = inside & ((value > best) | (value != value) | (which < 0))
        which = tl.where(better, number, which)
        best = tl.where(better, value, best)
    to = line.to(tl.int64) * wide * channels + at
    tl.store(y + to, best, mask=ox < wide)
    tl.store(winner + to, which.to(tl.int8), mask=ox < wide)


@triton.jit(do_not_specialize=["height"])
def _backward(
    grad, winner, out, height, width, high, wide, channels: tl.constexpr,
    kh: tl.constexpr, kw: tl.constexpr, sy: tl.constexpr, sx: tl.constexpr, py: tl.constexpr, px: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    """The gradient of a part of one line of inputs, each pixel of which lies in at most `down` x `across` windows."""
    down: tl.constexpr = (kh + sy - 1) // sy
    across: tl.constexpr = (kw + sx - 1) // sx
    line = tl.program_id(0)
    image, iy = (line // height).to(tl.int64), line % height
    at = tl.program_id(1) * size + tl.arange(0, size)
    c, ix = at % channels, at // channels
    from_image = image * high * wide * channels
    total = tl.zeros((size,), tl.float32)
    for number in tl.static_range(down * across):
        oy, ox = (iy + py) // sy - number // across, (ix + px) // sx - number % across
        ky, kx = iy + py - oy * sy, ix + px - ox * sx
        hit = (ky < kh) & (oy >= 0) & (oy < high) & (kx < kw) & (ox >= 0) & (ox < wide) & (ix < width)
        place = from_image + (oy * wide + ox) * channels + c
        won = tl.load(winner + place, mask=hit, other=-1).to(tl.int32) == ky * kw + kx
        total += tl.where(won, tl.load(grad + place, mask=hit, other=0.0).to(tl.float32), 0.0)
    tl.store(out + line.to(tl.int64) * width * channels + at, total, mask=ix < width)


def _parts_of_line(elements: int) -> tuple[int, int]:
    """The number of parts of a line, and their size."""
    size = min(SIZE, max(128, int(triton.next_power_of_2(elements))))
    return -(-elements // size), size


def forward(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The maxima, and the number of the pixel of the window that each came from."""
    images, height, width, channels = x.shape
    high, wide = geometry.outputs(height, width)
    y = x.new_empty((images, high, wide, channels))
    winner = torch.empty_like(y, dtype=torch.int8)
    parts, size = _parts_of_line(wide * channels)
    _forward[(images * high, parts)](
        x, y, winner, high, height, width, wide, channels,
        *geometry.kernel, *geometry.stride, *geometry.padding, size,
    )  # fmt: skip
    return y, winner


def backward(grad: Tensor, winner: Tensor, height: int, width: int, geometry: Geometry) -> Tensor:
    """The gradient of images of this height and width."""
    images, high, wide, channels = grad.shape
    out = grad.new_empty((images, height, width, channels))
    parts, size = _parts_of_line(width * channels)
    _backward[(images * height, parts)](
        grad, winner, out, height, width, high, wide, channels,
        *geometry.kernel, *geometry.stride, *geometry.padding, size,
    )  # fmt: skip
    return out
