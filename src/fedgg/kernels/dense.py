"""A wide linear layer for many rows, forward and backward, and the product of two tiles in each precision."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def product(a, b, total, precision: tl.constexpr):
    """total + a b, summed in float32; for bf16 the operands are bf16 already."""
    if precision == "bf16":
        return tl.dot(a, b, total)
    else:  # noqa: RET505 (a branch at compile time)
        return tl.dot(a, b, total, input_precision=precision)


@triton.jit
def product_from_registers(a, b, total, precision: tl.constexpr):
    """As `product`, for a left operand that is computed, not loaded: the product ends before the next turn of a loop.

    Triton 3.6 overwrites the registers of such an operand in the next turn, while asynchronous products that have not
    ended still read them (triton-lang/triton issue 9433). Reading the sum within the turn makes it wait for them.
    """
    total = product(a, b, total, precision)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [total], dtype=tl.float32, is_pure=True, pack=1)


MOST_EXAMPLES = 128  # in a batch; larger batches are bound by arithmetic, not by memory
INPUTS = 64  # read at a time; sizes must be multiples of it
SMALL, LARGE = 64, 128  # outputs of a block: fewer if there are few rows, so that there are enough blocks


@triton.jit
def _forward(
    x, weight, bias, y, batch, stride_weight, stride_bias,
    inputs: tl.constexpr, outputs: tl.constexpr, relu: tl.constexpr,
    precision: tl.constexpr, size_batch: tl.constexpr, size_out: tl.constexpr, size_in: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = outputs // size_out
    row = (tl.program_id(0) // blocks).to(tl.int64)
    o = (tl.program_id(0) % blocks) * size_out + tl.arange(0, size_out)
    n, i = tl.arange(0, size_batch), tl.arange(0, size_in)
    counts = (n < batch)[:, None]
    from_weight = weight + row * stride_weight + o[:, None] * inputs + i[None, :]
    from_x = x + (row * batch + n[:, None]) * inputs + i[None, :]
    total = tl.zeros((size_out, size_batch), tl.float32)
    for at in range(0, inputs, size_in):
        w, seen = tl.load(from_weight + at), tl.trans(tl.load(from_x + at, mask=counts, other=0.0))
        if precision == "bf16":
            total = product_from_registers(w.to(tl.bfloat16), seen, total, precision)
        else:
            total = product(w, seen, total, precision)
    total += tl.load(bias + row * stride_bias + o)[:, None]
    if relu:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + (row * batch + n[None, :]) * outputs + o[:, None], total, mask=(n < batch)[None, :])


@triton.jit
def _back(
    grad, y, out, bias, batch, outputs, stride_bias,
    relu: tl.constexpr, size_batch: tl.constexpr, size_out: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n, o = tl.arange(0, size_batch), tl.program_id(1) * size_out + tl.arange(0, size_out)
    inside = (n < batch)[:, None] & (o < outputs)[None, :]
    at = (row * batch + n[:, None]) * outputs + o[None, :]
    value = tl.load(grad + at, mask=inside, other=0.0)
    if relu:
        value = tl.where(tl.load(y + at, mask=inside, other=0.0) > 0, value, 0.0)
    tl.store(out + at, value, mask=inside)
    tl.store(bias + row * stride_bias + o, tl.sum(value, axis=0), mask=o < outputs)


def supports(inputs: int, outputs: int) -> bool:
    """Whether a layer of these sizes consists of whole tiles."""
    return inputs % INPUTS == 0 and outputs % SMALL == 0


def forward(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, precision: str) -> Tensor:
    """x `[K, batch, inputs]` in bf16 or the weight's type; weight `[K, outputs, inputs]` and bias are views of rows."""
    models, batch, inputs = x.shape
    outputs = weight.shape[1]
    y = torch.empty((models, batch, outputs), dtype=weight.dtype, device=x.device)
    large = outputs % LARGE == 0 and models * (outputs // LARGE) >= 512
    size = LARGE if large else SMALL
    _forward[(models * (outputs // size),)](
        x, weight, bias, y, batch, weight.stride(0), bias.stride(0), inputs, outputs, relu,
        precision, max(16, triton.next_power_of_2(batch)), size, INPUTS, num_warps=8 if large else 4, num_stages=3,
    )  # fmt: skip
    return y


def back(grad: Tensor, y: Tensor, relu: bool, dtype: torch.dtype, into_bias: Tensor) -> Tensor:
    """The gradient before ReLU, in `dtype`; writes the bias's gradient into `into_bias`."""
    models, batch, outputs = y.shape
    grad, out = grad.contiguous(), torch.empty_like(y, dtype=dtype)
    _back[(models, -(-outputs // SMALL))](
        grad, y, out, into_bias, batch, outputs, into_bias.stride(0), relu,
        max(16, triton.next_power_of_2(batch)), SMALL,
    )  # fmt: skip
    return out
