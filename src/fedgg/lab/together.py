"""Several runs in one process, round by round, so that an engine can train all their clients as one program.

Runs that cannot be stacked train one after another. Runs that can are taken as many at a time as fit into the memory of
the GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial

import torch

from fedgg.data.dataset import Dataset
from fedgg.data.sources import load
from fedgg.engines import Stacked
from fedgg.engines.base import Look
from fedgg.engines.gpu.stacked import room, stack_bytes
from fedgg.errors import UserError
from fedgg.lab.arithmetic import arithmetic
from fedgg.lab.build import build, chosen_device
from fedgg.lab.jobs import Job, Tell
from fedgg.lab.locks import InUse
from fedgg.lab.runner import Session, Watcher, opened, play
from fedgg.lab.state import synchronise


def run_together(jobs: list[Job], tell: Tell) -> list[Job]:
    """Like running the jobs one after another, with the same folders; all must ask for the same engine.

    Those that another process is working on are returned.
    """
    first = jobs[0].experiment
    for job in jobs:
        if job.experiment.engine != first.engine:
            raise UserError(f"{job.name}: runs that share a GPU need one [engine] section for all; run it on its own")

    @cache
    def data_set(source: str) -> Dataset:
        """One copy on the device, however many experiments train on it."""
        return load(source, jobs[0].data_folder).to(chosen_device(first))

    waiting, engine, in_use = deque(jobs), Stacked(first.engine.precision), list[Job]()
    with arithmetic(first):
        while waiting:
            with ExitStack() as folders:
                _in_step(_as_many_as_fit(waiting, data_set, folders, in_use, tell), engine, tell)
    return in_use


def _as_many_as_fit(
    waiting: deque[Job], data_set: Callable[[str], Dataset], folders: ExitStack, in_use: list[Job], tell: Tell
) -> list[tuple[Job, Session]]:
    """Open runs until the next one would not fit; those that cannot be stacked are played here, to their end.

    Those that another process is working on are added to `in_use`.
    """
    taken: list[tuple[Job, Session]] = []
    used, free = 0, None
    while waiting:
        job = waiting[0]
        with ExitStack() as own:
            given = job.given
            data = data_set(job.experiment.data.source) if given.data is None else given.data
            build_it = partial(build, job.experiment, data=data, model=given.model, algorithm=given.algorithm)
            try:
                session = own.enter_context(opened(build_it, job.experiment, job.folder, _watcher(job, tell)))
            except InUse:
                in_use.append(waiting.popleft())
                continue
            federation = session.federation
            if federation.engine != "stacked":
                play(session)
                tell(job, "ended", session.finish().summary)
                waiting.popleft()
                continue
            free = room(federation.net.start.device) if free is None else free
            needed = stack_bytes(federation.net, federation.work, federation.cohort_size)
            if taken and used + needed > free:
                tell(job, "notice", f"the GPU's memory holds {len(taken)} runs of this sweep at a time: it waits")
                return taken
            used += needed
            taken.append((job, session))
            folders.push(own.pop_all())
            waiting.popleft()
    return taken


def _in_step(taken: list[tuple[Job, Session]], engine: Stacked, tell: Tell) -> None:
    while running := [session for _, session in taken if not session.over]:
        started = time.perf_counter()
        asked = [session.next_job() for session in running]
        answers = engine.train_together(asked)
        synchronise(asked[0].w)
        share = (time.perf_counter() - started) / len(running)
        closed = [
            (session, session.aggregate(job, ends, share))
            for session, job, ends in zip(running, asked, answers, strict=True)
        ]
        _write_down([(session, looks) for session, looks in closed if looks is not None], engine)
    for job, session in taken:
        tell(job, "ended", session.finish().summary)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write_down(closed: list[tuple[Session, tuple[Look, ...]]], engine: Stacked) -> None:
    """All models are looked at together; each run is charged its share of the time."""
    started = time.perf_counter()
    scores = deque(engine.score([look for _, looks in closed for look in looks]))
    share = (time.perf_counter() - started) / max(len(closed), 1)
    for session, looks in closed:
        session.write_down([scores.popleft() for _ in looks], share)


def _watcher(job: Job, tell: Tell) -> Watcher:
    return Watcher(
        started=lambda done, of: tell(job, "started", (done, of)),
        round=partial(tell, job, "round"),
        notice=partial(tell, job, "notice"),
    )
