"""Several runs in one process, round by round, so that an engine can train all their clients as one program."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

from fedgg.data.sources import load
from fedgg.engines import Stacked
from fedgg.errors import UserError
from fedgg.lab.build import build, chosen_device
from fedgg.lab.jobs import Job, Tell
from fedgg.lab.runner import Session, Watcher, arithmetic, opened
from fedgg.lab.state import synchronise


def run_together(jobs: list[Job], tell: Tell) -> None:
    """Like running the jobs one after another, with the same folders; all must name the same data set and device."""
    first = jobs[0].experiment
    for job in jobs:
        if (job.experiment.data.source, job.experiment.engine) != (first.data.source, first.engine):
            raise UserError(
                f"{job.name}: engine 'stacked' needs one data set and one engine for all; take engine 'loop'"
            )
    engine = Stacked()
    dataset = load(first.data.source, jobs[0].data_folder).to(chosen_device(first))
    with arithmetic(first), ExitStack() as folders:
        sessions: dict[str, Session] = {}
        for job in jobs:
            watcher = Watcher(
                started=partial(_started, tell, job),
                round=partial(tell, job, "round"),
                notice=partial(tell, job, "notice"),
            )
            build_it = partial(build, job.experiment, data=dataset)
            sessions[job.name] = folders.enter_context(opened(build_it, job.experiment, job.folder, watcher))
        while running := [session for session in sessions.values() if not session.over]:
            started = time.perf_counter()
            asked = [session.next_job() for session in running]
            answers = engine.train_together(asked)
            synchronise(asked[0].w)
            share = (time.perf_counter() - started) / len(running)
            for session, job_, ends in zip(running, asked, answers, strict=True):
                session.close_round(job_, ends, share)
        for job in jobs:
            tell(job, "ended", sessions[job.name].finish().summary)


def _started(tell: Tell, job: Job, done: int, of: int) -> None:
    tell(job, "started", (done, of))
