"""The precision of a run, by name. Models, updates and sums are always in fp32 (or fp64).

fp64  double precision;
fp32  single precision, no TF32;
tf32  matrix products and convolutions with TF32 operands: 10 bits of mantissa, sums in fp32;
bf16  convolutions, and all matrix products of large models, with bfloat16 operands: 7 bits, sums in fp32.
"""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp64", "fp32", "tf32", "bf16"]
