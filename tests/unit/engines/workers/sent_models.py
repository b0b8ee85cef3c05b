"""Algorithms and models for tests of processes: they must be importable by name from another process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.core.algorithm import Algorithm, Client, setting
from fedgg.core.tensor_rows import Rows


def dies_here() -> None:
    """End this process as the kernel does when memory is short; never the test's own."""
    assert multiprocessing.parent_process() is not None
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Deadly(Algorithm):
    """FedAvg, but the client with so many examples takes its process with it."""

    examples: int = setting(0, "whose process dies", "a test")

    def begin(self, w: Tensor, client: Client) -> Rows:
        if int(client.examples) == self.examples:
            dies_here()
        return super().begin(w, client)


class Untold(Exception):
    """Cannot be pickled: it wants two arguments and keeps one."""

    def __init__(self, what: str, where: str):
        super().__init__(what)


@dataclass(frozen=True)
class Raising(Algorithm):
    """FedAvg with a mistake in it."""

    odd: bool = setting(False, "whether the error is one that cannot travel", "a test")

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        if self.odd:
            raise Untold("an odd mistake", "here")
        raise ZeroDivisionError("the user's own mistake")


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.relu(self.first(x.flatten(1))), 0.3, training=self.training)
        out: Tensor = self.second(hidden)
        return out


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class WithALambda(WithDropout):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Callable[[Tensor], Tensor] = lambda x: 2 * x

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(super().forward(x))
