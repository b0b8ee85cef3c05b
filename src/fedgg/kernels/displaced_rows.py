"""Rows displaced along vectors, point = w + factor_0 (w - anchor) + factor_1 a + factor_2 b, in one pass over memory.

As in `optimiser_step`, rows may share vectors, and programs of consecutive rows process the same block of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fedgg.kernels.optimiser_step import VECTORS, Shared, _read

SIZE = 4096


@triton.jit
def _block(
    at, inside, row, w, anchor, a, b, lead_anchor, lead_a, lead_b, factors, point, short,
    stride_w, stride_anchor, stride_a, stride_b, stride_point, stride_short,
    drift_term: tl.constexpr, vectors: tl.constexpr, has_short: tl.constexpr,
):  # fmt: skip
    new, start, first, second = _read(
        w, anchor, a, b, lead_anchor, lead_a, lead_b, row, at, inside,
        stride_w, stride_anchor, stride_a, stride_b, drift_term, vectors,
    )  # fmt: skip
    if drift_term:
        new += tl.load(factors + row * 3) * (new - start)
    if vectors > 0:
        new += tl.load(factors + row * 3 + 1) * first
    if vectors > 1:
        new += tl.load(factors + row * 3 + 2) * second
    tl.store(point + row.to(tl.int64) * stride_point + at, new, mask=inside)
    if has_short:
        tl.store(short + row.to(tl.int64) * stride_short + at, new, mask=inside)


@triton.jit
def _displace(
    w, anchor, a, b, lead_anchor, lead_a, lead_b, factors, point, short, rows, length,
    stride_w, stride_anchor, stride_a, stride_b, stride_point, stride_short,
    drift_term: tl.constexpr, vectors: tl.constexpr, has_short: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = place % rows
    at = (place // rows) * size + tl.arange(0, size)
    if (place // rows + 1) * size <= length:  # as in `optimiser_step`, only the block at the end is masked
        _block(
            at, tl.full((size,), 1, tl.int1), row, w, anchor, a, b, lead_anchor, lead_a, lead_b, factors, point, short,
            stride_w, stride_anchor, stride_a, stride_b, stride_point, stride_short, drift_term, vectors, has_short,
        )  # fmt: skip
    else:
        _block(
            at, at < length, row, w, anchor, a, b, lead_anchor, lead_a, lead_b, factors, point, short,
            stride_w, stride_anchor, stride_a, stride_b, stride_point, stride_short, drift_term, vectors, has_short,
        )  # fmt: skip


def displace(
    w: Tensor, anchor: Shared | None, vectors: Sequence[Shared], factors: Tensor, point: Tensor, short: Tensor | None
) -> None:
    """Writes the displaced rows into `point`, and into `short` in its type. `factors` `[K, 3]`: as in `Pass`."""
    rows, length = w.shape
    unused = Shared(w, factors)
    shared = [anchor or unused, *vectors, unused, unused][: 1 + VECTORS]
    _displace[(rows * -(-length // SIZE),)](
        w, *(vector.rows for vector in shared), *(vector.lead for vector in shared), factors,
        point, point if short is None else short, rows, length,
        w.stride(0), *(vector.rows.stride(0) for vector in shared), point.stride(0),
        (point if short is None else short).stride(0), anchor is not None, len(vectors), short is not None, SIZE,
        num_warps=8,
    )  # fmt: skip
