"""How good a model is on examples it does not train on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgg.core.net import Net
from fedgg.core.rows import Rows


@dataclass(frozen=True)
class Score:
    accuracy: float
    loss: float
    examples: int


def rights(net: Net, w: Tensor, buffers: Rows, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Which examples one row gets right, in evaluation mode."""
    forward = net.bind(buffers, train=False)
    with torch.no_grad():
        return torch.cat([forward(w, x[None])[0].argmax(1) == y for x, y in chunks])


def evaluate(net: Net, w: Tensor, buffers: Rows, chunks: Iterable[tuple[Tensor, Tensor]]) -> Score:
    """Accuracy and mean loss of one row, in evaluation mode."""
    forward = net.bind(buffers, train=False)
    right = total = torch.zeros((), dtype=torch.float64, device=w.device)
    examples = 0
    with torch.no_grad():
        for x, y in chunks:
            outputs = forward(w, x[None])[0]
            right = right + (outputs.argmax(1) == y).sum()
            total = total + net.criterion(outputs, y).double().sum()
            examples += len(y)
    return Score(float(right) / max(examples, 1), float(total) / max(examples, 1), examples)
