"""Convolutions of images with up to four channels, the first layers of networks, for many rows at once.

Images are packed: pixelwise with four channels, `[K, B, H, W, 4]`, unused ones zero. Taps of one line of the kernel,
padded to a power of two, are then neighbours in memory and are read by wide loads, where `kernels.row_convolution`
would read the operands of a product number by number. Weights are `[K, O, kh, kw, C]` as there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedgg.kernels.dense import product
from fedgg.kernels.row_convolution import PROCESSORS, SIZES, Geometry, _add_parts

LANES = tl.constexpr(4)
MOST_CHANNELS = 4
ROWS = 128  # output pixels of a tile
DEPTH = 64  # pixels that are summed at a time for the weights


@triton.jit
def _taps(at, line: tl.constexpr, kh: tl.constexpr, kw: tl.constexpr, channels: tl.constexpr):
    """The tap and channel at places of a padded kernel, whether they exist, and their place in the weights."""
    dy, dx, c = at // (line * LANES), at // LANES % line, at % LANES
    return dy, dx, (dy < kh) & (dx < kw), (dy * kw + dx) * channels + c, c < channels


@triton.jit(do_not_specialize=SIZES)
def _forward(
    x, w, bias, y, stride_w, stride_bias, batch, height, width, high, wide, outputs,
    channels: tl.constexpr, kh: tl.constexpr, kw: tl.constexpr, sy: tl.constexpr, sx: tl.constexpr,
    py: tl.constexpr, px: tl.constexpr, has_bias: tl.constexpr, relu: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, line: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    pixels = batch * high * wide
    m = tl.program_id(0) * rows + tl.arange(0, rows)
    o = tl.program_id(2) * columns + tl.arange(0, columns)
    image, iy, ix = m // (high * wide), (m // wide) % high * sy - py, m % wide * sx - px
    corner = (image * height + iy) * width + ix
    inside_m, inside_o = m < pixels, o < outputs
    from_x = x + row * batch * height * width * LANES
    from_w = w + row * stride_w + o[None, :] * (kh * kw * channels)
    total = tl.zeros((rows, columns), tl.float32)
    for start in tl.static_range(0, kh * line * LANES, depth):
        dy, dx, exists, place, is_channel = _taps(start + tl.arange(0, depth), line, kh, kw, channels)
        yy, xx = iy[:, None] + dy[None, :], ix[:, None] + dx[None, :]
        seen = inside_m[:, None] & exists[None, :] & (yy >= 0) & (yy < height) & (xx >= 0) & (xx < width)
        c = tl.arange(0, depth) % LANES
        a = tl.load(from_x + (corner[:, None] + (dy * width + dx)[None, :]) * LANES + c[None, :], mask=seen, other=0.0)
        b = tl.load(from_w + place[:, None], mask=(exists & is_channel)[:, None] & inside_o[None, :], other=0.0)
        total = product(a, b, total, precision)
    if has_bias:
        total += tl.load(bias + row * stride_bias + o, mask=inside_o, other=0.0).to(tl.float32)[None, :]
    if relu:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(
        y + row * pixels * outputs + m[:, None] * outputs + o[None, :],
        total,
        mask=inside_m[:, None] & inside_o[None, :],
    )


@triton.jit(do_not_specialize=SIZES)
def _weight_gradient(
    x, grad, out, stride_row, stride_split, batch, height, width, high, wide, outputs, turns,
    channels: tl.constexpr, kh: tl.constexpr, kw: tl.constexpr, sy: tl.constexpr, sx: tl.constexpr,
    py: tl.constexpr, px: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, line: tl.constexpr, tiles_n: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Of a tile of outputs (rows) and places of the padded kernel (columns), summed over a part of the pixels."""
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    pixels = batch * high * wide
    o = tl.program_id(0) // tiles_n * rows + tl.arange(0, rows)
    at = tl.program_id(0) % tiles_n * columns + tl.arange(0, columns)
    dy, dx, exists, place, is_channel = _taps(at, line, kh, kw, channels)
    c = tl.arange(0, columns) % LANES
    from_x = x + row * batch * height * width * LANES
    from_grad = grad + row * pixels * outputs
    inside_o = o < outputs
    total = tl.zeros((rows, columns), tl.float32)
    for turn in range(0, turns):
        m = (split * turns + turn) * depth + tl.arange(0, depth)
        image, iy, ix = m // (high * wide), (m // wide) % high * sy - py, m % wide * sx - px
        corner = (image * height + iy) * width + ix
        inside = m < pixels
        a = tl.load(from_grad + m[:, None] * outputs + o[None, :], mask=inside[:, None] & inside_o[None, :], other=0.0)
        yy, xx = iy[:, None] + dy[None, :], ix[:, None] + dx[None, :]
        seen = inside[:, None] & exists[None, :] & (yy >= 0) & (yy < height) & (xx >= 0) & (xx < width)
        b = tl.load(from_x + (corner[:, None] + (dy * width + dx)[None, :]) * LANES + c[None, :], mask=seen, other=0.0)
        total = product(tl.trans(a), b, total, precision)
    weights: tl.constexpr = kh * kw * channels
    to = out + row * stride_row + split * stride_split + o[:, None] * weights + place[None, :]
    tl.store(to, total, mask=inside_o[:, None] & (exists & is_channel)[None, :])


