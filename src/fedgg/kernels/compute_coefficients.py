"""A short program of scalar operations for many rows in one launch.

An algorithm's factors follow from the inner products by a dozen operations on one number per row. As torch kernels,
each takes longer to launch than to compute. Here one block of threads runs all of them for one row: it sums the row's
inner products from their parts in a fixed order, then executes the program in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

CODES = {
    "add": 0,
    "sub": 1,
    "mul": 2,
    "div": 3,
    "neg": 4,
    "abs": 5,
    "sqrt": 6,
    "exp": 7,
    "gt": 8,
    "ge": 9,
    "lt": 10,
    "le": 11,
    "eq": 12,
    "ne": 13,
    "where": 14,
    "maximum": 15,
    "minimum": 16,
}
SIZE = 256  # parts of an inner product read at a time
NOTHING = -1  # the index of an output that is not written


@triton.jit
def _done(code: tl.constexpr, a, b, c):
    if code == 0:  # a branch at compile time
        return a + b
    elif code == 1:  # noqa: RET505
        return a - b
    elif code == 2:
        return a * b
    elif code == 3:
        return a / b
    elif code == 4:
        return -a
    elif code == 5:
        return tl.abs(a)
    elif code == 6:
        return tl.sqrt(a)
    elif code == 7:
        return tl.exp(a)
    elif code == 8:
        return (a > b).to(tl.float64)
    elif code == 9:
        return (a >= b).to(tl.float64)
    elif code == 10:
        return (a < b).to(tl.float64)
    elif code == 11:
        return (a <= b).to(tl.float64)
    elif code == 12:
        return (a == b).to(tl.float64)
    elif code == 13:
        return (a != b).to(tl.float64)
    elif code == 14:
        return tl.where(a != 0, b, c)
    elif code == 15:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _behind(values, value):
    return values + (value,)  # noqa: RUF005 (Triton does not support *)


@triton.jit
def _program(
    step, parts, lasting, out, blocks,
    sums: tl.constexpr, columns: tl.constexpr, lines: tl.constexpr, wanted: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    values = (tl.load(step + row).to(tl.float64),)
    for number in tl.static_range(sums):
        total = tl.zeros((size,), tl.float64)
        for start in range(0, blocks, size):
            at = start + tl.arange(0, size)
            partial_sums = tl.load(parts + (row * sums + number) * blocks + at, mask=at < blocks, other=0)
            total += partial_sums.to(tl.float64)
        values = _behind(values, tl.sum(total, axis=0))
    for number in tl.static_range(columns):
        values = _behind(values, tl.load(lasting + row * columns + number))
    for number in tl.static_range(len(lines)):
        result = _done(lines[number][0], values[lines[number][1]], values[lines[number][2]], values[lines[number][3]])
        values = _behind(values, result)
    for number in tl.static_range(len(wanted)):
        if wanted[number] >= 0:
            tl.store(out + row * len(wanted) + number, values[wanted[number]])


Lines = tuple[tuple[int, ...], ...]  # an operation's code and the indices of three values, some of them unused


def run(step: Tensor, parts: Tensor, lasting: Tensor, lines: Lines, wanted: tuple[int, ...], out: Tensor) -> None:
    """Writes values `[K, wanted]` into `out`; columns with the index NOTHING stay as they are.

    Values are numbered in this order: the step, the inner products, the columns `lasting`, the result of each line.
    """
    rows, sums, blocks = parts.shape
    _program[(rows,)](step, parts, lasting, out, blocks, sums, lasting.shape[1], lines, wanted, SIZE)
