"""One optimiser step of many rows in one pass over memory: terms, weight decay, momentum, update, and inner products.

    grad' = clip (grad + factor_0 (w - anchor) + factor_1 a + factor_2 b) + decay w
    v     = momentum v + grad'             clip: a factor per row (`kernels/clip_gradient.py`), 1 without clipping
    w     = w - lr v

and, for the next step's factors, inner products of drift = w - anchor, step = -lr v, a and b in the new state. A
program processes several blocks of a long row and writes a partial sum; the partial sums are added afterwards in a
fixed order, so that results are reproducible to the bit.
Rows may share an anchor, a or b (clients of one experiment do): `lead` is the row to read. Programs of consecutive rows
process the same block of parameters, so that a shared vector is read from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedgg.kernels.dense import product

BLOCK = 2048
PROGRAMS = 256  # per row: enough to use the full memory bandwidth
BLOCKS_EACH = 16  # per program at most: one synchronisation for all of them, and room for other streams
TILE = (64, 64)  # of a wide layer's weight: outputs, inputs
WARPS = 4  # for a tile
VECTORS = 2  # a and b
MOST_SUMS = 4
AT_ONCE = 1 << 24  # elements compared in one operation
Span = tuple[int, int]  # the first parameter of a part of a row, and the one behind its last
DRIFT, STEP, FIRST_VECTOR = 0, 1, 2  # numbers of the vectors in `Pass.pairs`


@dataclass(frozen=True)
class Shared:
    """Vectors `[K, P]`, several of which may be equal: row `lead[k]` is read for row k."""

    rows: Tensor
    lead: Tensor  # [K] int32


@dataclass(frozen=True)
class Pass:
    """The inputs of a step besides the gradient; `w`, `velocity` and `parts` are updated in place."""

    w: Tensor
    velocity: Tensor
    anchor: Shared | None
    vectors: list[Shared]
    factors: Tensor  # [K, 3]: of the drift and of the vectors
    has_factor: list[bool]
    lr: Tensor
    momentum: Tensor | None
    decay: Tensor | None
    at_work: Tensor  # [K, 1] bool: rows that take the step; the others keep their state and sums
    parts: Tensor  # [K, sums, blocks]: partial sums of the inner products
    pairs: tuple[tuple[int, int], ...]  # the vectors of each inner product
    spans: tuple[Span, ...] = ()  # parts of the row that are stepped one by one, in their order; empty: the whole row
    short: Tensor | None = None  # [K, P] a copy of `w` in the type of matrix products, which is kept equal to it
    clip: Tensor | None = None  # [K, 1] factors of the gradient with its terms


@dataclass(frozen=True)
class Wide:
    """A linear layer at the start of the row; its weight gradient is computed in the kernel, not stored in memory."""

    x: Tensor  # [K, batch, inputs], its input
    grad: Tensor  # [K, batch, outputs], the gradient of its output
    precision: str

    @property
    def parameters(self) -> int:
        return self.x.shape[2] * self.grad.shape[2]


@triton.jit
def _pick(which: tl.constexpr, drift, step, a, b):
    if which == 0:  # noqa: SIM116 (a branch at compile time)
        return drift
    elif which == 1:  # noqa: RET505
        return step
    elif which == 2:
        return a
    else:
        return b


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _sum_up(part, blocks, v0, v1, v2, v3, sums: tl.constexpr):
    """All sums of a block in one reduction: one synchronisation instead of one per sum."""
    if sums == 1:
        tl.store(part, tl.sum(v0, axis=0))
    if sums == 2:
        t0, t1 = tl.reduce((v0, v1), 0, _add_two)
        tl.store(part, t0)
        tl.store(part + blocks, t1)
    if sums == 3:
        t0, t1, t2 = tl.reduce((v0, v1, v2), 0, _add_three)
        tl.store(part, t0)
        tl.store(part + blocks, t1)
        tl.store(part + 2 * blocks, t2)
    if sums == 4:
        t0, t1, t2, t3 = tl.reduce((v0, v1, v2, v3), 0, _add_four)
        tl.store(part, t0)
        tl.store(part + blocks, t1)
        tl.store(part + 2 * blocks, t2)
        tl.store(part + 3 * blocks, t3)


@triton.jit
def _read(
    w, anchor, a, b, lead_anchor, lead_a, lead_b, row, at, inside,
    stride_w, stride_anchor, stride_a, stride_b, has_anchor: tl.constexpr, vectors: tl.constexpr,
):  # fmt: skip
    """The values the step reads besides gradient and velocity; those not needed are not loaded and must not be used."""
    here = tl.load(w + row.to(tl.int64) * stride_w + at, mask=inside, other=0)
    start = here
    first = here
    second = here
    if has_anchor:
        start = tl.load(anchor + tl.load(lead_anchor + row).to(tl.int64) * stride_anchor + at, mask=inside, other=0)
    if vectors > 0:
        first = tl.load(a + tl.load(lead_a + row).to(tl.int64) * stride_a + at, mask=inside, other=0)
    if vectors > 1:
        second = tl.load(b + tl.load(lead_b + row).to(tl.int64) * stride_b + at, mask=inside, other=0)
    return here, start, first, second


@triton.jit
def _write(
    total, here, start, first, second, w, velocity, factors, lr, momentum, decay, clip,
    row, at, inside, stride_w, stride_velocity, short, stride_short,
    has_momentum: tl.constexpr, has_decay: tl.constexpr, has_clip: tl.constexpr, has_anchor: tl.constexpr,
    drift_term: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
    sums: tl.constexpr, s00: tl.constexpr, s01: tl.constexpr, s10: tl.constexpr, s11: tl.constexpr,
    s20: tl.constexpr, s21: tl.constexpr, s30: tl.constexpr, s31: tl.constexpr, has_short: tl.constexpr,
):  # fmt: skip
    """Updates the row; returns the products to be summed up for the inner products, unused ones undefined."""
    long_row = row.to(tl.int64)
    speed = velocity + long_row * stride_velocity + at
    if has_momentum and not has_clip:
        total += tl.load(momentum + row) * tl.load(speed, mask=inside, other=0)
    if drift_term:
        total += tl.load(factors + row * 3) * (here - start)
    if a_term:
        total += tl.load(factors + row * 3 + 1) * first
    if b_term:
        total += tl.load(factors + row * 3 + 2) * second
    if has_clip:
        total *= tl.load(clip + row)
        if has_momentum:
            total += tl.load(momentum + row) * tl.load(speed, mask=inside, other=0)
    if has_decay:
        total += tl.load(decay + row) * here
    if has_momentum:
        tl.store(speed, total, mask=inside)
    step = -tl.load(lr + row) * total
    new = here + step
    tl.store(w + long_row * stride_w + at, new, mask=inside)
    if has_short:
        tl.store(short + long_row * stride_short + at, new, mask=inside)
    drift = here
    if has_anchor:
        drift = new - start
    v0, v1, v2, v3 = step, step, step, step
    if sums > 0:
        v0 = _pick(s00, drift, step, first, second) * _pick(s01, drift, step, first, second)
    if sums > 1:
        v1 = _pick(s10, drift, step, first, second) * _pick(s11, drift, step, first, second)
    if sums > 2:
        v2 = _pick(s20, drift, step, first, second) * _pick(s21, drift, step, first, second)
    if sums > 3:
        v3 = _pick(s30, drift, step, first, second) * _pick(s31, drift, step, first, second)
    return v0, v1, v2, v3


@triton.jit
def _block(
    at, inside, row,
    w, grad, velocity, anchor, a, b, lead_anchor, lead_a, lead_b,
    factors, lr, momentum, decay, clip, short,
    stride_w, stride_grad, stride_velocity, stride_short, stride_anchor, stride_a, stride_b,
    has_momentum: tl.constexpr, has_decay: tl.constexpr, has_clip: tl.constexpr, has_anchor: tl.constexpr,
    drift_term: tl.constexpr, vectors: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
    sums: tl.constexpr, s00: tl.constexpr, s01: tl.constexpr, s10: tl.constexpr, s11: tl.constexpr,
    s20: tl.constexpr, s21: tl.constexpr, s30: tl.constexpr, s31: tl.constexpr, has_short: tl.constexpr,
):  # fmt: skip
    total = tl.load(grad + row.to(tl.int64) * stride_grad + at, mask=inside, other=0)
    here, start, first, second = _read(
        w, anchor, a, b, lead_anchor, lead_a, lead_b, row, at, inside,
        stride_w, stride_anchor, stride_a, stride_b, has_anchor, vectors,
    )  # fmt: skip
    return _write(
        total, here, start, first, second, w, velocity, factors, lr, momentum, decay, clip,
        row, at, inside, stride_w, stride_velocity, short, stride_short,
        has_momentum, has_decay, has_clip, has_anchor, drift_term, a_term, b_term,
        sums, s00, s01, s10, s11, s20, s21, s30, s31, has_short,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_block"])
def _advance(
    w, grad, velocity, anchor, a, b, lead_anchor, lead_a, lead_b,
    factors, lr, momentum, decay, clip, at_work, parts, short,
    rows, length, blocks, begin, first_block,
    stride_w, stride_grad, stride_velocity, stride_short, stride_anchor, stride_a, stride_b,
    has_momentum: tl.constexpr, has_decay: tl.constexpr, has_clip: tl.constexpr, has_anchor: tl.constexpr,
    drift_term: tl.constexpr, vectors: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
    sums: tl.constexpr, s00: tl.constexpr, s01: tl.constexpr, s10: tl.constexpr, s11: tl.constexpr,
    s20: tl.constexpr, s21: tl.constexpr, s30: tl.constexpr, s31: tl.constexpr,
    has_short: tl.constexpr, size: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = place % rows
    block = place // rows
    if tl.load(at_work + row) != 0:
        nothing = tl.zeros((size,), w.dtype.element_ty)
        t0, t1, t2, t3 = nothing, nothing, nothing, nothing
        # Only blocks at a row's end are masked: with a mask of any length, words would be read one by one.
        if begin + (block + 1) * each * size <= length:
            for number in range(each):
                v0, v1, v2, v3 = _block(
                    begin + (block * each + number) * size + tl.arange(0, size), tl.full((size,), 1, tl.int1), row,
                    w, grad, velocity, anchor, a, b, lead_anchor, lead_a, lead_b,
                    factors, lr, momentum, decay, clip, short,
                    stride_w, stride_grad, stride_velocity, stride_short, stride_anchor, stride_a, stride_b,
                    has_momentum, has_decay, has_clip, has_anchor, drift_term, vectors, a_term, b_term,
                    sums, s00, s01, s10, s11, s20, s21, s30, s31, has_short,
                )  # fmt: skip
                t0, t1, t2, t3 = t0 + v0, t1 + v1, t2 + v2, t3 + v3
        else:
            for number in range(each):
                at = begin + (block * each + number) * size + tl.arange(0, size)
                v0, v1, v2, v3 = _block(
                    at, at < length, row,
                    w, grad, velocity, anchor, a, b, lead_anchor, lead_a, lead_b,
                    factors, lr, momentum, decay, clip, short,
                    stride_w, stride_grad, stride_velocity, stride_short, stride_anchor, stride_a, stride_b,
                    has_momentum, has_decay, has_clip, has_anchor, drift_term, vectors, a_term, b_term,
                    sums, s00, s01, s10, s11, s20, s21, s30, s31, has_short,
                )  # fmt: skip
                t0, t1, t2, t3 = t0 + v0, t1 + v1, t2 + v2, t3 + v3
        _sum_up(parts + (row * sums) * blocks + first_block + block, blocks, t0, t1, t2, t3, sums)


@triton.jit
def _advance_wide(
    w, x, grad, velocity, anchor, a, b, lead_anchor, lead_a, lead_b,
    factors, lr, momentum, decay, clip, at_work, parts,
    rows, blocks, batch, inputs: tl.constexpr, outputs: tl.constexpr,
    stride_w, stride_velocity, stride_anchor, stride_a, stride_b,
    has_momentum: tl.constexpr, has_decay: tl.constexpr, has_clip: tl.constexpr, has_anchor: tl.constexpr,
    drift_term: tl.constexpr, vectors: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
    sums: tl.constexpr, s00: tl.constexpr, s01: tl.constexpr, s10: tl.constexpr, s11: tl.constexpr,
    s20: tl.constexpr, s21: tl.constexpr, s30: tl.constexpr, s31: tl.constexpr,
    tile_out: tl.constexpr, tile_in: tl.constexpr, size_batch: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """The same for a weight `[outputs, inputs]` whose gradient is computed here from `grad` and `x`."""
    place = tl.program_id(0)
    row = place % rows
    block = place // rows
    if tl.load(at_work + row) != 0:
        long_row = row.to(tl.int64)
        from_o = (block % (outputs // tile_out)) * tile_out
        from_i = (block // (outputs // tile_out)) * tile_in
        o, i = from_o + tl.arange(0, tile_out), from_i + tl.arange(0, tile_in)
        n = tl.arange(0, size_batch)
        counts = (n < batch)[:, None]
        slope = tl.load(grad + (long_row * batch + n[:, None]) * outputs + o[None, :], mask=counts, other=0.0)
        seen = tl.load(x + (long_row * batch + n[:, None]) * inputs + i[None, :], mask=counts, other=0.0)
        # All but the product treats the tile as one-dimensional, and the velocity is read after the product: the
        # compiler then converts the product to the layout of the others, not each of them to that of the product.
        along = tl.arange(0, tile_out * tile_in)
        at = (from_o + along // tile_in) * inputs + from_i + along % tile_in
        inside = along < tile_out * tile_in
        here, start, first, second = _read(
            w, anchor, a, b, lead_anchor, lead_a, lead_b, row, at, inside,
            stride_w, stride_anchor, stride_a, stride_b, has_anchor, vectors,
        )  # fmt: skip
        total = product(tl.trans(slope), seen, tl.zeros((tile_out, tile_in), tl.float32), precision)
        total = tl.reshape(total, [tile_out * tile_in])
        v0, v1, v2, v3 = _write(
            total, here, start, first, second, w, velocity, factors, lr, momentum, decay, clip,
            row, at, inside, stride_w, stride_velocity, w, stride_w,
            has_momentum, has_decay, has_clip, has_anchor, drift_term, a_term, b_term,
            sums, s00, s01, s10, s11, s20, s21, s30, s31, False,
        )  # fmt: skip
        _sum_up(parts + (row * sums) * blocks + block, blocks, v0, v1, v2, v3, sums)


def blocks(length: int, wide: int = 0, spans: Sequence[Span] = ()) -> int:
    """Number of partial sums of an inner product over `length` parameters, `wide` of which are of a wide layer."""
    return wide // (TILE[0] * TILE[1]) + sum(_blocks_of(length - wide, spans or [(wide, length)]))


def _blocks_of(length: int, spans: Sequence[Span]) -> list[int]:
    return [-(-(end - begin) // (BLOCK * _blocks_each(length))) for begin, end in spans]


def _blocks_each(length: int) -> int:
    return min(BLOCKS_EACH, max(1, -(-length // (BLOCK * PROGRAMS))))


@dataclass(frozen=True)
class _Arguments:
    """What the kernels take besides the rows and their gradient."""

    vectors: tuple[Tensor, ...]
    numbers: tuple[Tensor, ...]
    strides: tuple[int, ...]  # of the anchor and the vectors
    switches: tuple[int | bool, ...]

    @classmethod
    def of(cls, step: Pass) -> _Arguments:
        unused, lr = Shared(step.w, step.at_work), step.lr
        shared = [step.anchor or unused, *step.vectors, unused, unused][: 1 + VECTORS]
        pairs = [*step.pairs, (0, 0), (0, 0), (0, 0), (0, 0)][:MOST_SUMS]
        return cls(
            (*(vector.rows for vector in shared), *(vector.lead for vector in shared)),
            (step.factors, lr, *(lr if value is None else value for value in (step.momentum, step.decay, step.clip))),
            tuple(vector.rows.stride(0) for vector in shared),
            (
                step.momentum is not None, step.decay is not None, step.clip is not None, step.anchor is not None,
                step.has_factor[0], len(step.vectors), step.has_factor[1], step.has_factor[2],
                len(step.pairs), *(number for pair in pairs for number in pair),
            ),
        )  # fmt: skip


def advance(step: Pass, grad: Tensor, wide: Wide | None = None) -> None:
    """Takes the step. With a wide layer, its part of `grad` is not read but computed here."""
    rows, length = step.w.shape
    begin = wide.parameters if wide else 0
    spans = step.spans or ((begin, length),)
    if wide is not None:
        arguments, (batch, inputs) = _Arguments.of(step), wide.x.shape[1:]
        _advance_wide[(rows * (begin // (TILE[0] * TILE[1])),)](
            step.w, wide.x, wide.grad, step.velocity, *arguments.vectors, *arguments.numbers, step.at_work, step.parts,
            rows, step.parts.shape[2], batch, inputs, wide.grad.shape[2], step.w.stride(0),
            step.velocity.stride(0), *arguments.strides, *arguments.switches,
            *TILE, max(16, triton.next_power_of_2(batch)), wide.precision, num_warps=WARPS,
        )  # fmt: skip
    for number in range(len(spans)):
        advance_span(step, grad, number, begin)


def advance_span(step: Pass, grad: Tensor, number: int, wide: int = 0) -> None:
    """Takes the step of one of the spans, behind `wide` parameters of a wide layer."""
    rows, length = step.w.shape
    spans, arguments = step.spans or ((wide, length),), _Arguments.of(step)
    counts = _blocks_of(length - wide, spans)
    begin, end = spans[number]
    short = step.w if step.short is None else step.short
    _advance[(rows * counts[number],)](
        step.w, grad, step.velocity, *arguments.vectors, *arguments.numbers, step.at_work, step.parts, short,
        rows, end, step.parts.shape[2], begin, wide // (TILE[0] * TILE[1]) + sum(counts[:number]),
        step.w.stride(0), grad.stride(0), step.velocity.stride(0), short.stride(0), *arguments.strides,
        *arguments.switches, step.short is not None, BLOCK, _blocks_each(length - wide),
    )  # fmt: skip


def leads(rows: Tensor, owners: list[int]) -> Tensor:
    """For each row the first row of the same owner with the same content, `[K]` int32."""
    first: dict[int, int] = {}
    for row, owner in enumerate(owners):
        first.setdefault(owner, row)
    row_numbers = torch.arange(len(owners), dtype=torch.int32, device=rows.device)
    if len(first) == len(owners):
        return row_numbers
    candidates = torch.tensor([first[owner] for owner in owners], dtype=torch.int32, device=rows.device)
    same = torch.ones_like(row_numbers, dtype=torch.bool)
    for columns in rows.split(max(AT_ONCE // len(owners), 1), dim=1):
        same &= (columns == columns[candidates]).all(1)
    return torch.where(same, candidates, row_numbers)