def supports(w: Tensor, geometry: Geometry) -> bool:
    """Whether weights `[K, O, kh, kw, C]` are of so few channels, and the kernel is of usual size."""
    return w.is_cuda and w.shape[4] <= MOST_CHANNELS and max(geometry.kernel) <= 16


def packed(x: Tensor) -> Tensor:
    """`[K, B, H, W, 4]` of images `[K, B, C, H, W]`, without a copy if they lie so in memory."""
    models, batch, channels, high, wide = x.shape
    strides = (batch * high * wide * 4, high * wide * 4, 1, wide * 4, 4)
    if x.stride() == strides and x.storage_offset() % 4 == 0:
        return x.as_strided((models, batch, high, wide, 4), (*strides[:2], *strides[3:], 1))
    out = x.new_zeros((models, batch, high, wide, 4))
    out[..., :channels] = x.permute(0, 1, 3, 4, 2)
    return out


def _line(kw: int) -> int:
    """Taps of a line of the kernel, padded so that a line is at least 16 numbers."""
    return max(4, int(triton.next_power_of_2(kw)))


def _columns(outputs: int) -> int:
    return max(16, min(64, int(triton.next_power_of_2(outputs))))


def forward(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, relu: bool, precision: str) -> Tensor:
    """As `row_convolution.forward`, of packed images."""
    models, batch, height, width, _ = x.shape
    outputs, (high, wide) = w.shape[1], geometry.outputs(height, width)
    y = torch.empty((models, batch, high, wide, outputs), dtype=x.dtype, device=x.device)
    line, columns = _line(geometry.kernel[1]), _columns(outputs)
    depth = min(64 if x.element_size() == 2 else 32, int(triton.next_power_of_2(geometry.kernel[0] * line * 4)))
    _forward[(-(-batch * high * wide // ROWS), models, -(-outputs // columns))](
        x, w, y if bias is None else bias, y, w.stride(0), 0 if bias is None else bias.stride(0),
        batch, height, width, high, wide, outputs, w.shape[4],
        *geometry.kernel, *geometry.stride, *geometry.padding, bias is not None, relu, precision,
        ROWS, columns, line, depth, num_warps=4,
    )  # fmt: skip
    return y


def weight_gradient(x: Tensor, grad: Tensor, into: Tensor, geometry: Geometry, precision: str, splits: int = 0) -> None:
    """As `row_convolution.weight_gradient`, of packed images."""
    models, batch, height, width, _ = x.shape
    high, wide, outputs = grad.shape[2:]
    line, rows = _line(geometry.kernel[1]), _columns(outputs)
    places = geometry.kernel[0] * line * 4
    columns = min(64, int(triton.next_power_of_2(places)))
    tiles, tiles_n = -(-outputs // rows) * -(-places // columns), -(-places // columns)
    turns = -(-batch * high * wide // DEPTH)
    splits = splits or max(1, min(turns // 8, 4 * PROCESSORS // (models * tiles)))
    length = into[0].numel()
    parts = into
    if splits > 1:
        parts = torch.empty((models, splits, length), dtype=torch.float32, device=x.device)
    _weight_gradient[(tiles, models, splits)](
        x, grad, parts, parts.stride(0), length, batch, height, width, high, wide, outputs, -(-turns // splits),
        into.shape[4], *geometry.kernel, *geometry.stride, *geometry.padding, precision,
        rows, columns, line, tiles_n, DEPTH, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        size = 1024
        _add_parts[(-(-length // size), models)](parts, into, length, splits, into.stride(0), size)
