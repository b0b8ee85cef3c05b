"""One optimiser step of many rows in one pass over memory: terms, weight decay, momentum, update, and inner products.

    grad' = grad + factor_0 (w - anchor) + factor_1 a + factor_2 b + decay w
    v     = momentum v + grad'
    w     = w - lr v

and of the new state, for the next step's factors, some inner products among drift = w - anchor, step = -lr v, a and b.
Each block writes its part of a sum, and the parts are added afterwards in a fixed order: the same bits every time.
Rows may share an anchor, a or b (clients of one experiment do): `lead` names the row to read, and since the rows of
one block of parameters are visited one after another, a shared one comes out of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
VECTORS = 2  # a and b
MOST_SUMS = 4
DRIFT, STEP, FIRST_VECTOR = 0, 1, 2  # how inner products name what they are made of


@dataclass(frozen=True)
class Shared:
    """Vectors `[K, P]` of which several rows may be the same one: row k is to be read at row `lead[k]`."""

    rows: Tensor
    lead: Tensor  # [K] int32


@dataclass(frozen=True)
class Pass:
    """What a step needs beside the gradient; `w`, `velocity` and `parts` are moved in place."""

    w: Tensor
    velocity: Tensor
    anchor: Shared | None
    vectors: list[Shared]
    factors: Tensor  # [K, 3]: of the drift and of each vector
    has_factor: list[bool]
    lr: Tensor
    momentum: Tensor | None
    decay: Tensor | None
    at_work: Tensor  # [K, 1] bool: the others stand still, and keep their sums
    parts: Tensor  # [K, sums, blocks]
    pairs: tuple[tuple[int, int], ...]


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
def _advance(
    w, grad, velocity, anchor, a, b, lead_anchor, lead_a, lead_b,
    factors, lr, momentum, decay, at_work, parts,
    rows, length, blocks, stride_w, stride_grad, stride_velocity, stride_anchor, stride_a, stride_b,
    has_momentum: tl.constexpr, has_decay: tl.constexpr, has_anchor: tl.constexpr, drift_term: tl.constexpr,
    vectors: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
    sums: tl.constexpr, s00: tl.constexpr, s01: tl.constexpr, s10: tl.constexpr, s11: tl.constexpr,
    s20: tl.constexpr, s21: tl.constexpr, s30: tl.constexpr, s31: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = place % rows
    block = place // rows
    if tl.load(at_work + row) != 0:
        long_row = row.to(tl.int64)
        at = block * size + tl.arange(0, size)
        inside = at < length
        here = tl.load(w + long_row * stride_w + at, mask=inside, other=0)
        total = tl.load(grad + long_row * stride_grad + at, mask=inside, other=0)
        drift = here
        first = here
        second = here
        if has_anchor:
            lead = tl.load(lead_anchor + row).to(tl.int64)
            start = tl.load(anchor + lead * stride_anchor + at, mask=inside, other=0)
            if drift_term:
                total += tl.load(factors + row * 3) * (here - start)
        if vectors > 0:
            lead = tl.load(lead_a + row).to(tl.int64)
            first = tl.load(a + lead * stride_a + at, mask=inside, other=0)
            if a_term:
                total += tl.load(factors + row * 3 + 1) * first
        if vectors > 1:
            lead = tl.load(lead_b + row).to(tl.int64)
            second = tl.load(b + lead * stride_b + at, mask=inside, other=0)
            if b_term:
                total += tl.load(factors + row * 3 + 2) * second
        if has_decay:
            total += tl.load(decay + row) * here
        if has_momentum:
            speed = velocity + long_row * stride_velocity + at
            total += tl.load(momentum + row) * tl.load(speed, mask=inside, other=0)
            tl.store(speed, total, mask=inside)
        step = -tl.load(lr + row) * total
        new = here + step
        tl.store(w + long_row * stride_w + at, new, mask=inside)
        if has_anchor:
            drift = new - start
        part = parts + (row * sums) * blocks + block
        if sums > 0:
            tl.store(part, tl.sum(_pick(s00, drift, step, first, second) * _pick(s01, drift, step, first, second)))
        if sums > 1:
            value = tl.sum(_pick(s10, drift, step, first, second) * _pick(s11, drift, step, first, second))
            tl.store(part + blocks, value)
        if sums > 2:
            value = tl.sum(_pick(s20, drift, step, first, second) * _pick(s21, drift, step, first, second))
            tl.store(part + 2 * blocks, value)
        if sums > 3:
            value = tl.sum(_pick(s30, drift, step, first, second) * _pick(s31, drift, step, first, second))
            tl.store(part + 3 * blocks, value)


def blocks(length: int) -> int:
    """Into how many parts an inner product over so many parameters falls."""
    return -(-length // BLOCK)


def advance(step: Pass, grad: Tensor) -> None:
    rows, length = step.w.shape
    nothing = Shared(step.w, step.at_work)
    shared = [step.anchor or nothing, *step.vectors, nothing, nothing][: 1 + VECTORS]
    pairs = [*step.pairs, (0, 0), (0, 0), (0, 0), (0, 0)][:MOST_SUMS]
    lr, count = step.lr, blocks(length)
    _advance[(rows * count,)](
        step.w, grad, step.velocity, *(one.rows for one in shared), *(one.lead for one in shared),
        step.factors, lr, lr if step.momentum is None else step.momentum, lr if step.decay is None else step.decay,
        step.at_work, step.parts, rows, length, count,
        step.w.stride(0), grad.stride(0), step.velocity.stride(0), *(one.rows.stride(0) for one in shared),
        step.momentum is not None, step.decay is not None, step.anchor is not None, step.has_factor[0],
        len(step.vectors), step.has_factor[1], step.has_factor[2],
        len(step.pairs), *(number for both in pairs for number in both), BLOCK,
    )  # fmt: skip


def leads(rows: Tensor, owners: list[int]) -> Tensor:
    """For each row the first row of the same owner with the same content, `[K]` int32."""
    first: dict[int, int] = {}
    for row, owner in enumerate(owners):
        first.setdefault(owner, row)
    candidates = torch.tensor([first[owner] for owner in owners], device=rows.device)
    own = torch.arange(len(owners), device=rows.device)
    same = torch.stack([(rows[k] == rows[first[owner]]).all() for k, owner in enumerate(owners)])
    return torch.where(same, candidates, own).to(torch.int32)
