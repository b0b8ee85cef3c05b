"""Requests of an experiment to the worker processes: split into tasks, whose results are joined in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fedgg.core.evaluation import Score, Tally, tally_of_outputs, total
from fedgg.core.local import LocalEnd
from fedgg.core.model import Net
from fedgg.core.server import Lost
from fedgg.core.tensor_rows import Rows
from fedgg.engines.base import Look, RoundJob
from fedgg.engines.fused.engine import Fused, train_fused
from fedgg.engines.fused.net import fused_net

Key = int | tuple[int, int]  # a client, or a look and a chunk
Rank = tuple[int, ...]  # the smallest is done first


class WorkerTask(Protocol):
    """An independent and reproducible task: run again, it gives the same bits."""

    def do(self) -> object: ...


@dataclass(frozen=True)
class TrainClient:
    """Trains one client. `job` is without client state; this client's state is part of the task."""

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
        buffers = look.buffers if look.train_personal is None else look.buffers | look.train_personal()
        net, (x, y) = fused_net(look.net), look.data.unseen(look.client, self.chunk)
        with torch.no_grad():
            return tally_of_outputs(net, net.bind(buffers, train=False)(look.w, x[None])[0], y)

    def __str__(self) -> str:
        client = self.looks[self.look].client
        return f"chunk {self.chunk} of {'the test set' if client is None else f'the hold-out of client {client}'}"


@dataclass(frozen=True)
class Trained:
    ends: dict[int, LocalEnd | Lost]  # in the order of the cohort
    seconds: float  # the request's share of the pool's time


@dataclass(frozen=True)
class Scored:
    scores: list[Score]
    seconds: float


Reply = Trained | Scored


@dataclass(frozen=True)
class Request:
    """Clients to be trained or models to be scored, for one experiment. The smallest `turn` goes first."""

    work: RoundJob | tuple[Look, ...]
    turn: int = 0
    name: str = ""  # of the experiment, for messages
    trained_one: Callable[[int, int], None] | None = None
    notice: Callable[[str], None] = field(default=lambda sentence: None)

    @property
    def net(self) -> Net:
        return self.work.net if isinstance(self.work, RoundJob) else self.work[0].net

    def run_here(self) -> Reply:
        """Runs the request in this process, by the engine `fused`."""
        started = time.perf_counter()
        if not isinstance(self.work, RoundJob):
            return Scored(Fused().score(self.work), time.perf_counter() - started)
        ends: dict[int, LocalEnd | Lost] = {}
        for client, end in Fused().train(self.work):
            ends[client] = end
            if self.trained_one is not None:
                self.trained_one(len(ends), len(self.work.cohort))
        return Trained(ends, time.perf_counter() - started)


RequestStream = Generator[Request, Any, None]  # of an experiment: each `Reply` is sent back to it


@dataclass
class OpenRequest:
    """A request whose tasks are queued, running or finished."""

    number: int
    request: Request
    shared: RoundJob | tuple[Look, ...]  # the request's work without client state, which all its tasks refer to
    seconds: float = 0.0  # total over all processes
    results: dict[Key, Any] = field(default_factory=dict)
    open_tasks: int = 0
    unreadable: str | None = None

    @classmethod
    def of(cls, number: int, request: Request) -> OpenRequest:
        work = request.work
        return cls(number, request, replace(work, memory={}, kept_buffers={}) if isinstance(work, RoundJob) else work)

    def constant_parts(self) -> tuple[object, ...]:
        """The parts that are the same in all rounds, each after its own parts: examples, which experiments share."""
        work = self.shared
        if isinstance(work, RoundJob):
            return (*work.data.examples_of_all, work.algorithm, work.net, work.data)
        return (*work[0].data.examples_of_all, work[0].net, work[0].data)

    def tasks(self) -> Iterator[tuple[Key, Rank, WorkerTask]]:
        """Scoring goes before training, so that rounds are recorded early; clients with many steps go first."""
        job = self.request.work
        if isinstance(self.shared, RoundJob):
            assert isinstance(job, RoundJob)
            for client in job.cohort:
                steps = job.work.steps(job.data.examples(client), job.seed, job.round, client)
                yield client, (1, self.request.turn, -steps), TrainClient.of(job, self.shared, client)
            return
        for number, look in enumerate(self.shared):
            for chunk in range(look.data.unseen_chunks(look.client)):
                yield (number, chunk), (0, self.request.turn), ScoreChunk(self.shared, number, chunk)

    def add_result(self, key: Key, result: object, seconds: float) -> None:
        self.results[key] = result
        self.seconds += seconds
        if isinstance(self.request.work, RoundJob) and self.request.trained_one is not None:
            self.request.trained_one(len(self.results), len(self.request.work.cohort))

    def reply(self, processes: int) -> Reply:
        seconds = self.seconds / processes
        if isinstance(self.request.work, RoundJob):
            return Trained({client: self.results[client] for client in self.request.work.cohort}, seconds)
        scores = []
        for number, look in enumerate(self.request.work):
            tallies: list[Tally] = [
                self.results[number, chunk] for chunk in range(look.data.unseen_chunks(look.client))
            ]
            scores.append(total(look.net.metrics, tallies))
        return Scored(scores, seconds)
