"""Measurements of models on data, which change nothing: loss and metrics, gradient, Fisher information.

Models run in evaluation mode, with the statistics the server sent, so that a measurement changes no buffer, uses no
dropout mask, and is the same in every engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedgg.core.metrics import Loss, Metric, Sums
from fedgg.core.model import Net
from fedgg.core.tensor_rows import Rows
from fedgg.errors import UserError


@dataclass(frozen=True)
class Score:
    """A model on some examples."""

    loss: float
    examples: int
    values: Mapping[str, float]  # of the metrics, by name
    by_class: Mapping[str, list[float]] = field(default_factory=dict)  # of the metrics that classes have each


@dataclass(frozen=True)
class Tally:
    """What a chunk of examples adds to a score."""

    loss: Tensor  # scalar, float64: the sum over examples, by their weights
    weight: Tensor | int  # the sum of the weights
    examples: int
    sums: tuple[Sums, ...]  # of each metric


def tally_of_outputs(net: Net, outputs: Tensor, y: Tensor) -> Tally:
    """The loss and metrics of a chunk, from the outputs of a model in evaluation mode."""
    losses = net.criterion(outputs, y).double()
    if not net.task.examples_differ:
        return Tally(losses.sum(), len(y), len(y), tuple(metric.sums(outputs, y) for metric in net.metrics))
    weights, scored = net.task.weights(y), net.task.scored(outputs, y)
    sums = tuple(metric.sums(*scored) for metric in net.metrics)
    return Tally((losses * weights).sum(), weights.sum(), len(y), sums)


def total(metrics: Sequence[Metric], tallies: Sequence[Tally]) -> Score:
    """Mean loss and metrics over all chunks, added up in the order given: the same bits in every engine."""
    loss, weight = float(sum(part.loss for part in tallies)), float(sum(part.weight for part in tallies))
    values: dict[str, float] = {}
    by_class: dict[str, list[float]] = {}
    mean_loss = loss / weight if weight else math.nan  # of padding alone there is none
    for place, metric in enumerate(metrics):
        if isinstance(metric, Loss):
            values[metric.name] = mean_loss
            continue
        chunks = [part.sums[place] for part in tallies]
        combine: Callable[[list[Tensor]], Any] = torch.cat if metric.gathers else sum
        sums = {name: combine([chunk[name] for chunk in chunks]) for name in (chunks[0] if chunks else ())}
        values[metric.name] = metric.value(sums) if chunks else math.nan
        if metric.of_classes and chunks:
            by_class[metric.name] = metric.by_class(sums)
    return Score(mean_loss, sum(part.examples for part in tallies), values, by_class)


def evaluate(net: Net, w: Tensor, buffers: Rows, chunks: Iterable[tuple[Tensor, Tensor]]) -> Score:
    """Mean loss and metrics of one row, in evaluation mode."""
    forward = net.bind(buffers, train=False)
    with torch.no_grad():
        return total(net.metrics, [tally_of_outputs(net, forward(w, x[None])[0], y) for x, y in chunks])


Examples = tuple[Tensor, Tensor]  # x [B, ...], y [B, ...]


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

    def class_counts(self, w: Tensor) -> Tensor:
        """How many examples of each class each row has, `[K, classes]`: as many classes as the model has outputs."""
        if self.each is not None:
            return torch.cat([self.each(k).class_counts(w[k : k + 1]) for k in range(len(w))])
        counts = []
        for k in range(len(w)):
            labels = torch.cat([y for _, y in self.examples(k)])
            counts.append(torch.bincount(labels, minlength=self._outputs(w[k : k + 1], k)))
        return torch.stack(counts).to(w.dtype)

    def _outputs(self, row: Tensor, k: int) -> int:
        x, _ = next(iter(self.examples(k)))
        with torch.no_grad():
            return self.net.bind(self.buffers, train=False)(row, x[None, :1]).shape[-1]

    def _loss(self, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.ones_like(row[:1, :1]).expand(1, len(x))
        if self.net.task.examples_differ:
            mask = self.net.task.weights(y).to(row.dtype)[None]
        return self.net.bind(self.buffers, train=False).loss(row, x[None], y[None], mask)

    def _means(self, measure: Callable[[Tensor, Tensor, Tensor], Tensor], w: Tensor) -> Tensor:
        return torch.cat([self._mean(measure, w[k : k + 1], k) for k in range(len(w))])

    def _mean(self, measure: Callable[[Tensor, Tensor, Tensor], Tensor], row: Tensor, k: int) -> Tensor:
        total, seen = row.new_zeros(len(row), 1), 0
        for x, y in self.examples(k):
            count = int(self.net.task.weights(y).sum()) if self.net.task.examples_differ else len(x)
            total = total + count * measure(row, x, y)
            seen += count
        return total / max(seen, 1)
