"""Clients in parallel, each in a process with one torch thread: for CPUs.

One thread per process is faster than threads within an operator. The longest client goes first, so that cores are idle
for a short time only at the end of a round; clients of other experiments fill this time. Results are sorted before they
are used: they equal those of the engine `fused`, bit for bit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Literal

from fedgg.core.evaluation import Score
from fedgg.core.local import LocalEnd
from fedgg.core.model import Net
from fedgg.core.server import Lost
from fedgg.engines.base import Look, RoundJob
from fedgg.engines.workers.pool import Abandoned, CannotBeSent, Pool, StartMethod, Ticket
from fedgg.engines.workers.process import Unreadable
from fedgg.engines.workers.tasks import Key, OpenRequest, Reply, Request, RequestStream, Scored, Trained

LostClients = Literal["stop", "leave_out"]


class TooManyDeaths(Exception):
    """Several worker processes died on the same task; finished rounds are kept."""


class Workers:
    """On a CPU: the fused step in parallel processes.

    A context manager that ends its processes on exit. They start with the first task.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(
        self,
        workers: int | None = None,
        *,
        lost_clients: LostClients = "stop",
        notice: Callable[[str], None] = lambda sentence: None,
        start: StartMethod | None = None,
    ):
        self.size = workers or cores()
        self._lost_clients, self._notice = lost_clients, notice
        self._pool = Pool(["cpu"] * self.size, start)
        self._numbers = itertools.count()
        self._open_requests: dict[int, OpenRequest] = {}
        self._local_nets: dict[int, Net] = {}  # models that cannot be sent to other processes

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd | Lost]]:
        yielded = set[int]()
        open_request = self._submit(Request(job, notice=self._notice))
        while open_request is not None and open_request.open_tasks:
            _, client = self._next_result()
            if isinstance(client, int) and client in open_request.results:
                yielded.add(client)
                yield client, open_request.results[client]
        reply = self._finished(open_request) if open_request is not None else Request(job).run_here()
        assert isinstance(reply, Trained)
        yield from ((client, end) for client, end in reply.ends.items() if client not in yielded)

    def score(self, looks: Sequence[Look]) -> list[Score]:
        """Chunks are scored in any order and added up in their own, so that the bits equal those of one process."""
        if not looks:
            return []
        request = Request(tuple(looks), notice=self._notice)
        open_request = self._submit(request)
        while open_request is not None and open_request.open_tasks:
            self._next_result()
        reply = self._finished(open_request) if open_request is not None else request.run_here()
        assert isinstance(reply, Scored)
        return reply.scores

    def interleave(self, streams: Iterable[RequestStream]) -> None:
        """Runs several experiments: each continues as soon as its request is finished, while others' tasks run."""
        waiting: dict[int, RequestStream] = {}

        def resume(stream: RequestStream, reply: Reply | None) -> None:
            while True:
                try:
                    request = stream.send(reply)
                except StopIteration:
                    return
                open_request = self._submit(request)
                if open_request is not None:
                    waiting[open_request.number] = stream
                    return
                reply = request.run_here()

        for stream in streams:
            resume(stream, None)
        while waiting:
            open_request, _ = self._next_result()
            if not open_request.open_tasks:
                resume(waiting.pop(open_request.number), self._finished(open_request))

    def _submit(self, request: Request) -> OpenRequest | None:
        """Queues the request's tasks; None if the request cannot be sent to other processes."""
        if id(request.net) in self._local_nets:
            return None
        open_request = OpenRequest.of(next(self._numbers), request)
        try:
            needs = self._pool.share_all(open_request.constant_parts(), open_request.shared)
        except CannotBeSent as error:
            self._fall_back(request, str(error))
            return None
        self._open_requests[open_request.number] = open_request
        for key, rank, task in open_request.tasks():
            open_request.open_tasks += 1
            self._pool.submit(
                Ticket(rank, next(self._numbers), task, needs, (open_request.number, key), request.notice)
            )
        return open_request

    def _next_result(self) -> tuple[OpenRequest, Key]:
        ticket, outcome = self._pool.next_result()
        number, key = ticket.owner
        open_request = self._open_requests[number]
        open_request.open_tasks -= 1
        if isinstance(outcome, Unreadable):
            open_request.unreadable = outcome.reason
        elif not isinstance(outcome, Abandoned):
            open_request.add_result(key, outcome.result, outcome.seconds)
        elif self._lost_clients == "leave_out" and isinstance(key, int):
            open_request.add_result(key, Lost(key, outcome.reason), 0.0)
        else:
            name = open_request.request.name
            raise TooManyDeaths(f"{name}{', ' if name else ''}{ticket.task}: {outcome.reason}")
        return open_request, key

    def _finished(self, open_request: OpenRequest) -> Reply:
        """The reply; a request that other processes could not unpickle is run in this process."""
        del self._open_requests[open_request.number]
        self._pool.unshare(open_request.shared)
        if open_request.unreadable is None:
            return open_request.reply(self.size)
        self._fall_back(open_request.request, open_request.unreadable)
        return open_request.request.run_here()

    def _fall_back(self, request: Request, reason: str) -> None:
        self._local_nets[id(request.net)] = request.net
        request.notice(
            f"engine 'workers' fell back to 'fused': the experiment cannot be sent to other processes ({reason})"
        )


def cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
