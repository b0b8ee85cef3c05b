"""The factor by which each row's gradient is clipped: min(1, longest / (length of the gradient with its terms + eps)).

Squares are summed in a fixed order, by blocks of a part of the row and then over all parts, so that results are
reproducible to the bit. Parts of a row may be summed as soon as their gradients are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fedgg.kernels.optimiser_step import BLOCK, Pass, Span, _Arguments, _blocks_each, _blocks_of, _read

SIZE = 256  # sums of blocks added at a time


@dataclass(frozen=True)
class Clipping:
    """What the kernels read and write besides the step: `parts` and `factor` are overwritten."""

    longest: Tensor  # [K, 1] the longest gradient; infinity: no clipping of this row
    parts: Tensor  # [K, blocks] sums of squares
    factor: Tensor  # [K, 1]
    spans: tuple[Span, ...]  # parts of the row that are summed one by one; empty: the whole row


@triton.jit
def _squares(
    at, inside, row, w, grad, anchor, a, b, lead_anchor, lead_a, lead_b, factors,
    stride_w, stride_grad, stride_anchor, stride_a, stride_b,
    drift_term: tl.constexpr, vectors: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
):  # fmt: skip
    total = tl.load(grad + row.to(tl.int64) * stride_grad + at, mask=inside, other=0)
    here, start, first, second = _read(
        w, anchor, a, b, lead_anchor, lead_a, lead_b, row, at, inside,
        stride_w, stride_anchor, stride_a, stride_b, drift_term, vectors,
    )  # fmt: skip
    if drift_term:
        total += tl.load(factors + row * 3) * (here - start)
    if a_term:
        total += tl.load(factors + row * 3 + 1) * first
    if b_term:
        total += tl.load(factors + row * 3 + 2) * second
    return total * total


@triton.jit(do_not_specialize=["first_block"])
def _sum_squares(
    w, grad, anchor, a, b, lead_anchor, lead_a, lead_b, factors, at_work, parts,
    rows, length, begin, first_block,
    stride_w, stride_grad, stride_anchor, stride_a, stride_b, stride_parts,
    drift_term: tl.constexpr, vectors: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
    size: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = place % rows
    block = place // rows
    if tl.load(at_work + row) != 0:
        total = tl.zeros((size,), w.dtype.element_ty)
        # As in `optimiser_step`, only blocks at the end are masked.
        if begin + (block + 1) * each * size <= length:
            for number in range(each):
                at = begin + (block * each + number) * size + tl.arange(0, size)
                total += _squares(
                    at, tl.full((size,), 1, tl.int1), row, w, grad, anchor, a, b, lead_anchor, lead_a, lead_b, factors,
                    stride_w, stride_grad, stride_anchor, stride_a, stride_b, drift_term, vectors, a_term, b_term,
                )  # fmt: skip
        else:
            for number in range(each):
                at = begin + (block * each + number) * size + tl.arange(0, size)
                squares = _squares(
                    at, at < length, row, w, grad, anchor, a, b, lead_anchor, lead_a, lead_b, factors,
                    stride_w, stride_grad, stride_anchor, stride_a, stride_b, drift_term, vectors, a_term, b_term,
                )  # fmt: skip
                total += tl.where(at < length, squares, 0)
        tl.store(parts + row * stride_parts + first_block + block, tl.sum(total, axis=0))


@triton.jit
def _factor(longest, parts, factor, blocks, stride_parts, epsilon, size: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((size,), tl.float64)
    for start in range(0, blocks, size):
        at = start + tl.arange(0, size)
        total += tl.load(parts + row * stride_parts + at, mask=at < blocks, other=0).to(tl.float64)
    length = tl.sqrt(tl.sum(total, axis=0))
    ratio = tl.load(longest + row).to(tl.float64) / (length + epsilon)
    tl.store(factor + row, tl.where(ratio > 1, 1.0, ratio))  # NaN stays NaN


def blocks(length: int, spans: Sequence[Span] = ()) -> int:
    """Number of sums over a row of `length` parameters."""
    return sum(_blocks_of(length, spans or [(0, length)]))


def sum_squares(step: Pass, grad: Tensor, clipping: Clipping, number: int = 0) -> None:
    """Sums the squares of the gradient with its terms, over one of the spans."""
    rows, length = step.w.shape
    spans, arguments = clipping.spans or ((0, length),), _Arguments.of(step)
    counts = _blocks_of(length, spans)
    begin, end = spans[number]
    drift_term, a_term, b_term = step.has_factor
    _sum_squares[(rows * counts[number],)](
        step.w, grad, *arguments.vectors, step.factors, step.at_work, clipping.parts,
        rows, end, begin, sum(counts[:number]), step.w.stride(0), grad.stride(0), *arguments.strides,
        clipping.parts.stride(0), drift_term, 2 if b_term else 1 if a_term else 0, a_term, b_term,
        BLOCK, _blocks_each(length),
    )  # fmt: skip


def set_factors(clipping: Clipping, epsilon: float) -> None:
    """From the sums of all spans."""
    rows, blocks = clipping.parts.shape
    _factor[(rows,)](clipping.longest, clipping.parts, clipping.factor, blocks, clipping.parts.stride(0), epsilon, SIZE)
