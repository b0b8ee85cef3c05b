"""Several runs of a study at once: over one pool of workers, as one stack on a GPU, or in processes of their own.

Runs that cannot be stacked train one after another. Runs that can are taken as many at a time as fit into the memory of
the GPU.

Other processes may work on the same runs. A run that one of them has locked is left until all others are done, and then
waited for: it is found finished, or, if that process ended before, resumed here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import torch

from fedgg.core.tasks import Targets
from fedgg.data.dataset import Dataset
from fedgg.engines import Stacked
from fedgg.engines.base import Look, personal_job, with_personal_models
from fedgg.engines.gpu.stacked import room, stack_bytes
from fedgg.engines.workers.engine import TooManyDeaths
from fedgg.engines.workers.tasks import RequestStream
from fedgg.errors import UserError
from fedgg.lab.build import Federation, build
from fedgg.lab.config_sections import DataConfig
from fedgg.lab.engine_setup import arithmetic, chosen_device
from fedgg.lab.federated_data import load_data, targets_of
from fedgg.lab.observer import Observer
from fedgg.lab.one_round import Ends, next_job, synchronise
from fedgg.lab.run_processes import Job, go_together, run_jobs, run_on_devices, run_one_by_one
from fedgg.lab.run_session import Session, opened
from fedgg.lab.runner import FEWER_WORKERS, make_workers, requests_of, run_rounds
from fedgg.lab.store import Store
from fedgg.runfolder.locks import InUse, LockFile


def run_interleaved(jobs: list[Job], processes: int, observer: Observer) -> list[Job]:
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
    def data_set(data: DataConfig, targets: Targets) -> Dataset:
        """One copy, however many experiments train on it."""
        return load_data(data, jobs[0].data_folder, targets)

    with arithmetic(jobs[0].experiment), ExitStack() as folders:
        sessions: list[Session] = []
        in_use: list[Job] = []
        for job in jobs:
            run = opened(partial(_built, job, data_set), job.experiment, job.folder, observer, job.name)
            try:
                sessions.append(folders.enter_context(run))
            except InUse:
                in_use.append(job)
        try:
            with make_workers(first, processes) as workers:
                workers.interleave([_requests_to_end(session) for session in sessions])
        except TooManyDeaths as end:
            raise UserError(f"{end}: {FEWER_WORKERS}; finished rounds are kept, run the same command again") from end
    return in_use


def _built(job: Job, data_set: Callable[[DataConfig, Targets], Dataset]) -> Federation:
    data = data_set(job.experiment.data.data_set, targets_of(job.experiment))
    return build(job.experiment, data=data, engine_reason=job.engine_reason)


def _requests_to_end(session: Session) -> RequestStream:
    yield from requests_of(session)
    session.finish()


def run_together(jobs: list[Job], observer: Observer) -> list[Job]:
    """Like running the jobs one after another, with the same folders; all must ask for the same engine.

    Those that another process is working on are returned.
    """
    first = jobs[0].experiment
    for job in jobs:
        if job.experiment.engine != first.engine:
            raise UserError(f"{job.name}: runs that share a GPU need one [engine] section for all; run it on its own")

    @cache
    def data_set(data: DataConfig, targets: Targets) -> Dataset:
        """One copy on the device, however many experiments train on it."""
        return load_data(data, jobs[0].data_folder, targets).to(chosen_device(first))

    waiting, engine, in_use = deque(jobs), Stacked(first.engine.precision), list[Job]()
    with arithmetic(first):
        while waiting:
            with ExitStack() as folders:
                _in_step(_as_many_as_fit(waiting, data_set, folders, in_use, observer), engine)
    return in_use


def _as_many_as_fit(
    waiting: deque[Job],
    data_set: Callable[[DataConfig, Targets], Dataset],
    folders: ExitStack,
    in_use: list[Job],
    observer: Observer,
) -> list[Session]:
    """Open runs until the next one would not fit; those that cannot be stacked are played here, to their end.

    Those that another process is working on are added to `in_use`.
    """
    taken: list[Session] = []
    used, free = 0, None
    while waiting:
        job = waiting[0]
        with ExitStack() as resources:
            given = job.given
            data = given.data
            if data is None:
                data = data_set(job.experiment.data.data_set, targets_of(job.experiment))
            build_it = partial(
                build,
                job.experiment,
                data=data,
                model=given.model,
                algorithm=given.algorithm,
                objective=given.objective,
            )
            try:
                session = resources.enter_context(opened(build_it, job.experiment, job.folder, observer, job.name))
            except InUse:
                in_use.append(waiting.popleft())
                continue
            federation = session.federation
            if federation.engine != "stacked":
                run_rounds(session)
                session.finish()
                waiting.popleft()
                continue
            free = room(federation.net.start.device) if free is None else free
            needed = stack_bytes(federation.net, federation.work.batch, federation.cohort_size)
            if taken and used + needed > free:
                message = f"waiting: the GPU's memory holds {len(taken)} runs of this study at a time"
                observer.on_notice(job.name, message)
                return taken
            used += needed
            taken.append(session)
            folders.push(resources.pop_all())
            waiting.popleft()
    return taken


def _in_step(taken: list[Session], engine: Stacked) -> None:
    while running := [session for session in taken if not session.over]:
        started = time.perf_counter()
        jobs = [next_job(session.federation, session.state) for session in running]
        answers: list[Ends] = list(engine.train_together(jobs))
        with_models = [number for number, job in enumerate(jobs) if job.personal_model is not None]
        if with_models:
            models = engine.train_together([personal_job(jobs[number]) for number in with_models])
            for number, ends in zip(with_models, models, strict=True):
                answers[number] = with_personal_models(jobs[number], answers[number], ends)
        synchronise(jobs[0].w)
        share = (time.perf_counter() - started) / len(running)
        closed = [
            (session, session.aggregate(job, ends, share))
            for session, job, ends in zip(running, jobs, answers, strict=True)
        ]
        _write_down([(session, looks) for session, looks in closed if looks is not None], engine)
    for session in taken:
        session.finish()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write_down(closed: list[tuple[Session, tuple[Look, ...]]], engine: Stacked) -> None:
    """All models are looked at together; each run is charged its share of the time."""
    started = time.perf_counter()
    scores = deque(engine.score([look for _, looks in closed for look in looks]))
    share = (time.perf_counter() - started) / max(len(closed), 1)
    for session, looks in closed:
        session.write_down([scores.popleft() for _ in looks], share)


LOOK_EVERY = 0.5  # seconds between two looks at runs of other processes


def run_here(jobs: list[Job], observer: Observer) -> None:
    """The same for jobs that cannot be sent to another process; a run's own engine may still use several."""
    run_until_ended(jobs, observer, lambda some: run_stack(some, observer))


