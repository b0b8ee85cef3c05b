"""The schedules of the next round, made while the GPU is busy with this one.

Which clients train in the next round is not known yet, but schedules are a function of (seed, round, client): those of
the same clients are prefetched, and used if these clients train again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fedgg.core.plan import Work
from fedgg.engines.base import ClientData, RoundJob

JobClient = tuple[RoundJob, int]  # a job and one of its clients
Key = tuple[int, Work, int, int, int]


class Prefetch:
    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._made: dict[Key, tuple[ClientData, Future[Any]]] = {}  # data are held, so that their ids stay unique

    def agendas(self, job_clients: Sequence[JobClient]) -> list[Any]:
        """One for each of these clients, made before or made now."""
        return [self._agenda(job, client) for job, client in job_clients]

    def prepare(self, job_clients: Sequence[JobClient]) -> None:
        """Begin with the agendas of the same clients' next round."""
        self._threads = self._threads or ThreadPoolExecutor(2, "fedgg-schedules")
        oldest = min(job.round for job, _ in job_clients)
        self._made = {key: made for key, made in self._made.items() if key[3] >= oldest}  # drop what was not used
        for job, client in job_clients:
            future = self._threads.submit(job.data.agenda, job.seed, job.round + 1, client, job.work)
            self._made[_key(job, client, 1)] = (job.data, future)

    def _agenda(self, job: RoundJob, client: int) -> Any:
        made = self._made.pop(_key(job, client, 0), None)
        return job.data.agenda(job.seed, job.round, client, job.work) if made is None else made[1].result()


def _key(job: RoundJob, client: int, later: int) -> Key:
    return id(job.data), job.work, job.seed, job.round + later, client
