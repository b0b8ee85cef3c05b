"""Clients in parallel, each in a process with one torch thread: for CPUs.

One thread a process beats threads within an operator. The longest client goes first, so that no core waits long for the
last one; with several experiments, one's clients fill the time in which another waits. Answers are put in order before
anybody looks at them: numbers are those of the engine `fused`, bit for bit.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from fedgg.core.evaluate import Score
from fedgg.core.local import LocalEnd
from fedgg.core.net import Net
from fedgg.core.server import Lost
from fedgg.engines.errands import Ask, Errand, Key, Player, Reply, Scored, Trained
from fedgg.engines.job import Look, RoundJob
from fedgg.engines.pool import GivenUp, Pool, StartMethod, Ticket
from fedgg.engines.worker import Unreadable

LostClients = Literal["stop", "leave_out"]


class GaveUp(Exception):
    """Processes died again and again on one task; what was finished before it stands."""


class Workers:
    """Use it as a context: its processes end with it. They start when there is work for them."""

    def __init__(
        self,
        size: int | None = None,
        *,
        lost_clients: LostClients = "stop",
        notice: Callable[[str], None] = lambda sentence: None,
        start: StartMethod | None = None,
    ):
        self.size = size or cores()
        self._lost_clients, self._notice = lost_clients, notice
        self._pool = Pool(self.size, start)
        self._numbers = itertools.count()
        self._under_way: dict[int, Errand] = {}
        self._stay_here: dict[int, Net] = {}  # models that cannot travel to other processes

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd | Lost]]:
        told = set[int]()
        errand = self._send_out(Ask(job, notice=self._notice))
        while errand is not None and errand.to_come:
            _, client = self._next_answer()
            if isinstance(client, int) and client in errand.answers:
                told.add(client)
                yield client, errand.answers[client]
        reply = self._closed(errand) if errand is not None else Ask(job).answered_here()
        assert isinstance(reply, Trained)
        yield from ((client, end) for client, end in reply.ends.items() if client not in told)

    def score(self, looks: Sequence[Look]) -> list[Score]:
        """The same bits as in one process: somebody scores each chunk, and all are added up in order."""
        if not looks:
            return []
        ask = Ask(tuple(looks), notice=self._notice)
        errand = self._send_out(ask)
        while errand is not None and errand.to_come:
            self._next_answer()
        reply = self._closed(errand) if errand is not None else ask.answered_here()
        assert isinstance(reply, Scored)
        return reply.scores

    def interleave(self, players: Iterable[Player]) -> None:
        """Every experiment goes on as soon as it has what it asked for; meanwhile the others' work fills the pool."""
        waiting: dict[int, Player] = {}

        def go_on(player: Player, reply: Reply | None) -> None:
            while True:
                try:
                    ask = player.send(reply)
                except StopIteration:
                    return
                errand = self._send_out(ask)
                if errand is not None:
                    waiting[errand.number] = player
                    return
                reply = ask.answered_here()

        for player in players:
            go_on(player, None)
        while waiting:
            errand, _ = self._next_answer()
            if not errand.to_come:
                go_on(waiting.pop(errand.number), self._closed(errand))

    def _send_out(self, ask: Ask) -> Errand | None:
        """Everything the ask needs, on its way; None if it cannot travel."""
        if id(ask.net) in self._stay_here:
            return None
        errand = Errand.of(next(self._numbers), ask)
        try:
            if multiprocessing.current_process().daemon:
                raise RuntimeError("this is itself a worker of a pool")
            home = [self._pool.lend(thing, shared=True) for thing in errand.stays_at_home()]
            needs = (*home, self._pool.lend(errand.luggage))
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            self._keep_here(ask, str(error))
            return None
        self._under_way[errand.number] = errand
        for key, rank, task in errand.tasks():
            errand.to_come += 1
            self._pool.ask(Ticket(rank, next(self._numbers), task, needs, (errand.number, key), ask.notice))
        return errand

    def _next_answer(self) -> tuple[Errand, Key]:
        ticket, answer = self._pool.answer()
        number, key = ticket.owner
        errand = self._under_way[number]
        errand.to_come -= 1
        if isinstance(answer, Unreadable):
            errand.unreadable = answer.why
        elif not isinstance(answer, GivenUp):
            errand.take(key, answer.result, answer.seconds)
        elif self._lost_clients == "leave_out" and isinstance(key, int):
            errand.take(key, Lost(key, answer.why), 0.0)
        else:
            raise GaveUp(f"{errand.ask.name}{', ' if errand.ask.name else ''}{ticket.task}: {answer.why}")
        return errand, key

    def _closed(self, errand: Errand) -> Reply:
        """The reply; what could not be read by other processes is done here."""
        del self._under_way[errand.number]
        self._pool.take_back(errand.luggage)
        if errand.unreadable is None:
            return errand.reply(self.size)
        self._keep_here(errand.ask, errand.unreadable)
        return errand.ask.answered_here()

    def _keep_here(self, ask: Ask, why: str) -> None:
        self._stay_here[id(ask.net)] = ask.net
        ask.notice(f"engine 'workers' fell back to 'fused': the experiment cannot be sent to other processes ({why})")


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
