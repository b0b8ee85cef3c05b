"""A product of two tiles, in any precision."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, total, precision: tl.constexpr):
    """total + a b, summed in float32; bf16 operands come as such."""
    if precision == "bf16":
        return tl.dot(a, b, total)
    else:  # noqa: RET505 (a branch at compile time)
        return tl.dot(a, b, total, input_precision=precision)
