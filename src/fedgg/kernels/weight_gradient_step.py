"""The optimiser's step of a layer's weights in the kernel that computes their gradient, which is not stored.

For layers that `kernels.row_convolution_by_copies` supports, with many weights and small images, whose time is that of
reading and writing rows (`supports`); a linear layer is a convolution of images of one pixel. The step is that of
`kernels.optimiser_step`, on a part of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fedgg.kernels.optimiser_step import Pass, _Arguments, _read, _sum_up, _write
from fedgg.kernels.row_convolution import Geometry, _place
from fedgg.kernels.row_convolution_by_copies import LARGEST_SIDE, _box, _images_box, _is_power_of_two

WEIGHTS = 1 << 18  # of a layer at least: smaller ones have too few tiles to occupy a GPU
MOST_PIXELS = 8  # of an output image: with more, arithmetic takes longer than the step, and is done by other kernels
DEPTH = 64  # pixels that are summed at a time
WARPS, STAGES = 8, 3
REGISTERS = 128  # of a thread, so that two programs share a multiprocessor: one loads while the other computes
PIECE, PIECE_WITH_VECTORS = 64, 32  # columns that are stepped at a time: more do not fit into the registers


@triton.jit(do_not_specialize=["height", "width", "turns", "first_block"])
def _advance(
    x, grad, w, velocity, anchor, a, b, lead_anchor, lead_a, lead_b,
    factors, lr, momentum, decay, clip, at_work, parts, short,
    rows_total, height, width, channels, outputs, turns, offset, blocks, first_block,
    stride_w, stride_velocity, stride_short, stride_anchor, stride_a, stride_b,
    has_momentum: tl.constexpr, has_decay: tl.constexpr, has_clip: tl.constexpr, has_anchor: tl.constexpr,
    drift_term: tl.constexpr, vectors: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
    sums: tl.constexpr, s00: tl.constexpr, s01: tl.constexpr, s10: tl.constexpr, s11: tl.constexpr,
    s20: tl.constexpr, s21: tl.constexpr, s30: tl.constexpr, s31: tl.constexpr,
    has_short: tl.constexpr, by_tile: tl.constexpr,
    high: tl.constexpr, wide: tl.constexpr, kh: tl.constexpr, kw: tl.constexpr, py: tl.constexpr, px: tl.constexpr,
    images: tl.constexpr, tall: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, piece: tl.constexpr,
):  # fmt: skip
    """One tile of weights; with `by_tile`, programs of all rows treat the same tile at the same time.

    The step is taken in pieces of the tile, which bounds the registers it needs.
    """
    if by_tile:
        row, number = tl.program_id(0) % rows_total, tl.program_id(0) // rows_total
    else:
        tiles = tl.cdiv(outputs, rows) * (kh * kw * channels // columns)
        row, number = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if tl.load(at_work + row) != 0:
        depth: tl.constexpr = images * tall * wide
        weights = kh * kw * channels
        tile_m, tile_n = _place(number, outputs, weights, rows, columns, 8)
        tap, c = tile_n * columns // channels, tile_n * columns % channels
        reach_y, reach_x = tap // kw - py, tap % kw - px
        if (reach_y >= height) | (reach_y <= -high) | (reach_x >= width) | (reach_x <= -wide):
            turns = 0  # the tap sees no image
        total = tl.zeros((rows, columns), tl.float32)
        for turn in range(0, turns):
            image, line = _box(turn * depth, high, wide)
            slope = tl.reshape(grad.load([row, turn * depth, tile_m * rows]), [depth, rows])
            seen = tl.reshape(x.load([row, image, line + reach_y, reach_x, c]), [depth, columns])
            total = tl.dot(tl.trans(slope), seen, total)
        # A thread holds neighbours of a row, and the same columns of the row 8 below: halves of 16 rows stay in it.
        halves = tl.permute(tl.reshape(total, [rows // 16, 2, 8, columns]), [0, 2, 3, 1])
        upper, lower = tl.split(halves)
        begin = offset + tile_m * rows * weights + tile_n * columns
        u0, u1, u2, u3 = _step(
            tl.reshape(upper, [rows // 2, columns]), begin, weights,
            row, w, velocity, anchor, a, b, lead_anchor, lead_a, lead_b, factors, lr, momentum, decay, clip, short,
            stride_w, stride_velocity, stride_short, stride_anchor, stride_a, stride_b,
            has_momentum, has_decay, has_clip, has_anchor, drift_term, vectors, a_term, b_term,
            sums, s00, s01, s10, s11, s20, s21, s30, s31, has_short, piece,
        )  # fmt: skip
        v0, v1, v2, v3 = _step(
            tl.reshape(lower, [rows // 2, columns]), begin + 8 * weights, weights,
            row, w, velocity, anchor, a, b, lead_anchor, lead_a, lead_b, factors, lr, momentum, decay, clip, short,
            stride_w, stride_velocity, stride_short, stride_anchor, stride_a, stride_b,
            has_momentum, has_decay, has_clip, has_anchor, drift_term, vectors, a_term, b_term,
            sums, s00, s01, s10, s11, s20, s21, s30, s31, has_short, piece,
        )  # fmt: skip
        part = parts + (row * sums) * blocks + first_block + number
        _sum_up(part, blocks, u0 + v0, u1 + v1, u2 + v2, u3 + v3, sums)


@triton.jit
def _step(
    total, begin, stride, row,
    w, velocity, anchor, a, b, lead_anchor, lead_a, lead_b, factors, lr, momentum, decay, clip, short,
    stride_w, stride_velocity, stride_short, stride_anchor, stride_a, stride_b,
    has_momentum: tl.constexpr, has_decay: tl.constexpr, has_clip: tl.constexpr, has_anchor: tl.constexpr,
    drift_term: tl.constexpr, vectors: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
    sums: tl.constexpr, s00: tl.constexpr, s01: tl.constexpr, s10: tl.constexpr, s11: tl.constexpr,
    s20: tl.constexpr, s21: tl.constexpr, s30: tl.constexpr, s31: tl.constexpr, has_short: tl.constexpr,
    piece: tl.constexpr,
):  # fmt: skip
    """The step of weights whose gradient is `total`, in pieces of `piece` columns: the left half before the right.

    Its rows are 8 of every 16 rows of the weights.
    """
    rows: tl.constexpr = total.shape[0]
    columns: tl.constexpr = total.shape[1]
    if columns > piece:
        half: tl.constexpr = columns // 2
        left, right = tl.split(tl.permute(tl.reshape(total, [rows, 2, half]), [0, 2, 1]))
        u0, u1, u2, u3 = _step(
            left, begin, stride, row,
            w, velocity, anchor, a, b, lead_anchor, lead_a, lead_b, factors, lr, momentum, decay, clip, short,
            stride_w, stride_velocity, stride_short, stride_anchor, stride_a, stride_b,
            has_momentum, has_decay, has_clip, has_anchor, drift_term, vectors, a_term, b_term,
            sums, s00, s01, s10, s11, s20, s21, s30, s31, has_short, piece,
        )  # fmt: skip
        v0, v1, v2, v3 = _step(
            right, begin + half, stride, row,
            w, velocity, anchor, a, b, lead_anchor, lead_a, lead_b, factors, lr, momentum, decay, clip, short,
            stride_w, stride_velocity, stride_short, stride_anchor, stride_a, stride_b,
            has_momentum, has_decay, has_clip, has_anchor, drift_term, vectors, a_term, b_term,
            sums, s00, s01, s10, s11, s20, s21, s30, s31, has_short, piece,
        )  # fmt: skip
        return u0 + v0, u1 + v1, u2 + v2, u3 + v3
    else:  # noqa: RET505 (a branch at compile time)
        size: tl.constexpr = rows * columns
        along = tl.arange(0, size)
        below = along // columns
        at = begin + (below // 8 * 16 + below % 8) * stride + along % columns
        inside = tl.full((size,), 1, tl.int1)
        here, start, first, second = _read(
            w, anchor, a, b, lead_anchor, lead_a, lead_b, row, at, inside,
            stride_w, stride_anchor, stride_a, stride_b, has_anchor, vectors,
        )  # fmt: skip
        v0, v1, v2, v3 = _write(
            tl.reshape(total, [size]), here, start, first, second, w, velocity, factors, lr, momentum, decay, clip,
            row, at, inside, stride_w, stride_velocity, short, stride_short,
            has_momentum, has_decay, has_clip, has_anchor, drift_term, a_term, b_term,
            sums, s00, s01, s10, s11, s20, s21, s30, s31, has_short,
        )  # fmt: skip
        return _by_fours(v0), _by_fours(v1), _by_fours(v2), _by_fours(v3)


@triton.jit
def _by_fours(values):
    """Sums of four neighbours, which one thread holds: fewer registers until all pieces are added up."""
    return tl.sum(tl.reshape(values, [values.shape[0] // 4, 4]), axis=1)


def supports(outputs: int, channels: int, geometry: Geometry, height: int, width: int) -> bool:
    """Whether there is a kernel for bf16 images of this size on a GPU with tensor copies."""
    taps = geometry.kernel[0] * geometry.kernel[1]
    high, wide = geometry.outputs(height, width)
    sides = (height, width, high, wide)
    return (
        outputs * taps * channels >= WEIGHTS
        and high * wide <= MOST_PIXELS
        and outputs % 64 == 0
        and channels % 64 == 0
        and geometry.stride == (1, 1)
        and all(0 < side <= LARGEST_SIDE and _is_power_of_two(side) for side in sides)
    )


def blocks(outputs: int, weights: int, channels: int) -> int:
    """The number of partial sums of an inner product over the weights."""
    rows, columns = _tile(outputs, channels)
    return outputs // rows * (weights // columns)


def _tile(outputs: int, channels: int) -> tuple[int, int]:
    return (128 if outputs % 128 == 0 else 64), (128 if channels % 128 == 0 else 64)


def advance(step: Pass, x: Tensor, grad: Tensor, geometry: Geometry, offset: int, first_block: int) -> None:
    """Takes the step of the weights at `offset` of the row.

    From images `[K, B, H, W, C]` and the gradient of the outputs `[K, B, H', W', O]`; `first_block` is the place of the
    partial sums.
    """
    models, batch, height, width, channels = x.shape
    high, wide, outputs = grad.shape[2:]
    rows, columns = _tile(outputs, channels)
    weights = geometry.kernel[0] * geometry.kernel[1] * channels
    images, tall = _images_box(DEPTH, high, wide)
    arguments = _Arguments.of(step)
    by_tile = step.anchor is not None or len(step.vectors) > 0  # vectors that rows share are read from the cache
    short = step.w if step.short is None else step.short
    _advance[(models * blocks(outputs, weights, channels),)](
        TensorDescriptor.from_tensor(x, [1, images, tall, wide, columns]),
        TensorDescriptor.from_tensor(grad.flatten(1, 3), [1, DEPTH, rows]),
        step.w, step.velocity, *arguments.vectors, *arguments.numbers, step.at_work, step.parts, short,
        models, height, width, channels, outputs, -(-batch * high * wide // DEPTH), offset, step.parts.shape[2],
        first_block, step.w.stride(0), step.velocity.stride(0), short.stride(0), *arguments.strides,
        *arguments.switches, step.short is not None, by_tile,
        high, wide, *geometry.kernel, *geometry.padding, images, tall, rows, columns,
        PIECE_WITH_VECTORS if by_tile else PIECE,
        num_warps=WARPS, num_stages=STAGES, maxnreg=REGISTERS,
    )  # fmt: skip
