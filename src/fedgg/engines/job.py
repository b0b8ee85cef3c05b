"""What an engine is asked to do: train these clients from this model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch
from fedgg.core.buffers import BufferPolicy
from fedgg.core.net import Net
from fedgg.core.plan import Work
from fedgg.core.rows import Rows


class ClientData(Protocol):
    """The clients' examples, wherever they are."""

    def examples(self, client: int) -> int: ...
    def batches(self, seed: int, round_: int, client: int, work: Work) -> Iterator[Batch]: ...
    def client_chunks(self, client: int) -> Iterator[tuple[Tensor, Tensor]]: ...


@dataclass(frozen=True)
class Optimiser:
    """Settings of the local SGD in this round."""

    lr: float
    momentum: float
    weight_decay: float


@dataclass(frozen=True)
class RoundJob:
    algorithm: Algorithm
    net: Net
    data: ClientData
    work: Work
    optimiser: Optimiser
    policy: BufferPolicy
    seed: int
    round: int
    cohort: list[int]
    w: Tensor  # [1, P]
    buffers: Rows  # the server's
    down: Rows
    memory: Mapping[int, Rows]  # absent: the server meets this client for the first time
    kept_buffers: Mapping[int, Rows]  # under the policy `local`
