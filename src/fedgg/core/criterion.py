"""What is to be made small: the loss of each example, and its mean over those that count."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Criterion = Callable[[Tensor, Tensor], Tensor]  # outputs [N, ...], targets [N] -> loss of each example [N]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def mean_loss(criterion: Criterion, outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    each = criterion(outputs.flatten(0, 1), y.flatten(0, 1)).view_as(mask)
    return (each * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
