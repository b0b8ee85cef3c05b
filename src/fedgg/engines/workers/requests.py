"""What an experiment requests of the worker processes, cut into tasks, and the results put together in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fedgg.core.client_rows import Rows
from fedgg.core.evaluation import Score, Tally, tally, total
from fedgg.core.local import LocalEnd
from fedgg.core.model import Net
from fedgg.core.server import Lost
from fedgg.engines.base import Look, RoundJob
from fedgg.engines.fused.cpu_step import fused_net
from fedgg.engines.fused.engine import Fused, train_fused

Key = int | tuple[int, int]  # a client, or a look and a chunk
Rank = tuple[int, ...]  # the smallest is done first


class Task(Protocol):
    """A piece of work that is complete in itself: done twice, it gives the same bits twice."""

    def do(self) -> object: ...


@dataclass(frozen=True)
class TrainClient:
    """`job` carries no client state: that of this client comes with the task."""

    job: RoundJob
    client: int
    memory: Rows | None
    kept_buffers: Rows | None

    @classmethod
    def of(cls, job: RoundJob, shared: RoundJob, client: int) -> TrainClient:
        return cls(shared, client, job.memory.get(client), job.kept_buffers.get(client))

    def do(self) -> LocalEnd:
        memory = {} if self.memory is None else {self.client: self.memory}
        kept_buffers = {} if self.kept_buffers is None else {self.client: self.kept_buffers}
        return train_fused(replace(self.job, memory=memory, kept_buffers=kept_buffers), self.client)

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


@dataclass(frozen=True)
class Trained:
    ends: dict[int, LocalEnd | Lost]  # in the order of the cohort
    seconds: float  # its share of the pool's time


@dataclass(frozen=True)
class Scored:
    scores: list[Score]
    seconds: float


Reply = Trained | Scored


@dataclass(frozen=True)
class Request:
    """What an experiment needs next: its clients trained, or its model scored. The smallest `turn` goes first."""

    what: RoundJob | tuple[Look, ...]
    turn: int = 0
    name: str = ""  # of the experiment, for messages
    trained_one: Callable[[int, int], None] = field(default=lambda done, of: None)
    notice: Callable[[str], None] = field(default=lambda sentence: None)

    @property
    def net(self) -> Net:
        return self.what.net if isinstance(self.what, RoundJob) else self.what[0].net

    def run_here(self) -> Reply:
        """In this process, by the engine `fused`."""
        started = time.perf_counter()
        if not isinstance(self.what, RoundJob):
            return Scored(Fused().score(self.what), time.perf_counter() - started)
        ends: dict[int, LocalEnd | Lost] = {}
        for client, end in Fused().train(self.what):
            ends[client] = end
            self.trained_one(len(ends), len(self.what.cohort))
        return Trained(ends, time.perf_counter() - started)


RequestStream = Generator[Request, Any, None]  # of an experiment: each `Reply` is sent back to it


@dataclass
class OpenRequest:
    """A request whose tasks are in the queue or done."""

    number: int
    request: Request
    shared: RoundJob | tuple[Look, ...]  # what all its tasks refer to, without client state
    seconds: float = 0.0  # of work, by all processes together
    results: dict[Key, Any] = field(default_factory=dict)
    to_come: int = 0
    unreadable: str | None = None

    @classmethod
    def of(cls, number: int, request: Request) -> OpenRequest:
        what = request.what
        return cls(number, request, replace(what, memory={}, kept_buffers={}) if isinstance(what, RoundJob) else what)

    def constant_parts(self) -> tuple[object, ...]:
        """What is the same in every round of the experiment, the data last."""
        what = self.shared
        return (what.algorithm, what.net, what.data) if isinstance(what, RoundJob) else (what[0].net, what[0].data)

    def tasks(self) -> Iterator[tuple[Key, Rank, Task]]:
        """Models are scored before clients train, so that rounds are recorded early; long clients go first."""
        job = self.request.what
        if isinstance(self.shared, RoundJob):
            assert isinstance(job, RoundJob)
            for client in job.cohort:
                steps = job.work.steps(job.data.examples(client))
                yield client, (1, self.request.turn, -steps), TrainClient.of(job, self.shared, client)
            return
        for number, look in enumerate(self.shared):
            for chunk in range(look.data.unseen_chunks(look.client)):
                yield (number, chunk), (0, self.request.turn), ScoreChunk(self.shared, number, chunk)

    def take(self, key: Key, result: object, seconds: float) -> None:
        self.results[key] = result
        self.seconds += seconds
        if isinstance(self.request.what, RoundJob):
            self.request.trained_one(len(self.results), len(self.request.what.cohort))

    def reply(self, processes: int) -> Reply:
        seconds = self.seconds / processes
        if isinstance(self.request.what, RoundJob):
            return Trained({client: self.results[client] for client in self.request.what.cohort}, seconds)
        scores = []
        for number, look in enumerate(self.request.what):
            tallies: list[Tally] = [
                self.results[number, chunk] for chunk in range(look.data.unseen_chunks(look.client))
            ]
            scores.append(total(tallies))
        return Scored(scores, seconds)
