"""Bias, ReLU and 2 x 2 max-pool around a convolution of a large model in one pass, their backward pass, and dropout.

Images are pixelwise, `[K, B, H, W, C]` in memory. A bias's gradient is written as partial sums, which are added in a
fixed order, so that results are reproducible to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DEAD = tl.constexpr(4)
PIXELS, CHANNELS = 64, 64  # of a tile
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _tile(pixels, channels, size_p: tl.constexpr, size_c: tl.constexpr):
    p = tl.program_id(0) * size_p + tl.arange(0, size_p)
    c = tl.program_id(1) * size_c + tl.arange(0, size_c)
    return p, c, (p < pixels)[:, None] & (c < channels)[None, :]


@triton.jit
def _bias_relu(y, bias, stride_bias, pixels, channels, size_p: tl.constexpr, size_c: tl.constexpr):
    p, c, inside = _tile(pixels, channels, size_p, size_c)
    row = tl.program_id(2).to(tl.int64)
    place = y + (row * pixels + p[:, None]) * channels + c[None, :]
    b = tl.load(bias + row * stride_bias + c, mask=c < channels)[None, :]
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) + b
    tl.store(place, tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL), mask=inside)


@triton.jit
def _better(best, at, other, number: tl.constexpr):
    at = tl.where(other > best, number, at)
    return tl.maximum(best, other, propagate_nan=tl.PropagateNan.ALL), at


@triton.jit
def _bias_relu_pool(
    y, bias, out, winner, stride_bias, pixels, channels, batch, high, wide, height, width,
    size_p: tl.constexpr, size_c: tl.constexpr,
):  # fmt: skip
    p, c, inside = _tile(pixels, channels, size_p, size_c)
    row = tl.program_id(2).to(tl.int64)
    image, py, px = row * batch + p // (high * wide), (p // wide) % high, p % wide
    corner = ((image * height + 2 * py) * width + 2 * px) * channels
    place = y + corner[:, None] + c[None, :]
    b = tl.load(bias + row * stride_bias + c, mask=c < channels)[None, :]
    best = tl.load(place, mask=inside, other=0.0).to(tl.float32) + b
    at = tl.zeros((size_p, size_c), tl.int32)
    best, at = _better(best, at, tl.load(place + channels, mask=inside, other=0.0).to(tl.float32) + b, 1)
    low = place + width * channels
    best, at = _better(best, at, tl.load(low, mask=inside, other=0.0).to(tl.float32) + b, 2)
    best, at = _better(best, at, tl.load(low + channels, mask=inside, other=0.0).to(tl.float32) + b, 3)
    at = tl.where(best > 0, at, DEAD)
    here = (row * pixels + p[:, None]) * channels + c[None, :]
    tl.store(out + here, tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL), mask=inside)
    tl.store(winner + here, at.to(tl.int8), mask=inside)


@triton.jit
def _relu_back(grad, y, out, parts, pixels, channels, size_p: tl.constexpr, size_c: tl.constexpr):
    p, c, inside = _tile(pixels, channels, size_p, size_c)
    row = tl.program_id(2).to(tl.int64)
    place = (row * pixels + p[:, None]) * channels + c[None, :]
    alive = tl.load(y + place, mask=inside, other=0.0) > 0
    value = tl.where(alive, tl.load(grad + place, mask=inside, other=0.0), 0.0)
    tl.store(out + place, value, mask=inside)
    part = parts + (row * tl.num_programs(0) + tl.program_id(0)) * channels
    tl.store(part + c, tl.sum(value.to(tl.float32), axis=0), mask=c < channels)


@triton.jit
def _pool_back(
    grad, winner, out, parts, pixels, channels, batch, high, wide, height, width,
    size_p: tl.constexpr, size_c: tl.constexpr,
):  # fmt: skip
    p, c, inside = _tile(pixels, channels, size_p, size_c)
    row = tl.program_id(2).to(tl.int64)
    here = (row * pixels + p[:, None]) * channels + c[None, :]
    at = tl.load(winner + here, mask=inside, other=4).to(tl.int32)
    value = tl.where(at < DEAD, tl.load(grad + here, mask=inside, other=0.0), 0.0)
    image, py, px = row * batch + p // (high * wide), (p // wide) % high, p % wide
    corner = ((image * height + 2 * py) * width + 2 * px) * channels
    place = out + corner[:, None] + c[None, :]
    tl.store(place, tl.where(at == 0, value, 0.0), mask=inside)
    tl.store(place + channels, tl.where(at == 1, value, 0.0), mask=inside)
    tl.store(place + width * channels, tl.where(at == 2, value, 0.0), mask=inside)
    tl.store(place + (width + 1) * channels, tl.where(at == 3, value, 0.0), mask=inside)
    part = parts + (row * tl.num_programs(0) + tl.program_id(0)) * channels
    tl.store(part + c, tl.sum(value.to(tl.float32), axis=0), mask=c < channels)


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _drop(x, out, key, step, elements, place, threshold, left, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    row = tl.program_id(1)
    inside = at < elements
    moment = tl.load(step + row).to(tl.int64) * 1024 + place + 1
    start = _mixed(tl.load(key + row).to(tl.uint64) + moment.to(tl.uint64) * GOLDEN)
    uniform = _mixed(start + at.to(tl.uint64) * GOLDEN) >> 40
    here = row.to(tl.int64) * elements + at
    value = tl.load(x + here, mask=inside, other=0.0)
    keep = uniform >= threshold.to(tl.uint64)
    tl.store(out + here, tl.where(keep, value.to(tl.float32) / left, 0.0), mask=inside)


def _grid(models: int, pixels: int, channels: int) -> tuple[int, int, int]:
    return -(-pixels // PIXELS), -(-channels // CHANNELS), models


def bias_relu(y: Tensor, bias: Tensor) -> Tensor:
    """relu(y + bias), in place; y `[K, B, H, W, C]`, bias `[K, C]`."""
    models, channels = len(y), y.shape[-1]
    pixels = y[0].numel() // channels
    _bias_relu[_grid(models, pixels, channels)](y, bias, bias.stride(0), pixels, channels, PIXELS, CHANNELS)
    return y


def bias_relu_pool(y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """maxpool(relu(y + bias)), and which of the four was the maximum, or DEAD."""
    models, batch, height, width, channels = y.shape
    high, wide = height // 2, width // 2
    out = y.new_empty((models, batch, high, wide, channels))
    winner = torch.empty_like(out, dtype=torch.int8)
    pixels = batch * high * wide
    _bias_relu_pool[_grid(models, pixels, channels)](
        y, bias, out, winner, bias.stride(0), pixels, channels, batch, high, wide, height, width, PIXELS, CHANNELS
    )
    return out, winner


def relu_back(grad: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before bias and ReLU, and parts of that of the bias, `[K, parts, C]`."""
    models, channels = len(y), y.shape[-1]
    pixels = y[0].numel() // channels
    grid = _grid(models, pixels, channels)
    out = torch.empty_like(y)
    parts = torch.empty((models, grid[0], channels), dtype=torch.float32, device=y.device)
    _relu_back[grid](grad, y, out, parts, pixels, channels, PIXELS, CHANNELS)
    return out, parts


def pool_back(grad: Tensor, winner: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The same for `bias_relu_pool` on images of this height and width."""
    models, batch, high, wide, channels = grad.shape
    out = grad.new_empty((models, batch, height, width, channels))
    if height % 2 or width % 2:
        out.zero_()  # the last odd row or column belongs to no window
    pixels = batch * high * wide
    grid = _grid(models, pixels, channels)
    parts = torch.empty((models, grid[0], channels), dtype=torch.float32, device=grad.device)
    _pool_back[grid](grad, winner, out, parts, pixels, channels, batch, high, wide, height, width, PIXELS, CHANNELS)
    return out, parts


def drop(x: Tensor, key: Tensor, step: Tensor, place: int, p: float) -> Tensor:
    """Dropout with the masks of `core.forward`; x `[K, ...]`, key and step `[K, 1]`. Also its own backward pass."""
    x = x.contiguous()
    out, elements, size = torch.empty_like(x), x[0].numel(), 1024
    _drop[(-(-elements // size), len(x))](x, out, key, step, elements, place, round(p * (1 << 24)), 1 - p, size)
    return out
