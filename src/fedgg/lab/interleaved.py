"""Several runs over one pool of workers, client by client: while one waits for its longest, others' clients run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial

from fedgg.data.dataset import Dataset
from fedgg.data.sources import load
from fedgg.engines.workers.engine import TooManyDeaths
from fedgg.engines.workers.requests import RequestStream
from fedgg.errors import UserError
from fedgg.lab.arithmetic import arithmetic
from fedgg.lab.build import Federation, build
from fedgg.lab.jobs import Job, Tell
from fedgg.lab.locks import InUse
from fedgg.lab.players import REMEDY, hired, play
from fedgg.lab.runner import Session, Watcher, opened


def run_interleaved(jobs: list[Job], processes: int, tell: Tell) -> list[Job]:
    """Like running the jobs one after another, with the same folders and the same bits.

    Those that another process is working on are returned.
    """
    first = jobs[0].experiment.engine
    for job in jobs:
        engine = job.experiment.engine
        if (engine.name, engine.workers, engine.lost_clients) != (first.name, first.workers, first.lost_clients):
            raise UserError(
                f"{job.name}: engine 'workers' is one pool for all: engine.name, engine.workers and "
                f"engine.lost_clients must be the same in every run"
            )

    @cache
    def data_set(source: str) -> Dataset:
        """One copy, however many experiments train on it."""
        return load(source, jobs[0].data_folder)

    with arithmetic(jobs[0].experiment), ExitStack() as folders:
        sessions: list[tuple[Job, Session]] = []
        in_use: list[Job] = []
        for job in jobs:
            run = opened(partial(_built, job, data_set), job.experiment, job.folder, _watcher(job, tell))
            try:
                sessions.append((job, folders.enter_context(run)))
            except InUse:
                in_use.append(job)
        try:
            with hired(first, processes) as workers:
                workers.interleave([_played(job, session, tell) for job, session in sessions])
        except TooManyDeaths as end:
            raise UserError(f"{end}: {REMEDY}; finished rounds are kept, call the same command again") from end
    return in_use


def _built(job: Job, data_set: Callable[[str], Dataset]) -> Federation:
    return build(job.experiment, data=data_set(job.experiment.data.source), engine_reason=job.engine_reason)


def _played(job: Job, session: Session, tell: Tell) -> RequestStream:
    yield from play(session, name=job.name)
    tell(job, "ended", session.finish().summary)


def _watcher(job: Job, tell: Tell) -> Watcher:
    return Watcher(
        started=lambda done, of: tell(job, "started", (done, of)),
        client=lambda done, of: tell(job, "client", (done, of)),
        round=partial(tell, job, "round"),
        notice=partial(tell, job, "notice"),
    )
