"""Convolution, ReLU and 2 x 2 max-pool as one layer, for many small models at once, each with its own weights.

A pooled pixel depends on a patch of `T x T` input pixels, T = kernel + 1: the four convolution outputs of its window
are products of this patch with the kernel shifted by (0, 0), (0, 1), (1, 0) and (1, 1). So the patch is read once and
the maximum is taken in registers. For the backward pass one byte per pooled pixel is saved: which of the four was the
maximum (the first of equal values, as in torch), or DEAD if ReLU gave zero.

Images are *packed*: `[K, B, H, W, channels]` in memory, channels padded with zeros to a power of two, so that threads
read whole 16-byte words. The shifted kernels are written once a step (`_spread`): `[K, T, T, channels, 4 shifts,
outputs]`. Kernel sizes are odd; stride 1, no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedgg.kernels.dense import product, product_from_registers

DEAD = tl.constexpr(4)


@dataclass(frozen=True)
class Shape:
    """The layer's sizes, and the padded sizes used by the kernels."""

    channels: int
    height: int
    width: int
    out: int
    kernel: int

    @property
    def pooled(self) -> tuple[int, int]:
        return (self.height - self.kernel + 1) // 2, (self.width - self.kernel + 1) // 2

    @property
    def patch(self) -> int:
        return self.kernel + 1

    @property
    def lanes_in(self) -> int:
        return lanes(self.channels)

    @property
    def lanes_out(self) -> int:
        return max(8, lanes(self.out))

    @property
    def depth(self) -> int:
        """Input values of a pooled pixel, padding included."""
        return self.patch**2 * self.lanes_in


@dataclass(frozen=True)
class Tiles:
    """Rows and depth of a tile and number of warps, chosen by measurements on an H200."""

    forward: tuple[int, int, int] = (128, 32, 4)
    weights: tuple[int, int, int] = (64, 64, 4)
    inputs: tuple[int, int] = (128, 4)


TILES = Tiles()


def lanes(channels: int) -> int:
    """Padded number of channels of a packed image."""
    return max(4, 1 << (channels - 1).bit_length())


def packed(x: Tensor, width: int) -> Tensor:
    """`[K, B, C, H, W]` in packed memory; outputs of these kernels are packed already."""
    models, batch, channels, high, wide = x.shape
    expected = (batch * high * wide * width, high * wide * width, 1, wide * width, width)
    if x.stride() == expected:
        return x
    out = x.new_zeros((models, batch, high, wide, width))
    out[..., :channels] = x.permute(0, 1, 3, 4, 2)
    return out.permute(0, 1, 4, 2, 3)[:, :, :channels]


def empty_packed(like: Tensor, models: int, batch: int, channels: int, high: int, wide: int, width: int) -> Tensor:
    """Uninitialised packed images, viewed as `[K, B, C, H, W]`."""
    memory = like.new_empty((models, batch, high, wide, width))
    return memory.permute(0, 1, 4, 2, 3)[:, :, :channels]


