"""Rows copied into another type, for matrix products with shorter operands."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SIZE = 4096
ALIGNED = 64  # elements to which rows are padded


@triton.jit
def _cast(source, target, length, stride_source, stride_target, size: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * size + tl.arange(0, size)
    value = tl.load(source + row * stride_source + at, mask=at < length)
    tl.store(target + row * stride_target + at, value, mask=at < length)


def cast(source: Tensor, target: Tensor) -> Tensor:
    """Copies rows `[K, P]` into rows of another type, in whole words where both have room behind a row."""
    rows, length = source.shape
    padded = -(-length // ALIGNED) * ALIGNED
    if min(source.stride(0), target.stride(0)) >= padded:
        length = padded
    _cast[(-(-length // SIZE), rows)](source, target, length, source.stride(0), target.stride(0), SIZE, num_warps=8)
    return target