def run_stack(jobs: list[Job], observer: Observer) -> list[Job]:
    """In this process and on one device; jobs that another process is working on are returned."""
    return run_together(jobs, observer) if go_together(jobs[0]) else run_one_by_one(jobs, observer)


def run_all(jobs: list[Job], processes: int, observer: Observer, devices: Sequence[str] = ()) -> None:
    """Run what is missing in the jobs' folders; all ask for the same engine.

    `processes` counts on a CPU; with `devices` there is one process for each of them instead.
    """

    def run_some(some: list[Job]) -> list[Job]:
        engine = some[0].experiment.engine
        if devices:
            reason = f"{len(some)} runs of a study on {len(devices)} devices"
            return run_on_devices(
                [job.under("fused", reason) if engine.devices[0] == "cpu" else job for job in some], devices, observer
            )
        if len(engine.devices) > 1:  # each run takes all of them
            return run_one_by_one(some, observer)
        if go_together(some[0]):
            return run_together(some, observer)
        shared = engine.name == "auto" and 1 < len(some) < processes and _one_thread_each(some)
        if engine.name == "workers" or shared:
            reason = f"{len(some)} runs of a study share {processes} processes"
            return run_interleaved([job.under("workers", reason) for job in some], processes, observer)
        at_once = min(processes, len(some))
        reason = f"{len(some)} runs of a study, {'one after another' if at_once <= 1 else f'{at_once} at a time'}"
        return run_jobs([job.under("fused", reason) for job in some] if len(some) > 1 else some, processes, observer)

    run_until_ended(jobs, observer, run_some)


def _one_thread_each(jobs: list[Job]) -> bool:
    """As workers have."""
    return all(job.experiment.engine.threads == 1 for job in jobs)


def run_until_ended(jobs: list[Job], observer: Observer, run_some: Callable[[list[Job]], list[Job]]) -> None:
    """`run_some` returns those of its jobs that another process is working on."""
    by_folder = {job.folder: job for job in jobs}  # as they were given, not as an engine has changed them
    ready, waiting = list(by_folder), list[Path]()
    while ready or waiting:
        if ready:
            in_use = [job.folder for job in run_some([by_folder[folder] for folder in ready])]
            for folder in in_use:
                observer.on_phase(by_folder[folder].name, "for another process that is working on it")
                observer.on_notice(by_folder[folder].name, "another process is working on this run; waiting for it")
            waiting += in_use
        else:
            time.sleep(LOOK_EVERY)
        ready = [folder for folder in waiting if not LockFile(Store(folder).lock_file).is_held_elsewhere()]
        waiting = [folder for folder in waiting if folder not in ready]
