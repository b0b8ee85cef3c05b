"""Mean cross entropy of many rows and its gradient in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 1 << 14  # outputs of a row (examples times classes) that fit into one block


@triton.jit
def _cross_entropy(
    outputs, targets, mask, loss, slope, batch, classes, size_batch: tl.constexpr, size_classes: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    n, c = tl.arange(0, size_batch), tl.arange(0, size_classes)
    here, inside = n < batch, (n < batch)[:, None] & (c < classes)[None, :]
    at = (row * batch + n[:, None]) * classes + c[None, :]
    logits = tl.load(outputs + at, mask=inside, other=0.0)
    logits = tl.where((c < classes)[None, :], logits, float("-inf"))
    best = tl.max(logits, axis=1)
    exponentials = tl.exp(logits - best[:, None])
    total = tl.sum(exponentials, axis=1)
    counts = tl.load(mask + row * batch + n, mask=here, other=0.0)
    examples = tl.maximum(tl.sum(counts, axis=0), 1.0)
    hit = c[None, :] == tl.load(targets + row * batch + n, mask=here, other=0)[:, None]
    chosen = tl.sum(tl.where(hit, logits, 0.0), axis=1)
    each = tl.where(here, (best - chosen + tl.log(total)) * counts, 0.0)
    tl.store(loss + row, tl.sum(each, axis=0) / examples)
    share = (counts / examples)[:, None]
    tl.store(slope + at, (exponentials / total[:, None] - tl.where(hit, 1.0, 0.0)) * share, mask=inside)


def _sizes(batch: int, classes: int) -> tuple[int, int]:
    return triton.next_power_of_2(batch), triton.next_power_of_2(classes)


def supports(batch: int, classes: int) -> bool:
    sizes = _sizes(batch, classes)
    return sizes[0] * sizes[1] <= MOST


def mean_cross_entropy(outputs: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Loss `[K, 1]` over the examples with mask 1, and its gradient; outputs are `[K, batch, classes]`."""
    models, batch, classes = outputs.shape
    outputs, targets, mask = outputs.contiguous(), targets.contiguous(), mask.contiguous()
    loss, slope = outputs.new_empty((models, 1)), torch.empty_like(outputs)
    sizes = _sizes(batch, classes)
    warps = 4 if sizes[0] * sizes[1] <= 4096 else 8
    _cross_entropy[(models,)](outputs, targets, mask, loss, slope, batch, classes, *sizes, num_warps=warps)
    return loss, slope
