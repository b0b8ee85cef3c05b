"""Convolutions of many rows at once, each with its own weights: implicit matrix products, one launch for all rows.

Images are *pixelwise*: `[K, B, H, W, C]` in memory, and weights `[K, O, kh, kw, C]`, as rows in the pixelwise layout
have them. A product's tile covers output pixels of one row; its operands are gathered from the image, so that no
patches are written to memory. Taps that lie outside the image read zeros.

Gradients of weights are sums over pixels: where there are many pixels and few weights, parts of the sum are computed
by different programs and added in a fixed order, so that results are reproducible to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedgg.kernels.dense import product

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """Kernel, stride and padding of a convolution, in pixels down and across."""

    kernel: Pair
    stride: Pair
    padding: Pair

    def outputs(self, height: int, width: int) -> Pair:
        sizes = zip((height, width), self.kernel, self.stride, self.padding, strict=True)
        high, wide = ((size + 2 * p - k) // s + 1 for size, k, s, p in sizes)
        return high, wide


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of a tile of a product, warps, and stages of the pipeline that loads operands."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Arguments whose values are no reason to compile a kernel again.
SIZES = ["batch", "height", "width", "high", "wide", "turns"]


@triton.jit
def _place(number, rows_total, columns_total, rows: tl.constexpr, columns: tl.constexpr, group: tl.constexpr):
    """The tile of a number, in an order in which programs that run at the same time share operands in the cache."""
    tiles_m, tiles_n = tl.cdiv(rows_total, rows), tl.cdiv(columns_total, columns)
    in_group = group * tiles_n
    first = (number // in_group) * group
    size = tl.minimum(tiles_m - first, group)
    return first + (number % in_group) % size, (number % in_group) // size


@dataclass
class Finish:
    """What the kernel of a gradient of images does with it before it is written.

    `added` `[K, B, H, W, C]` is another gradient of the same images. `relu` are the images, if they are the outputs of
    a ReLU: the gradient is then that before the ReLU, and `sums` `[K, parts, C]` its sums over pixels.
    """

    added: Tensor | None = None
    relu: Tensor | None = None
    sums: Tensor | None = None  # written by the kernel's launch

    @property
    def switches(self) -> tuple[bool, bool]:
        return self.added is not None, self.relu is not None

    def tensors(self, out: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of a kernel whose tiles of pixels number so many; an unused one is `out`."""
        if self.relu is not None:
            self.sums = torch.empty((len(out), parts, out.shape[4]), dtype=torch.float32, device=out.device)
        added, relu, sums = (out if tensor is None else tensor for tensor in (self.added, self.relu, self.sums))
        return added, relu, sums


@triton.jit
def finished(total, added, input_, sums, at, inside, part, inside_c, has_added: tl.constexpr, masked: tl.constexpr):
    """A tile of a gradient of images as `Finish` says; `part` is the place of its sums."""
    if has_added:
        total += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
    if masked:
        total = tl.where(inside & (tl.load(input_ + at, mask=inside, other=0.0) > 0), total, 0.0)
        tl.store(sums + part, tl.sum(total, axis=0), mask=inside_c)
    return total


