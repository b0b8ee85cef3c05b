"""Measurements of models on data, which change nothing: accuracy and loss, gradient, Fisher information.

Models run in evaluation mode, with the statistics the server sent, so that a measurement changes no buffer, uses no
dropout mask, and is the same in every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgg.core.model import Net
from fedgg.core.tensor_rows import Rows
from fedgg.errors import UserError


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


Examples = tuple[Tensor, Tensor]  # x [B, ...], y [B]


@dataclass(frozen=True)
class Probe:
    """Measurements row by row; `examples` yields a row's data, in chunks, from the start each time it is called.

    Rows may be fewer than there are data: those that have left a stack stood at its end.
    """

    net: Net
    buffers: Rows  # one row, for all
    examples: Callable[[int], Iterable[Examples]]
    each: Callable[[int], Probe] | None = None  # of a row by itself, where rows are of different nets

    def loss(self, w: Tensor) -> Tensor:
        """Mean supervised loss over each row's examples, `[K, 1]`."""
        if self.each is not None:
            return torch.cat([self.each(k).loss(w[k : k + 1]) for k in range(len(w))])
        with torch.no_grad():
            return self._means(self._loss, w)

    def gradient(self, w: Tensor) -> Tensor:
        """Gradient of that mean loss, `[K, P]`."""
        if self.each is not None:
            return torch.cat([self.each(k).gradient(w[k : k + 1]) for k in range(len(w))])

        def chunk(row: Tensor, x: Tensor, y: Tensor) -> Tensor:
            leaf = row.detach().requires_grad_()
            return torch.autograd.grad(self._loss(leaf, x, y).sum(), leaf)[0]

        return self._means(chunk, w)

    def fisher(self, w: Tensor) -> Tensor:
        """Diagonal of the empirical Fisher information, `[K, P]`: mean square of each example's gradient."""
        if self.each is not None:
            return torch.cat([self.each(k).fisher(w[k : k + 1]) for k in range(len(w))])
        if self.net.mixes_in_evaluation:
            raise UserError(
                f"{type(self.net.module).__name__} mixes the examples of a batch in evaluation mode, so that a single "
                f"example has no gradient of its own, which the Fisher information is made of: take a model that does "
                f"not (BatchNorm with track_running_stats=True, for instance), or another algorithm"
            )
        return torch.cat([self.net.fisher(w[k : k + 1], self.buffers, self.examples(k)) for k in range(len(w))])

    def _loss(self, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.ones_like(row[:1, :1]).expand(1, len(x))
        return self.net.bind(self.buffers, train=False).loss(row, x[None], y[None], mask)

    def _means(self, measure: Callable[[Tensor, Tensor, Tensor], Tensor], w: Tensor) -> Tensor:
        return torch.cat([self._mean(measure, w[k : k + 1], k) for k in range(len(w))])

    def _mean(self, measure: Callable[[Tensor, Tensor, Tensor], Tensor], row: Tensor, k: int) -> Tensor:
        total, seen = row.new_zeros(len(row), 1), 0
        for x, y in self.examples(k):
            total = total + len(x) * measure(row, x, y)
            seen += len(x)
        return total / max(seen, 1)