@triton.jit
def _spread(
    w, spread, out, wk, channels: tl.constexpr, k: tl.constexpr, ci: tl.constexpr, co: tl.constexpr,
    depth: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """The four shifted kernels of one model, `[patch values, 4 * outputs]`."""
    model = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * size + tl.arange(0, size)
    t: tl.constexpr = k + 1
    o, shift, kk = at % co, (at // co) % 4, at // (4 * co)
    c, i, j = kk % ci, kk // (t * ci) - shift // 2, (kk // ci) % t - shift % 2
    inside = (c < channels) & (o < out) & (i >= 0) & (i < k) & (j >= 0) & (j < k)
    value = tl.load(w + model * wk + ((o * channels + c) * k + i) * k + j, mask=inside, other=0.0)
    tl.store(spread + model * depth * 4 * co + at, value, mask=at < depth * 4 * co)


@triton.jit
def _patches(x, m, kk, pixels, depth, high: tl.constexpr, wide: tl.constexpr, t: tl.constexpr, ci: tl.constexpr,
             height: tl.constexpr, width: tl.constexpr):  # fmt: skip
    """The patches of some pooled pixels, `[pixels, patch values]`."""
    image, py, px = m // (high * wide), (m // wide) % high, m % wide
    corner = ((image * height + 2 * py) * width + 2 * px) * ci
    offset = ((kk // (t * ci)) * width + (kk // ci) % t) * ci + kk % ci
    return tl.load(x + corner[:, None] + offset[None, :], mask=(m < pixels)[:, None] & (kk < depth)[None, :], other=0.0)


@triton.jit
def _forward(
    x, spread, bias, y, winner, pixels, out, bk, images,
    k: tl.constexpr, ci: tl.constexpr, co: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    high: tl.constexpr, wide: tl.constexpr, depth: tl.constexpr,
    rows: tl.constexpr, chunk: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * rows + tl.arange(0, rows)
    o = tl.arange(0, co)
    model_images = x + model * images * height * width * ci
    weights = spread + model * depth * 4 * co
    a00 = tl.zeros((rows, co), tl.float32)
    a01 = tl.zeros((rows, co), tl.float32)
    a10 = tl.zeros((rows, co), tl.float32)
    a11 = tl.zeros((rows, co), tl.float32)
    for start in range(0, depth, chunk):
        kk = start + tl.arange(0, chunk)
        patch = _patches(model_images, m, kk, pixels, depth, high, wide, k + 1, ci, height, width)
        place = weights + (kk * 4 * co)[:, None] + o[None, :]
        inside = (kk < depth)[:, None]
        a00 = product(patch, tl.load(place, mask=inside, other=0.0), a00, precision)
        a01 = product(patch, tl.load(place + co, mask=inside, other=0.0), a01, precision)
        a10 = product(patch, tl.load(place + 2 * co, mask=inside, other=0.0), a10, precision)
        a11 = product(patch, tl.load(place + 3 * co, mask=inside, other=0.0), a11, precision)
    b = tl.load(bias + model * bk + o, mask=o < out, other=0.0)[None, :]
    best = a00 + b
    at = tl.zeros((rows, co), tl.int32)
    candidate = a01 + b
    at = tl.where(candidate > best, 1, at)
    best = tl.maximum(best, candidate, propagate_nan=tl.PropagateNan.ALL)
    candidate = a10 + b
    at = tl.where(candidate > best, 2, at)
    best = tl.maximum(best, candidate, propagate_nan=tl.PropagateNan.ALL)
    candidate = a11 + b
    at = tl.where(candidate > best, 3, at)
    best = tl.maximum(best, candidate, propagate_nan=tl.PropagateNan.ALL)
    at = tl.where(best > 0, at, DEAD)
    best = tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL)
    place = (model * pixels + m)[:, None] * co + o[None, :]
    keep = (m < pixels)[:, None]
    tl.store(y + place, best, mask=keep)
    tl.store(winner + place, at.to(tl.int8), mask=keep)


@triton.jit
def _window(grad, winner, m, keep, po, co: tl.constexpr):
    """Gradients of the four outputs of a window, `[pooled pixels, 4 * outputs]`: zero except for the maximum."""
    place = m[:, None] * co + (po % co)[None, :]
    won = tl.load(winner + place, mask=keep[:, None], other=4).to(tl.int32) == (po // co)[None, :]
    value = tl.load(grad + place, mask=keep[:, None], other=0.0)
    return tl.where(won, value, 0.0)


@triton.jit
def _weights(
    x, grad, winner, parts, bias_parts, pixels, images, turns, splits,
    k: tl.constexpr, ci: tl.constexpr, co: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    high: tl.constexpr, wide: tl.constexpr, depth: tl.constexpr,
    rows: tl.constexpr, chunk: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """A partial gradient of the four shifted kernels: the windows' gradients times the patches."""
    split = tl.program_id(0)
    part = tl.program_id(1)
    model = tl.program_id(2).to(tl.int64)
    kk = part * chunk + tl.arange(0, chunk)
    po = tl.arange(0, 4 * co)
    model_images = x + model * images * height * width * ci
    total = tl.zeros((4 * co, chunk), tl.float32)
    bias = tl.zeros((4 * co,), tl.float32)
    for turn in range(turns):
        m = (turn * splits + split) * rows + tl.arange(0, rows)
        patch = _patches(model_images, m, kk, pixels, depth, high, wide, k + 1, ci, height, width)
        hot = _window(grad + model * pixels * co, winner + model * pixels * co, m, m < pixels, po, co)
        total = product_from_registers(tl.trans(hot), patch, total, precision)
        bias += tl.sum(hot.to(tl.float32), axis=0)
    place = (model * splits + split) * 4 * co + po
    tl.store(parts + place[:, None] * depth + kk[None, :], total, mask=(kk < depth)[None, :])
    if part == 0:
        tl.store(bias_parts + place, bias)


@triton.jit
def _fold(
    parts, bias_parts, grad_w, grad_bias, out, splits, wk, bk,
    channels: tl.constexpr, k: tl.constexpr, ci: tl.constexpr, co: tl.constexpr, depth: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    """Sums the partial gradients of one model over parts and shifts; the bias follows the weights."""
    model = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * size + tl.arange(0, size)
    each: tl.constexpr = channels * k * k
    t: tl.constexpr = k + 1
    o, c, i, j = at // each, (at // (k * k)) % channels, (at // k) % k, at % k
    weight = at < out * each
    is_bias = (at >= out * each) & (at < out * each + out)
    lane = at - out * each
    total = tl.zeros((size,), tl.float32)
    for split in range(splits):
        for p in range(4):
            place = (model * splits + split) * 4 * co + p * co
            kk = ((i + p // 2) * t + j + p % 2) * ci + c
            total += tl.load(parts + (place + o) * depth + kk, mask=weight, other=0.0)
            total += tl.load(bias_parts + place + lane, mask=is_bias, other=0.0)
    tl.store(grad_w + model * wk + at, total, mask=weight)
    tl.store(grad_bias + model * bk + lane, total, mask=is_bias)


@triton.jit
def _inputs(
    spread, grad, winner, grad_x, blocks, pixels, images,
    k: tl.constexpr, ci: tl.constexpr, co: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    high: tl.constexpr, wide: tl.constexpr, depth: tl.constexpr,
    rows: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Gradient of the input, in blocks of 2 x 2 pixels: the sum over the pooled pixels whose patches contain them."""
    model = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * rows + tl.arange(0, rows)
    tall: tl.constexpr = (height + 1) // 2
    broad: tl.constexpr = (width + 1) // 2
    image, by, bx = m // (tall * broad), (m // broad) % tall, m % broad
    po = tl.arange(0, 4 * co)
    n = tl.arange(0, 4 * ci)
    ry, rx, c = n // (2 * ci), (n // ci) % 2, n % ci
    half: tl.constexpr = (k + 1) // 2
    total = tl.zeros((rows, 4 * ci), tl.float32)
    for q in range(half * half):
        py, px = by - q // half, bx - q % half
        keep = (m < blocks) & (py >= 0) & (py < high) & (px >= 0) & (px < wide)
        pixel = (image * high + py) * wide + px
        hot = _window(grad + model * pixels * co, winner + model * pixels * co, pixel, keep, po, co)
        kk = ((2 * (q // half) + ry) * (k + 1) + 2 * (q % half) + rx) * ci + c
        kernel = tl.load(spread + model * depth * 4 * co + (kk * 4 * co)[:, None] + po[None, :])
        total = product_from_registers(hot, tl.trans(kernel), total, precision)
    y, x = 2 * by[:, None] + ry[None, :], 2 * bx[:, None] + rx[None, :]
    place = (((model * images + image[:, None]) * height + y) * width + x) * ci + c[None, :]
    tl.store(grad_x + place, total, mask=(m < blocks)[:, None] & (y < height) & (x < width))


def _sizes(shape: Shape) -> dict[str, Any]:
    high, wide = shape.pooled
    return {
        "k": shape.kernel, "ci": shape.lanes_in, "co": shape.lanes_out, "height": shape.height, "width": shape.width,
        "high": high, "wide": wide, "depth": shape.depth,
    }  # fmt: skip


def spread(w: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The shifted kernels of all models, computed once a step for the forward and the backward pass."""
    values, size = shape.depth * 4 * shape.lanes_out, 1024
    shifted = torch.empty((len(w), values), dtype=dtype, device=w.device)
    _spread[(-(-values // size), len(w))](
        w,
        shifted,
        shape.out,
        w.stride(0),
        shape.channels,
        shape.kernel,
        shape.lanes_in,
        shape.lanes_out,
        shape.depth,
        size,
    )
    return shifted


def forward(x: Tensor, kernels: Tensor, bias: Tensor, shape: Shape, precision: str) -> tuple[Tensor, Tensor]:
    """The layer's output `[K, B, O, PH, PW]`, packed, and the indices of the maxima as packed bytes; `x` is packed."""
    models, batch = x.shape[:2]
    high, wide = shape.pooled
    y = empty_packed(x, models, batch, shape.out, high, wide, shape.lanes_out)
    pixels = batch * high * wide
    winner = torch.empty((models, pixels, shape.lanes_out), dtype=torch.int8, device=x.device)
    rows, chunk, warps = TILES.forward
    _forward[(-(-pixels // rows), models)](
        x, kernels, bias, y, winner, pixels, shape.out, bias.stride(0), batch,
        **_sizes(shape), rows=rows, chunk=chunk, precision=precision, num_warps=warps,
    )  # fmt: skip
    return y, winner


def weight_gradient(
    x: Tensor, grad: Tensor, winner: Tensor, shape: Shape, precision: str, into_w: Tensor, into_bias: Tensor
) -> None:
    """Writes the gradients of weights and bias into views `[K, O, C, k, k]` and `[K, O]`; x and grad are packed."""
    models, batch = x.shape[:2]
    rows, chunk, warps = TILES.weights
    high, wide = shape.pooled
    pixels, four = batch * high * wide, 4 * shape.lanes_out
    tiles, chunks = -(-pixels // rows), -(-shape.depth // chunk)
    splits = max(1, min(tiles, -(-2048 // (models * chunks))))
    parts = torch.empty((models, splits, four, shape.depth), dtype=torch.float32, device=x.device)
    bias_parts = torch.empty((models, splits, four), dtype=torch.float32, device=x.device)
    _weights[(splits, chunks, models)](
        x, grad, winner, parts, bias_parts, pixels, batch, -(-tiles // splits), splits,
        **_sizes(shape), rows=rows, chunk=chunk, precision=precision, num_warps=warps,
    )  # fmt: skip
    numbers, size = shape.out * (shape.channels * shape.kernel**2 + 1), 128
    _fold[(-(-numbers // size), models)](
        parts, bias_parts, into_w, into_bias, shape.out, splits, into_w.stride(0), into_bias.stride(0),
        shape.channels, shape.kernel, shape.lanes_in, shape.lanes_out, shape.depth, size,
    )  # fmt: skip


def input_gradient(grad: Tensor, winner: Tensor, kernels: Tensor, shape: Shape, batch: int, precision: str) -> Tensor:
    """The gradient of the layer's input, packed; `grad` is packed."""
    models = len(grad)
    out = empty_packed(grad, models, batch, shape.channels, shape.height, shape.width, shape.lanes_in)
    high, wide = shape.pooled
    blocks = batch * -(-shape.height // 2) * -(-shape.width // 2)
    rows, warps = TILES.inputs
    _inputs[(-(-blocks // rows), models)](
        kernels, grad, winner, out, blocks, batch * high * wide, batch,
        **_sizes(shape), rows=rows, precision=precision, num_warps=warps,
    )  # fmt: skip
    return out
