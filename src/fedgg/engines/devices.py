"""The clients of a round spread over several devices, one process for each.

Each process has an engine of its own, that of a run on its device alone, and keeps a copy of the data and of the model
there. It receives the global model and the state of its clients in every round, and sends back what they end with.
Clients are dealt out before the round: the longest first, each to the device with the fewest steps so far, so that a
round does not depend on which process is faster. The server works on the first device: it aggregates in the order of
the cohort, and scores.

A client trains as it would alone. Where the engine of a process trains its clients as one stack, the number of devices
changes the size of the stack, and with it the rounding.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, cast

import torch

from fedgg.core.evaluation import Score
from fedgg.core.local import LocalEnd
from fedgg.core.model import Net
from fedgg.core.server import Lost
from fedgg.core.tensor_rows import Rows
from fedgg.engines.base import Engine, Look, RoundJob
from fedgg.engines.fused.engine import Fused
from fedgg.engines.workers.engine import LostClients, TooManyDeaths
from fedgg.engines.workers.pool import Abandoned, CannotBeSent, Pool, TaskResult, Ticket
from fedgg.engines.workers.process import Unreadable

ClientEnds = list[tuple[int, LocalEnd | Lost]]
EngineOfDevice = Callable[[], Engine]  # what makes the engine of a process; pickled


class ProcessPool(Protocol):
    """Processes that do tasks, and keep objects that tasks refer to: see `Pool`."""

    def share_all(self, constant: Sequence[object], shared: object) -> tuple[int, ...]: ...
    def unshare(self, value: object) -> None: ...
    def submit(self, ticket: Ticket) -> None: ...
    def next_result(self) -> tuple[Ticket, TaskResult]: ...
    def close(self) -> None: ...


class Devices:
    """Clients spread over several devices, each in a process with an engine of its own.

    A context manager that ends its processes on exit. They start with the first round.
    """

    def __init__(
        self,
        device: str,
        each: EngineOfDevice = Fused,
        *,
        lost_clients: LostClients = "stop",
        notice: Callable[[str], None] = lambda sentence: None,
        pool: ProcessPool | None = None,
    ):
        """`device`: one for each process, with commas; two processes may have the same GPU.

        `pool`: of as many processes, where they are not children of this one.
        """
        self.devices = tuple(device.split(","))
        self._each, self._here = _EngineOfProcess(each), each()
        self._lost_clients, self.notice = lost_clients, notice
        self._pool: ProcessPool = pool or Pool(self.devices, instead="name one device in engine.device")
        self._numbers = itertools.count()
        self._sent_nets: dict[int, tuple[Net, Net]] = {}
        self._local_nets: dict[int, Net] = {}  # models that cannot be sent to other processes

    def __enter__(self) -> Devices:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd | Lost]]:
        missing = dict.fromkeys(job.cohort)
        if id(job.net) not in self._local_nets:
            for client, end in self._train_elsewhere(job):
                del missing[client]
                yield client, end
        if missing:
            yield from self._here.train(replace(job, cohort=list(missing)))

    def score(self, looks: Sequence[Look]) -> list[Score]:
        return self._here.score(looks)

    def _train_elsewhere(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd | Lost]]:
        """Yields share by share, as they are finished, and nothing where the job cannot be sent."""
        shared = replace(job, net=self._net_to_send(job.net), cohort=[], memory={}, kept_buffers={})
        constant = (self._each, shared.algorithm, shared.net, shared.data)
        try:
            needs = self._pool.share_all(constant, shared)
        except CannotBeSent as error:
            self._train_here_from_now_on(job, str(error))
            return
        shares = [share for share in dealt(job, len(self.devices)) if share]
        for place, clients in enumerate(shares):
            task = TrainShare.of(self._each, job, shared, clients)
            ticket = Ticket((0,), next(self._numbers), task, needs, clients, self.notice, place)
            self._pool.submit(ticket)
        unreadable = ""
        for _ in shares:
            with torch.cuda.device(job.w.device) if job.w.is_cuda else nullcontext():  # where the ends arrive
                ticket, outcome = self._pool.next_result()
            if isinstance(outcome, Unreadable):
                unreadable = outcome.reason
            elif not isinstance(outcome, Abandoned):
                yield from cast("ClientEnds", outcome.result)
            elif self._lost_clients == "leave_out":
                yield from ((client, Lost(client, outcome.reason)) for client in ticket.owner)
            else:
                raise TooManyDeaths(f"{ticket.task}: {outcome.reason}")
        self._pool.unshare(shared)
        if unreadable:
            self._train_here_from_now_on(job, unreadable)

    def _net_to_send(self, net: Net) -> Net:
        """Without what engines have found out about it that holds for one process, such as programs of kernels."""
        if id(net) not in self._sent_nets:
            twin = copy.copy(net)
            twin.facts = {key: fact for key, fact in net.facts.items() if isinstance(fact, bool | tuple)}
            self._sent_nets[id(net)] = (net, twin)  # a reference to the net keeps its id unique
        return self._sent_nets[id(net)][1]

    def _train_here_from_now_on(self, job: RoundJob, reason: str) -> None:
        self._local_nets[id(job.net)] = job.net
        self.notice(
            f"engine 'devices' trains on {self.devices[0]} alone: the experiment cannot be sent to other processes "
            f"({reason})"
        )


def dealt(job: RoundJob, devices: int) -> list[list[int]]:
    """The clients of each device, in the order of the cohort."""
    steps = {c: job.work.steps(job.data.examples(c), job.seed, job.round, c) for c in job.cohort}
    total, owner = [0] * devices, dict[int, int]()
    for client in sorted(job.cohort, key=lambda client: -steps[client]):
        owner[client] = total.index(min(total))
        total[owner[client]] += steps[client]
    return [[client for client in job.cohort if owner[client] == place] for place in range(devices)]


@dataclass(frozen=True, eq=False)
class _EngineOfProcess:
    """Sent once to each process, which makes the engine when it is first needed, and keeps it."""

    make: EngineOfDevice

    @cached_property
    def engine(self) -> Engine:
        return self.make()


@dataclass(frozen=True)
class TrainShare:
    """Trains some clients of a round. `job` is without clients and their state; that of these is part of the task."""

    each: _EngineOfProcess
    job: RoundJob
    clients: list[int]
    memory: dict[int, Rows]
    kept_buffers: dict[int, Rows]
    threads: int

    @classmethod
    def of(cls, each: _EngineOfProcess, job: RoundJob, shared: RoundJob, clients: list[int]) -> TrainShare:
        memory, kept = ({c: rows[c] for c in clients if c in rows} for rows in (job.memory, job.kept_buffers))
        return cls(each, shared, clients, memory, kept, torch.get_num_threads())

    def do(self) -> ClientEnds:
        if self.threads != torch.get_num_threads():
            torch.set_num_threads(self.threads)
        job = replace(self.job, cohort=self.clients, memory=self.memory, kept_buffers=self.kept_buffers)
        return list(self.each.engine.train(job))

    def __str__(self) -> str:
        return f"clients {', '.join(map(str, self.clients))} of round {self.job.round + 1}"
