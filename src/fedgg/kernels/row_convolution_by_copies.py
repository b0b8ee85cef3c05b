"""The products of `kernels.row_convolution` for stride 1 and bf16, with operands read by Hopper's tensor copies.

A copy reads a box of pixels and channels of one row's images; pixels outside the image are zero, so that padding costs
nothing. The sides of output images must be powers of two, channels a multiple of 16, and tensors begin at multiples of
16 bytes: `supports` says whether that is so. Other convolutions are left to `kernels.row_convolution`.

The left operand of every product is read from where a copy wrote it in shared memory: it may be transposed, and
reshaped only by dropping dimensions of one. Triton 3.6 loads other left operands into registers, and overwrites these
while asynchronous products of the turn before still read them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fedgg.kernels.row_convolution import PROCESSORS, Finish, Geometry, Tile, _add_parts, _place, finished

LARGEST_SIDE = 64  # pixels of an output image


@triton.jit
def _box(m, high: tl.constexpr, wide: tl.constexpr):
    """The image, and its first row, of a box that begins at output pixel m."""
    return m // (high * wide), (m // wide) % high


@triton.jit(do_not_specialize=["batch", "from_y", "from_x", "taps_y", "taps_x"])
def _product(
    x, w, bias, y, added, input_, sums, stride_bias, batch, channels, outputs, from_y, from_x, taps_y, taps_x,
    high: tl.constexpr, wide: tl.constexpr, kh: tl.constexpr, kw: tl.constexpr, py: tl.constexpr, px: tl.constexpr,
    back: tl.constexpr, has_bias: tl.constexpr, relu: tl.constexpr, has_added: tl.constexpr, masked: tl.constexpr,
    images: tl.constexpr, tall: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """A tile of outputs; with `back`, of the gradient of the input: taps in reverse order, weights transposed.

    This gradient is finished as `row_convolution.finished` says. The weights are the left operand, as a box of pixels
    cannot be: the result is transposed.

    Taps `from_y`, `from_x` and so many after them see the image at all: of a single pixel, one in nine.
    """
    rows: tl.constexpr = images * tall * wide
    row = tl.program_id(1)
    pixels = batch * high * wide
    tile_m, tile_n = _place(tl.program_id(0), pixels, outputs, rows, columns, 8)
    image, line = _box(tile_m * rows, high, wide)
    total = tl.zeros((columns, rows), tl.float32)
    chunks = channels // depth
    for turn in range(0, taps_y * taps_x * chunks):
        number, c = turn // chunks, (turn % chunks) * depth
        dy, dx = from_y + number // taps_x, from_x + number % taps_x
        tap = dy * kw + dx
        seen = tl.trans(tl.reshape(x.load([row, image, line + dy - py, dx - px, c]), [rows, depth]))
        if back:
            weights = w.load([row, c, (kh * kw - 1 - tap) * outputs + tile_n * columns])
            total = tl.dot(tl.trans(tl.reshape(weights, [depth, columns])), seen, total)
        else:
            weights = w.load([row, tile_n * columns, tap * channels + c])
            total = tl.dot(tl.reshape(weights, [columns, depth]), seen, total)
    total = tl.trans(total)
    m = tile_m * rows + tl.arange(0, rows)
    o = tile_n * columns + tl.arange(0, columns)
    if has_bias:
        total += tl.load(bias + row.to(tl.int64) * stride_bias + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    if relu:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    at = row.to(tl.int64) * pixels * outputs + m[:, None] * outputs + o[None, :]
    inside = (m < pixels)[:, None] & (o < outputs)[None, :]
    part = (row.to(tl.int64) * tl.cdiv(pixels, rows) + tile_m) * outputs + o
    total = finished(total, added, input_, sums, at, inside, part, o < outputs, has_added, masked)
    tl.store(y + at, total, mask=inside)


@triton.jit(do_not_specialize=["height", "width", "turns"])
def _weight_gradient(
    x, grad, out, stride_row, stride_split, height, width, channels, outputs, turns,
    high: tl.constexpr, wide: tl.constexpr, kh: tl.constexpr, kw: tl.constexpr, py: tl.constexpr, px: tl.constexpr,
    images: tl.constexpr, tall: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of weights, summed over a part of the pixels; a tile lies within one tap."""
    depth: tl.constexpr = images * tall * wide
    row, split = tl.program_id(1), tl.program_id(2)
    parts_of = turns
    weights = kh * kw * channels
    tile_m, tile_n = _place(tl.program_id(0), outputs, weights, rows, columns, 8)
    tap, c = tile_n * columns // channels, tile_n * columns % channels
    total = tl.zeros((rows, columns), tl.float32)
    reach_y, reach_x = tap // kw - py, tap % kw - px
    if (reach_y >= height) | (reach_y <= -high) | (reach_x >= width) | (reach_x <= -wide):
        turns = 0  # the tap sees no image
    for turn in range(0, turns):
        image, line = _box((split * parts_of + turn) * depth, high, wide)
        slope = tl.reshape(grad.load([row, (split * parts_of + turn) * depth, tile_m * rows]), [depth, rows])
        seen = tl.reshape(x.load([row, image, line + tap // kw - py, tap % kw - px, c]), [depth, columns])
        total = tl.dot(tl.trans(slope), seen, total)
    o = tile_m * rows + tl.arange(0, rows)
    n = tile_n * columns + tl.arange(0, columns)
    to = out + row.to(tl.int64) * stride_row + split * stride_split + o[:, None] * weights + n[None, :]
    tl.store(to, total, mask=(o < outputs)[:, None] & (n < weights)[None, :])


@cache
def has_copies(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def supports(x: Tensor, w: Tensor, geometry: Geometry) -> bool:
    """Whether images `[K, B, H, W, C]` and weights `[K, O, kh, kw, C]` can be read by copies."""
    if x.dtype != torch.bfloat16 or geometry.stride != (1, 1) or not has_copies(x.device):
        return False
    height, width, channels = x.shape[2:]
    sides = geometry.outputs(height, width)
    # The gradient of the input is a convolution with this padding.
    back = [k - 1 - p for k, p in zip(geometry.kernel, geometry.padding, strict=True)]
    return (
        all(_is_power_of_two(side) and side <= LARGEST_SIDE for side in (height, width, *sides))
        and min(back) >= 0
        and channels % 16 == 0
        and w.shape[1] % 16 == 0
        and w.data_ptr() % 16 == 0
        and w.stride(0) % 8 == 0
    )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _images_box(pixels: int, high: int, wide: int) -> tuple[int, int]:
    """Images and lines of a box of this many pixels."""
    return (1, pixels // wide) if high * wide >= pixels else (pixels // (high * wide), high)


def _taps(kernel: int, padding: int, side: int, outputs: int) -> tuple[int, int]:
    """The first tap in one direction that sees the image, and the number of such taps."""
    first = max(0, padding - outputs + 1)
    return first, min(kernel, side + padding) - first


def _divisor(number: int, most: int) -> int:
    """The largest power of two that divides the number, at most `most`."""
    return min(number & -number, most)


def product_tile(models: int, pixels: int, channels: int, outputs: int) -> Tile:
    """The tile of a product with so many channels to sum over, by measurements on an H200."""
    depth = _divisor(channels, 128)
    if outputs <= 64:
        if channels >= 128:
            return Tile(128, 64, depth, 8, 3)
        return Tile(128, 64, min(depth, 64), 4, 4)
    if models * -(-pixels // 128) * -(-outputs // 128) < PROCESSORS // 2 + 8:  # few tiles: make them smaller
        return Tile(64, 64, depth, 4, 3 if depth == 128 else 4)
    return Tile(128, 128, depth if channels >= 256 else min(depth, 64), 8, 3)


def weight_tile(models: int, pixels: int, channels: int, outputs: int, taps: int) -> tuple[Tile, int]:
    """The tile, and the number of parts into which the sum over pixels is split."""
    if outputs <= 64 and channels <= 64:
        tile = Tile(max(16, triton.next_power_of_2(outputs)), _divisor(channels, 64), 128, 4, 3)
    elif pixels <= 1024 and outputs <= 128:
        tile = Tile(64, _divisor(channels, 64), 64, 4, 5)
    else:
        rows, columns = min(128, max(16, triton.next_power_of_2(outputs))), _divisor(channels, 128)
        tile = Tile(rows, columns, 64, 8 if rows * columns >= 128 * 128 else 4, 3)
    tiles = models * -(-outputs // tile.rows) * taps * channels // tile.columns
    turns = -(-pixels // tile.depth)
    splits = 1 if tiles >= PROCESSORS else max(1, min(turns // 32, 6 * PROCESSORS // tiles))
    return tile, splits


def _product_of(
    x: Tensor, w: Tensor, bias: Tensor | None, sides: tuple[int, int], outputs: int, kernel: tuple[int, int],
    padding: tuple[int, int], back: bool, relu: bool, finish: Finish, tile: Tile | None,
) -> Tensor:  # fmt: skip
    models, batch, _, _, channels = x.shape
    pixels = batch * sides[0] * sides[1]
    tile = tile or product_tile(models, pixels, channels, outputs)
    images, tall = _images_box(tile.rows, *sides)
    taps = [_taps(*of_side) for of_side in zip(kernel, padding, x.shape[2:4], sides, strict=True)]
    y = torch.empty((models, batch, *sides, outputs), dtype=x.dtype, device=x.device)
    box = [1, tile.depth, tile.columns] if back else [1, tile.columns, tile.depth]
    tiles_m = -(-pixels // tile.rows)
    _product[(tiles_m * -(-outputs // tile.columns), models)](
        TensorDescriptor.from_tensor(x, [1, images, tall, sides[1], tile.depth]),
        TensorDescriptor.from_tensor(w.flatten(2), box),
        y if bias is None else bias, y, *finish.tensors(y, tiles_m),
        0 if bias is None else bias.stride(0), batch, channels, outputs,
        *(first for first, _ in taps), *(count for _, count in taps),
        *sides, *kernel, *padding, back, bias is not None, relu, *finish.switches,
        images, tall, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def forward(
    x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, relu: bool, tile: Tile | None = None
) -> Tensor:
    """As `row_convolution.forward`."""
    sides = geometry.outputs(x.shape[2], x.shape[3])
    kernel, padding = geometry.kernel, geometry.padding
    return _product_of(x, w, bias, sides, w.shape[1], kernel, padding, False, relu, Finish(), tile)


def input_gradient(
    grad: Tensor, w: Tensor, height: int, width: int, geometry: Geometry, finish: Finish | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """As `row_convolution.input_gradient`."""
    (kh, kw), (py, px) = geometry.kernel, geometry.padding
    padding, finish = (kh - 1 - py, kw - 1 - px), finish or Finish()
    return _product_of(grad, w, None, (height, width), w.shape[4], (kh, kw), padding, True, False, finish, tile)


def weight_gradient(
    x: Tensor, grad: Tensor, into: Tensor, geometry: Geometry, tile: Tile | None = None, splits: int = 0
) -> None:
    """As `row_convolution.weight_gradient`."""
    models, batch, _, _, channels = x.shape
    high, wide, outputs = grad.shape[2:]
    pixels, taps = batch * high * wide, geometry.kernel[0] * geometry.kernel[1]
    usual, usual_splits = weight_tile(models, pixels, channels, outputs, taps)
    tile, splits = tile or usual, splits or usual_splits
    turns = -(-pixels // tile.depth)
    turns = -(-turns // splits)
    images, tall = _images_box(tile.depth, high, wide)
    length = outputs * taps * channels
    parts = into
    if splits > 1:
        parts = torch.empty((models, splits, length), dtype=torch.float32, device=x.device)
    _weight_gradient[(-(-outputs // tile.rows) * (taps * channels // tile.columns), models, splits)](
        TensorDescriptor.from_tensor(x, [1, images, tall, wide, tile.columns]),
        TensorDescriptor.from_tensor(grad.flatten(1, 3), [1, tile.depth, tile.rows]),
        parts, parts.stride(0), length, x.shape[2], x.shape[3], channels, outputs, turns,
        high, wide, *geometry.kernel, *geometry.padding, images, tall, tile.rows, tile.columns,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        size = 1024
        _add_parts[(-(-length // size), models)](parts, into, length, splits, into.stride(0), size)
