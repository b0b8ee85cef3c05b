"""What a worker is asked to do: train one client, or score one chunk of examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fedgg.core.evaluate import Tally, tally
from fedgg.core.local import LocalEnd
from fedgg.core.rows import Rows
from fedgg.engines.fused.engine import train_fused
from fedgg.engines.fused.net import fused_net
from fedgg.engines.job import Look, RoundJob


class Task(Protocol):
    """A piece of work that is complete in itself: done twice, it gives the same bits twice."""

    def do(self) -> object: ...


@dataclass(frozen=True)
class TrainClient:
    """`job` carries nobody's memory: what this client keeps between rounds comes with the task."""

    job: RoundJob
    client: int
    memory: Rows | None
    kept_buffers: Rows | None

    @classmethod
    def of(cls, job: RoundJob, lean: RoundJob, client: int) -> TrainClient:
        return cls(lean, client, job.memory.get(client), job.kept_buffers.get(client))

    def do(self) -> LocalEnd:
        memory = {} if self.memory is None else {self.client: self.memory}
        kept = {} if self.kept_buffers is None else {self.client: self.kept_buffers}
        return train_fused(replace(self.job, memory=memory, kept_buffers=kept), self.client)

    def __str__(self) -> str:
        return f"client {self.client} of round {self.job.round + 1}"


@dataclass(frozen=True)
class ScoreChunk:
    looks: Sequence[Look]
    look: int
    chunk: int

    def do(self) -> Tally:
        look = self.looks[self.look]
        return tally(fused_net(look.net), look.w, look.buffers, *look.data.unseen(look.client, self.chunk))

    def __str__(self) -> str:
        client = self.looks[self.look].client
        return f"chunk {self.chunk} of {'the test set' if client is None else f'the hold-out of client {client}'}"
