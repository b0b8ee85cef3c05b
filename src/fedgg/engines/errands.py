"""What an experiment asks of a pool, cut into tasks, and the answers put together again in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fedgg.core.evaluate import Score, Tally, total
from fedgg.core.local import LocalEnd
from fedgg.core.net import Net
from fedgg.core.server import Lost
from fedgg.engines.fused.engine import Fused
from fedgg.engines.job import Look, RoundJob
from fedgg.engines.tasks import ScoreChunk, Task, TrainClient

Key = int | tuple[int, int]  # a client, or a look and a chunk
Rank = tuple[int, ...]  # the smallest is done first


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
class Ask:
    """What an experiment wants next: its clients trained, or its model looked at. The smallest `turn` goes first."""

    what: RoundJob | tuple[Look, ...]
    turn: int = 0
    name: str = ""  # of the experiment, for people
    trained_one: Callable[[int, int], None] = field(default=lambda done, of: None)
    notice: Callable[[str], None] = field(default=lambda sentence: None)

    @property
    def net(self) -> Net:
        return self.what.net if isinstance(self.what, RoundJob) else self.what[0].net

    def answered_here(self) -> Reply:
        """In this process, by the engine `fused`."""
        started = time.perf_counter()
        if not isinstance(self.what, RoundJob):
            return Scored(Fused().score(self.what), time.perf_counter() - started)
        ends: dict[int, LocalEnd | Lost] = {}
        for client, end in Fused().train(self.what):
            ends[client] = end
            self.trained_one(len(ends), len(self.what.cohort))
        return Trained(ends, time.perf_counter() - started)


Player = Generator[Ask, Any, None]  # an experiment: yields what it wants next, and is sent the `Reply`


@dataclass
class Errand:
    """An ask on its way."""

    number: int
    ask: Ask
    luggage: RoundJob | tuple[Look, ...]  # what all its tasks refer to; nobody's memory is in it
    seconds: float = 0.0  # of work, by all processes together
    answers: dict[Key, Any] = field(default_factory=dict)
    to_come: int = 0
    unreadable: str | None = None

    @classmethod
    def of(cls, number: int, ask: Ask) -> Errand:
        what = ask.what
        return cls(number, ask, replace(what, memory={}, kept_buffers={}) if isinstance(what, RoundJob) else what)

    def stays_at_home(self) -> tuple[object, ...]:
        """What is the same in every round of the experiment, the data last."""
        what = self.luggage
        return (what.algorithm, what.net, what.data) if isinstance(what, RoundJob) else (what[0].net, what[0].data)

    def tasks(self) -> Iterator[tuple[Key, Rank, Task]]:
        """Models are looked at before anybody trains, so that rounds are written down early; long clients go first."""
        job = self.ask.what
        if isinstance(self.luggage, RoundJob):
            assert isinstance(job, RoundJob)
            for client in job.cohort:
                steps = job.work.steps(job.data.examples(client))
                yield client, (1, self.ask.turn, -steps), TrainClient.of(job, self.luggage, client)
            return
        for number, look in enumerate(self.luggage):
            for chunk in range(look.data.unseen_chunks(look.client)):
                yield (number, chunk), (0, self.ask.turn), ScoreChunk(self.luggage, number, chunk)

    def take(self, key: Key, answer: object, seconds: float) -> None:
        self.answers[key] = answer
        self.seconds += seconds
        if isinstance(self.ask.what, RoundJob):
            self.ask.trained_one(len(self.answers), len(self.ask.what.cohort))

    def reply(self, processes: int) -> Reply:
        seconds = self.seconds / processes
        if isinstance(self.ask.what, RoundJob):
            return Trained({client: self.answers[client] for client in self.ask.what.cohort}, seconds)
        scores = []
        for number, look in enumerate(self.ask.what):
            tallies: list[Tally] = [
                self.answers[number, chunk] for chunk in range(look.data.unseen_chunks(look.client))
            ]
            scores.append(total(tallies))
        return Scored(scores, seconds)
