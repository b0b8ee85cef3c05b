"""What an engine is asked to do: train these clients from this model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch
from fedgg.core.buffers import BufferPolicy
from fedgg.core.local import LocalEnd
from fedgg.core.net import Net
from fedgg.core.plan import Work
from fedgg.core.rows import Rows


class ClientData(Protocol):
    """The clients' examples, wherever they are: one client's batches, or agendas that are gathered for many at once."""

    def examples(self, client: int) -> int: ...
    def batches(self, seed: int, round_: int, client: int, work: Work) -> Iterator[Batch]: ...
    def agenda(self, seed: int, round_: int, client: int, work: Work) -> Any: ...
    def gather(self, agendas: Sequence[Any]) -> Iterator[Batch]: ...
    def lay_out(self, agendas: Sequence[Any]) -> Any: ...
    def read(self, where: Tensor, moves: Any, lanes: int = 0, dtype: torch.dtype | None = None) -> Batch: ...
    def shares_examples_with(self, other: object) -> bool: ...
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


class Engine(Protocol):
    """Trains the clients of a round and gives them back one by one."""

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd]]: ...
