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


@dataclass(frozen=True)
class Tally:
    """What a chunk of examples adds to a score."""

    right: Tensor  # scalars, float64
    loss: Tensor
    examples: int


def tally(net: Net, w: Tensor, buffers: Rows, x: Tensor, y: Tensor) -> Tally:
    """One row on one chunk, in evaluation mode."""
    with torch.no_grad():
        outputs = net.bind(buffers, train=False)(w, x[None])[0]
        right = (outputs.argmax(1) == y).sum().double()
        return Tally(right, net.criterion(outputs, y).double().sum(), len(y))


def total(tallies: Iterable[Tally]) -> Score:
    """Accuracy and mean loss over all chunks, added up in the order given: the same bits in every engine."""
    right: Tensor | float = 0.0
    loss: Tensor | float = 0.0
    examples = 0
    for part in tallies:
        right, loss, examples = right + part.right, loss + part.loss, examples + part.examples
    return Score(float(right) / max(examples, 1), float(loss) / max(examples, 1), examples)


def evaluate(net: Net, w: Tensor, buffers: Rows, chunks: Iterable[tuple[Tensor, Tensor]]) -> Score:
    """Accuracy and mean loss of one row, in evaluation mode."""
    return total(tally(net, w, buffers, x, y) for x, y in chunks)
