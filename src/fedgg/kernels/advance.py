"""One optimiser step of many rows in one pass over memory: terms, weight decay, momentum, update, and inner products.

    grad' = grad + factor_0 (w - anchor) + factor_1 a + factor_2 b + decay w
    v     = momentum v + grad'
    w     = w - lr v

and of the new state, for the next step's factors, some inner products among drift = w - anchor, step = -lr v, a and b.
Each block writes its part of a sum, and the parts are added afterwards in a fixed order: the same bits every time.
Rows may share an anchor, a or b (clients of one experiment do): `lead` names the row to read, and since the rows of
one block of parameters are visited one after another, a shared one comes out of the cache.

The gradient of a wide linear layer need not exist in memory at all: `advance_linear` makes each tile of it, out of the
layer's inputs and the gradients of its outputs, where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
TILE_OUT, TILE_IN = 64, 128
VECTORS = 2  # a and b
MOST_SUMS = 4
DRIFT, STEP, FIRST_VECTOR = 0, 1, 2  # how inner products name what they are made of


@dataclass(frozen=True)
class Shared:
    """Vectors `[K, P]` of which several rows may be the same one: row k is to be read at row `lead[k]`."""

    rows: Tensor
    lead: Tensor  # [K] int32

    def part(self, start: int, end: int) -> Shared:
        return Shared(self.rows[:, start:end], self.lead)


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
def _move(
    total, at, inside, row, block,
    w, velocity, anchor, a, b, lead_anchor, lead_a, lead_b, factors, lr, momentum, decay, parts,
    blocks, stride_w, stride_velocity, stride_anchor, stride_a, stride_b,
    has_momentum: tl.constexpr, has_decay: tl.constexpr, has_anchor: tl.constexpr, drift_term: tl.constexpr,
    vectors: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
    sums: tl.constexpr, s00: tl.constexpr, s01: tl.constexpr, s10: tl.constexpr, s11: tl.constexpr,
    s20: tl.constexpr, s21: tl.constexpr, s30: tl.constexpr, s31: tl.constexpr,
):  # fmt: skip
    """The step at some places of one row, given the gradient there."""
    long_row = row.to(tl.int64)
    here = tl.load(w + long_row * stride_w + at, mask=inside, other=0)
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


@triton.jit
def _advance(
    grad, stride_grad, rows, length, first_block, at_work,
    w, velocity, anchor, a, b, lead_anchor, lead_a, lead_b, factors, lr, momentum, decay, parts,
    blocks, stride_w, stride_velocity, stride_anchor, stride_a, stride_b,
    has_momentum: tl.constexpr, has_decay: tl.constexpr, has_anchor: tl.constexpr, drift_term: tl.constexpr,
    vectors: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
    sums: tl.constexpr, s00: tl.constexpr, s01: tl.constexpr, s10: tl.constexpr, s11: tl.constexpr,
    s20: tl.constexpr, s21: tl.constexpr, s30: tl.constexpr, s31: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = place % rows
    block = place // rows
    if tl.load(at_work + row) != 0:
        at = block * size + tl.arange(0, size)
        inside = at < length
        total = tl.load(grad + row.to(tl.int64) * stride_grad + at, mask=inside, other=0)
        _move(
            total, at, inside, row, first_block + block,
            w, velocity, anchor, a, b, lead_anchor, lead_a, lead_b, factors, lr, momentum, decay, parts,
            blocks, stride_w, stride_velocity, stride_anchor, stride_a, stride_b,
            has_momentum, has_decay, has_anchor, drift_term, vectors, a_term, b_term,
            sums, s00, s01, s10, s11, s20, s21, s30, s31,
        )  # fmt: skip


@triton.jit
def _advance_linear(
    grad_y, x, rows, batch, outs, ins, at_work,
    w, velocity, anchor, a, b, lead_anchor, lead_a, lead_b, factors, lr, momentum, decay, parts,
    blocks, stride_w, stride_velocity, stride_anchor, stride_a, stride_b,
    has_momentum: tl.constexpr, has_decay: tl.constexpr, has_anchor: tl.constexpr, drift_term: tl.constexpr,
    vectors: tl.constexpr, a_term: tl.constexpr, b_term: tl.constexpr,
    sums: tl.constexpr, s00: tl.constexpr, s01: tl.constexpr, s10: tl.constexpr, s11: tl.constexpr,
    s20: tl.constexpr, s21: tl.constexpr, s30: tl.constexpr, s31: tl.constexpr,
    tile_out: tl.constexpr, tile_in: tl.constexpr, tile_batch: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = place % rows
    block = place // rows
    if tl.load(at_work + row) != 0:
        across = tl.cdiv(ins, tile_in)
        o = (block // across) * tile_out + tl.arange(0, tile_out)
        i = (block % across) * tile_in + tl.arange(0, tile_in)
        long_row = row.to(tl.int64)
        total = tl.zeros((tile_out, tile_in), tl.float32)
        for start in range(0, batch, tile_batch):
            e = start + tl.arange(0, tile_batch)
            left = tl.load(
                grad_y + long_row * batch * outs + e[None, :] * outs + o[:, None],
                mask=(e < batch)[None, :] & (o < outs)[:, None], other=0.0,
            )  # fmt: skip
            right = tl.load(
                x + long_row * batch * ins + e[:, None] * ins + i[None, :],
                mask=(e < batch)[:, None] & (i < ins)[None, :], other=0.0,
            )  # fmt: skip
            total = tl.dot(left, right, total, input_precision=precision)
        _move(
            total, o[:, None] * ins + i[None, :], (o < outs)[:, None] & (i < ins)[None, :], row, block,
            w, velocity, anchor, a, b, lead_anchor, lead_a, lead_b, factors, lr, momentum, decay, parts,
            blocks, stride_w, stride_velocity, stride_anchor, stride_a, stride_b,
            has_momentum, has_decay, has_anchor, drift_term, vectors, a_term, b_term,
            sums, s00, s01, s10, s11, s20, s21, s30, s31,
        )  # fmt: skip


def blocks(length: int) -> int:
    """Into how many parts an inner product over so many parameters falls."""
    return -(-length // BLOCK)


def tiles(outs: int, ins: int) -> int:
    """The same for a linear layer whose gradient is made on the way."""
    return -(-outs // TILE_OUT) * -(-ins // TILE_IN)


def advance(step: Pass, grad: Tensor, start: int = 0, first_block: int = 0) -> None:
    """The parameters from `start` on; `grad` is the whole gradient."""
    rows, length = step.w.shape[0], step.w.shape[1] - start
    _advance[(rows * blocks(length),)](
        grad[:, start:], grad.stride(0), rows, length, first_block, step.at_work, *_arguments(step, start), BLOCK
    )


def advance_linear(step: Pass, grad_y: Tensor, x: Tensor, precision: str) -> None:
    """The first parameters of each row, which are a linear layer's weight; grad_y `[K, B, out]`, x `[K, B, in]`."""
    rows, batch, outs = grad_y.shape
    ins = x.shape[2]
    _advance_linear[(rows * tiles(outs, ins),)](
        grad_y.contiguous(), x.contiguous(), rows, batch, outs, ins, step.at_work, *_arguments(step, 0),
        TILE_OUT, TILE_IN, min(64, max(16, triton.next_power_of_2(batch))), precision, num_warps=8,
    )  # fmt: skip


def _arguments(step: Pass, start: int) -> tuple[Any, ...]:
    nothing = Shared(step.w, step.at_work)
    shared = [*([step.anchor] if step.anchor else [nothing]), *step.vectors, nothing, nothing][: 1 + VECTORS]
    rows = [one.rows[:, start:] for one in shared]
    pairs = [*step.pairs, (0, 0), (0, 0), (0, 0), (0, 0)][:MOST_SUMS]
    lr = step.lr
    return (
        step.w[:, start:], step.velocity[:, start:], *rows, *(one.lead for one in shared),
        step.factors, lr, lr if step.momentum is None else step.momentum, lr if step.decay is None else step.decay,
        step.parts, step.parts.shape[2],
        step.w.stride(0), step.velocity.stride(0), *(one.stride(0) for one in rows),
        step.momentum is not None, step.decay is not None, step.anchor is not None, step.has_factor[0],
        len(step.vectors), step.has_factor[1], step.has_factor[2],
        len(step.pairs), *(number for both in pairs for number in both),
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
