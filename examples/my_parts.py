"""Your own optimiser, learning-rate schedule, data set, split, aggregation rule and engine.

    fedgg run --trust examples/my_parts.py --data examples/my_parts.py:two_moons --set model.hidden=16 \
        --set split.scheme=examples/my_parts.py:by_size --set split.ratio=1.5 --set split.clients=5 \
        --set optimiser.name=examples/my_parts.py:SignSGD --set schedule.name=examples/my_parts.py:inverse_root \
        --set robust.rule=examples/my_parts.py:GeometricMedian --set engine.name=examples/my_parts.py:Reversed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg import Collector, Number, Optimiser, RoundJob
from fedgg.core.evaluation import Score
from fedgg.core.local import LocalEnd
from fedgg.core.server import Sent, all_sent_the_same
from fedgg.core.tensor_rows import Rows
from fedgg.engines import Loop
from fedgg.engines.base import Look


@dataclass(frozen=True)
class SignSGD(Optimiser):
    """optimiser.name: the signs of a mean of gradients (Signum, Bernstein et al. 2018). `self.lr` is `local.lr`."""

    decay: Number = 0.9  # the setting optimiser.decay

    def start(self, w: Tensor) -> Rows:
        return {"mean": torch.zeros_like(w)}

    def move(self, grad: Tensor, w: Tensor, state: Rows) -> tuple[Tensor, Rows]:
        mean = self.decay * state["mean"] + (1 - self.decay) * grad
        return -self.lr * (mean.sign() + self.weight_decay * w), {"mean": mean}


def inverse_root(round_: int, offset: int = 1) -> float:
    """schedule.name: a factor on local.lr; `round_` counts from 0. `offset` is the setting schedule.offset."""
    return float((offset / (round_ + offset)) ** 0.5)


def two_moons() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """data.source: x_train, y_train, x_test, y_test; the client of each training example may follow."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 800)
    angle = np.pi * rng.random(800)
    points = np.stack([np.cos(angle) + labels - 0.5, np.sin(angle) * (1 - 2 * labels) + 0.5 * labels], 1)
    points = (points + 0.1 * rng.standard_normal(points.shape)).astype(np.float32)
    return points[:600], labels[:600], points[600:], labels[600:]


def by_size(
    labels: NDArray[np.int64], clients: int, rng: np.random.Generator, ratio: float = 2.0
) -> list[NDArray[np.int64]]:
    """split.scheme: the example numbers of each client; here each client has `ratio` times as many as the previous one.

    `ratio` is the setting split.ratio.
    """
    sizes = ratio ** np.arange(clients)
    ends = np.round(np.cumsum(sizes) / sizes.sum() * len(labels)).astype(np.int64)
    return np.split(rng.permutation(len(labels)), ends[:-1])


@dataclass(frozen=True)
class GeometricMedian(Collector):
    """robust.rule: the point whose distances to the clients' messages have the smallest sum (Weiszfeld's algorithm)."""

    counts_equally: ClassVar[bool] = True

    iterations: int = 8  # the setting robust.iterations

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        medians = {name: self._median(rows) for name, rows in sent.up.items()}
        return all_sent_the_same(medians, len(sent.share))

    def _median(self, rows: Tensor) -> Tensor:
        point = rows.mean(0, keepdim=True)
        for _ in range(self.iterations):
            weights = 1 / torch.linalg.vector_norm(rows - point, dim=1, keepdim=True).clamp_min(1e-6)
            point = (weights * rows).sum(0, keepdim=True) / weights.sum()
        return point


class Reversed:
    """engine.name: trains the clients of a round and scores models; here like `loop`, but last client first."""

    def __init__(self) -> None:
        self._loop = Loop()

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd]]:
        yield from self._loop.train(replace(job, cohort=job.cohort[::-1]))

    def score(self, looks: Sequence[Look]) -> list[Score]:
        return self._loop.score(looks)