@triton.jit(do_not_specialize=SIZES)
def _forward(
    x, w, bias, y, stride_w, stride_bias, batch, height, width, channels, high, wide, outputs,
    kh: tl.constexpr, kw: tl.constexpr, sy: tl.constexpr, sx: tl.constexpr, py: tl.constexpr, px: tl.constexpr,
    has_bias: tl.constexpr, relu: tl.constexpr, flat: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Outputs of one tile of pixels and channels; with `flat`, one chunk of operands covers several taps."""
    row = tl.program_id(1).to(tl.int64)
    pixels = batch * high * wide
    tile_m, tile_n = _place(tl.program_id(0), pixels, outputs, rows, columns, 8)
    m = tile_m * rows + tl.arange(0, rows)
    o = tile_n * columns + tl.arange(0, columns)
    kk = tl.arange(0, depth)
    image, iy, ix = m // (high * wide), (m // wide) % high * sy - py, m % wide * sx - px
    corner = (image * height + iy) * width + ix
    inside_m, inside_o = m < pixels, o < outputs
    from_x = x + row * batch * height * width * channels
    from_w = w + row * stride_w + o[None, :] * (kh * kw * channels) + kk[:, None]
    total = tl.zeros((rows, columns), tl.float32)
    if flat:
        for start in range(0, kh * kw * channels, depth):
            at = start + kk
            dy, dx, c = at // (kw * channels), (at // channels) % kw, at % channels
            yy, xx = iy[:, None] + dy[None, :], ix[:, None] + dx[None, :]
            seen = inside_m[:, None] & (yy >= 0) & (yy < height) & (xx >= 0) & (xx < width)
            counts = at < kh * kw * channels
            place = (corner[:, None] + (dy * width + dx)[None, :]) * channels + c[None, :]
            a = tl.load(from_x + place, mask=seen & counts[None, :], other=0.0)
            b = tl.load(from_w + start, mask=counts[:, None] & inside_o[None, :], other=0.0)
            total = product(a, b, total, precision)
    else:
        chunks = channels // depth
        for turn in range(0, kh * kw * chunks):
            tap, c = turn // chunks, (turn % chunks) * depth
            dy, dx = tap // kw, tap % kw
            seen = inside_m & (iy + dy >= 0) & (iy + dy < height) & (ix + dx >= 0) & (ix + dx < width)
            place = (corner + (dy * width + dx)) * channels + c
            a = tl.load(from_x + place[:, None] + kk[None, :], mask=seen[:, None], other=0.0)
            b = tl.load(from_w + tap * channels + c, mask=inside_o[None, :], other=0.0)
            total = product(a, b, total, precision)
    if has_bias:
        total += tl.load(bias + row * stride_bias + o, mask=inside_o, other=0.0).to(tl.float32)[None, :]
    if relu:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    to = y + row * pixels * outputs + m[:, None] * outputs + o[None, :]
    tl.store(to, total, mask=inside_m[:, None] & inside_o[None, :])


@triton.jit(do_not_specialize=SIZES)
def _input_gradient(
    grad, w, out, added, input_, sums, stride_w, batch, height, width, channels, high, wide, outputs,
    kh: tl.constexpr, kw: tl.constexpr, sy: tl.constexpr, sx: tl.constexpr, py: tl.constexpr, px: tl.constexpr,
    has_added: tl.constexpr, masked: tl.constexpr, flat: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of input pixels and channels.

    With a stride, pixels that are reached by the same taps are treated together (program_id 2), so that no product is
    with zeros.
    """
    row = tl.program_id(1).to(tl.int64)
    first_y, first_x = tl.program_id(2) // sx, tl.program_id(2) % sx
    tall, broad = tl.cdiv(height - first_y, sy), tl.cdiv(width - first_x, sx)
    pixels = batch * tall * broad
    most_pixels = batch * tl.cdiv(height, sy) * tl.cdiv(width, sx)
    tile_m, tile_n = _place(tl.program_id(0), most_pixels, channels, rows, columns, 8)
    m = tile_m * rows + tl.arange(0, rows)
    c = tile_n * columns + tl.arange(0, columns)
    kk = tl.arange(0, depth)
    safe_tall, safe_broad = tl.maximum(tall, 1), tl.maximum(broad, 1)
    image, iy, ix = (
        m // (safe_tall * safe_broad),
        (m // safe_broad) % safe_tall * sy + first_y,
        m % safe_broad * sx + first_x,
    )
    inside_m, inside_c = m < pixels, c < channels
    # Taps that reach these pixels: ky = from_ky + sy * j, and the output's row is (iy + py - ky) / sy.
    from_ky, from_kx = (first_y + py) % sy, (first_x + px) % sx
    taps_y, taps_x = tl.cdiv(kh - from_ky, sy), tl.cdiv(kw - from_kx, sx)
    oy, ox = (iy + py - from_ky) // sy, (ix + px - from_kx) // sx
    corner = (image * high + oy) * wide + ox
    from_grad = grad + row * batch * high * wide * outputs
    from_w = w + row * stride_w
    total = tl.zeros((rows, columns), tl.float32)
    chunks = tl.cdiv(outputs, depth)
    for turn in range(0, taps_y * taps_x * chunks):
        tap, o = turn // chunks, (turn % chunks) * depth + kk
        jy, jx = tap // tl.maximum(taps_x, 1), tap % tl.maximum(taps_x, 1)
        seen = inside_m & (oy - jy >= 0) & (oy - jy < high) & (ox - jx >= 0) & (ox - jx < wide)
        place = (corner - (jy * wide + jx)) * outputs
        weight = ((from_ky + sy * jy) * kw + from_kx + sx * jx) * channels
        to = from_w + o[:, None] * (kh * kw * channels) + weight + c[None, :]
        if flat:
            counts = o < outputs
            a = tl.load(from_grad + place[:, None] + o[None, :], mask=seen[:, None] & counts[None, :], other=0.0)
            b = tl.load(to, mask=counts[:, None] & inside_c[None, :], other=0.0)
        else:
            a = tl.load(from_grad + place[:, None] + o[None, :], mask=seen[:, None], other=0.0)
            b = tl.load(to, mask=inside_c[None, :], other=0.0)
        total = product(a, b, total, precision)
    pixel = (image * height + iy) * width + ix
    at = row * batch * height * width * channels + pixel[:, None] * channels + c[None, :]
    inside = inside_m[:, None] & inside_c[None, :]
    tiles_m = tl.cdiv(most_pixels, rows)
    part = ((row * tl.num_programs(2) + tl.program_id(2)) * tiles_m + tile_m) * channels + c
    total = finished(total, added, input_, sums, at, inside, part, inside_c, has_added, masked)
    tl.store(out + at, total, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _weight_gradient(
    x, grad, out, stride_row, stride_split, batch, height, width, channels, high, wide, outputs, turns,
    kh: tl.constexpr, kw: tl.constexpr, sy: tl.constexpr, sx: tl.constexpr, py: tl.constexpr, px: tl.constexpr,
    flat: tl.constexpr, precision: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of weights, summed over a part of the pixels. Columns are taps and input channels."""
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    pixels = batch * high * wide
    weights = kh * kw * channels
    tile_m, tile_n = _place(tl.program_id(0), outputs, weights, rows, columns, 8)
    o = tile_m * rows + tl.arange(0, rows)
    n = tile_n * columns + tl.arange(0, columns)
    dy, dx, c = n // (kw * channels), (n // channels) % kw, n % channels
    tap = tile_n * columns // channels
    tap_y, tap_x = tap // kw, tap % kw
    from_x = x + row * batch * height * width * channels
    from_grad = grad + row * pixels * outputs
    total = tl.zeros((rows, columns), tl.float32)
    for turn in range(0, turns):
        m = (split * turns + turn) * depth + tl.arange(0, depth)
        image, iy, ix = m // (high * wide), (m // wide) % high * sy - py, m % wide * sx - px
        corner = (image * height + iy) * width + ix
        inside = m < pixels
        a = tl.load(
            from_grad + m[:, None] * outputs + o[None, :], mask=inside[:, None] & (o < outputs)[None, :], other=0.0
        )
        if flat:
            yy, xx = iy[:, None] + dy[None, :], ix[:, None] + dx[None, :]
            seen = inside[:, None] & (yy >= 0) & (yy < height) & (xx >= 0) & (xx < width) & (n < weights)[None, :]
            place = (corner[:, None] + (dy * width + dx)[None, :]) * channels + c[None, :]
            b = tl.load(from_x + place, mask=seen, other=0.0)
        else:
            yy, xx = iy + tap_y, ix + tap_x
            seen = inside & (yy >= 0) & (yy < height) & (xx >= 0) & (xx < width)
            place = (corner + (tap_y * width + tap_x)) * channels
            b = tl.load(from_x + place[:, None] + c[None, :], mask=seen[:, None], other=0.0)
        total = product(tl.trans(a), b, total, precision)
    to = out + row * stride_row + split * stride_split + o[:, None] * weights + n[None, :]
    tl.store(to, total, mask=(o < outputs)[:, None] & (n < weights)[None, :])


@triton.jit
def _add_parts(parts, out, length, splits, stride_row, size: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * size + tl.arange(0, size)
    total = tl.zeros((size,), tl.float32)
    for split in range(splits):
        total += tl.load(parts + (row * splits + split) * length + at, mask=at < length, other=0.0)
    tl.store(out + row * stride_row + at, total, mask=at < length)


PROCESSORS = 132  # of the GPU for which tiles were chosen


def _depth(channels: int, most: int) -> tuple[int, bool]:
    """Depth of a chunk of operands, and whether a chunk covers several taps because channels are no multiple of 16."""
    for depth in (64, 32, 16):
        if depth <= most and channels % depth == 0:
            return depth, False
    return min(most, 32), True


def _columns(size: int, most: int = 128) -> int:
    return max(16, min(most, int(triton.next_power_of_2(size))))


def forward_tile(models: int, pixels: int, channels: int, outputs: int, bytes_each: int) -> Tile:
    columns = _columns(outputs)
    rows = 128 if models * -(-pixels // 128) * -(-outputs // columns) >= PROCESSORS else 64
    depth = _depth(channels, 64 if bytes_each == 2 else 32)[0]
    return Tile(rows, columns, depth, 8 if rows * columns >= 128 * 128 else 4, 4 if bytes_each == 2 else 3)


def weight_tile(models: int, outputs: int, weights: int, channels: int, bytes_each: int) -> Tile:
    rows = _columns(outputs)
    columns = next((size for size in (128, 64, 32, 16) if channels % size == 0), _columns(weights, 64))
    return Tile(
        rows,
        columns,
        64 if bytes_each == 2 else 32,
        8 if rows * columns >= 128 * 128 else 4,
        4 if bytes_each == 2 else 3,
    )


def forward(
    x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, relu: bool, precision: str, tile: Tile | None = None
) -> Tensor:
    """`[K, B, H', W', O]` from images `[K, B, H, W, C]` and weights `[K, O, kh, kw, C]`."""
    models, batch, height, width, channels = x.shape
    outputs = w.shape[1]
    high, wide = geometry.outputs(height, width)
    y = torch.empty((models, batch, high, wide, outputs), dtype=x.dtype, device=x.device)
    pixels = batch * high * wide
    tile = tile or forward_tile(models, pixels, channels, outputs, x.element_size())
    flat = channels % tile.depth != 0
    _forward[(-(-pixels // tile.rows) * -(-outputs // tile.columns), models)](
        x, w, y if bias is None else bias, y, w.stride(0), 0 if bias is None else bias.stride(0),
        batch, height, width, channels, high, wide, outputs,
        *geometry.kernel, *geometry.stride, *geometry.padding, bias is not None, relu, flat, precision,
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def input_gradient(
    grad: Tensor, w: Tensor, height: int, width: int, geometry: Geometry, precision: str, finish: Finish | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the images `[K, B, H, W, C]`, from that of the outputs `[K, B, H', W', O]`."""
    finish = finish or Finish()
    models, batch, high, wide, outputs = grad.shape
    channels = w.shape[4]
    out = torch.empty((models, batch, height, width, channels), dtype=grad.dtype, device=grad.device)
    sy, sx = geometry.stride
    pixels = batch * -(-height // sy) * -(-width // sx)
    tile = tile or forward_tile(models * sy * sx, pixels, outputs, channels, grad.element_size())
    tiles_m = -(-pixels // tile.rows)
    _input_gradient[(tiles_m * -(-channels // tile.columns), models, sy * sx)](
        grad, w, out, *finish.tensors(out, sy * sx * tiles_m), w.stride(0),
        batch, height, width, channels, high, wide, outputs, *geometry.kernel, *geometry.stride, *geometry.padding,
        *finish.switches, outputs % tile.depth != 0, precision,
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def weight_gradient(
    x: Tensor, grad: Tensor, into: Tensor, geometry: Geometry, precision: str, tile: Tile | None = None, splits: int = 0
) -> None:
    """Writes the gradient of the weights into a view `[K, O, kh, kw, C]` of rows."""
    models, batch, height, width, channels = x.shape
    high, wide, outputs = grad.shape[2:]
    pixels, weights = batch * high * wide, geometry.kernel[0] * geometry.kernel[1] * channels
    tile = tile or weight_tile(models, outputs, weights, channels, x.element_size())
    tiles = -(-outputs // tile.rows) * -(-weights // tile.columns)
    turns = -(-pixels // tile.depth)
    splits = splits or max(1, min(turns // 4, 2 * PROCESSORS // (models * tiles)))
    turns_each = -(-turns // splits)
    length = outputs * weights
    parts = into
    if splits > 1:
        parts = torch.empty((models, splits, length), dtype=torch.float32, device=x.device)
    _weight_gradient[(tiles, models, splits)](
        x, grad, parts, parts.stride(0), length, batch, height, width, channels, high, wide, outputs, turns_each,
        *geometry.kernel, *geometry.stride, *geometry.padding, channels % tile.columns != 0, precision,
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        size = 1024
        _add_parts[(-(-length // size), models)](parts, into, length, splits, into.stride(0), size)
