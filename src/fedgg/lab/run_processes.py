"""Several runs at a time, each in a process of its own with one torch thread.

When the parent ends, by Ctrl-C or by kill -9, its workers end at once (child_process.py). When a worker ends, the
parent sees its pipe close and gives the run to a new one, which resumes it.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fedgg.child_process import child_process
from fedgg.core.algorithm import Algorithm
from fedgg.engines.workers.pool import FILES_TO_START, allow_open_files
from fedgg.errors import UserError
from fedgg.lab.build import ModelGiven, build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.federated_data import DataGiven
from fedgg.lab.observer import Observer
from fedgg.lab.provenance import code_of
from fedgg.lab.run_session import opened
from fedgg.lab.runner import name_of_part, run_rounds
from fedgg.lab.task_and_metrics import NAMED_OBJECTIVE, Objective
from fedgg.lab.trusted_code import inherit, trusted_here
from fedgg.runfolder.locks import InUse

ATTEMPTS = 3  # a run whose worker died this often is given up


@dataclass(frozen=True)
class Given:
    """Objects from Python in place of those an experiment names."""

    model: ModelGiven | None = None
    data: DataGiven | None = None
    algorithm: Algorithm | None = None
    objective: Objective = NAMED_OBJECTIVE

    @property
    def identity(self) -> str:
        """The content of the data, the name of the model, and names and code of loss and metrics, as text."""
        data, model = getattr(self.data, "fingerprint", ""), getattr(self.model, "__qualname__", type(self.model))
        parts = [part for part in (self.objective.loss, *(self.objective.metrics or ())) if part is not None]
        codes = [part if isinstance(part, str) else f"{name_of_part(part)} {code_of(part)}" for part in parts]
        return " ".join([f"{data} {model}", *codes])


@dataclass(frozen=True)
class Job:
    name: str
    experiment: Experiment
    folder: Path
    data_folder: Path | None
    given: Given = Given()
    engine_reason: str | None = None  # why a study chose the engine, where it did

    def under(self, engine: str, reason: str) -> Job:
        """The same run where `auto` may choose: on a CPU its engines have the same bits."""
        if self.experiment.engine.name != "auto":
            return self
        changed = self.experiment.changed({"engine.name": engine})
        return replace(self, experiment=changed, engine_reason=reason)


def run_jobs(jobs: list[Job], processes: int, observer: Observer) -> list[Job]:
    """Run all but those that another process is working on, which are returned.

    With one process everything stays in this one.
    """
    if processes > 1 and len(jobs) > 1:
        with _pool(min(processes, len(jobs))) as pool:
            return pool.work_off(jobs, observer)
    in_use = []
    for job in jobs:
        try:
            _run_here(job, observer)
        except InUse:
            in_use.append(job)
    return in_use


def _run_here(job: Job, observer: Observer) -> None:
    given = job.given
    build_it = partial(
        build,
        job.experiment,
        model=given.model,
        data=given.data,
        algorithm=given.algorithm,
        objective=given.objective,
        data_folder=job.data_folder,
        engine_reason=job.engine_reason,
    )
    with arithmetic(job.experiment), opened(build_it, job.experiment, job.folder, observer, job.name) as session:
        run_rounds(session)
        session.finish()


class _Forwarding(Observer):
    """Sends every call to the parent process, which repeats it."""

    def __init__(self, pipe: Connection):
        for method in vars(Observer):
            if method.startswith("on_"):
                setattr(self, method, lambda *arguments, method=method: pipe.send((method, arguments)))


class _Pool:
    def __init__(self, size: int):
        self._context = multiprocessing.get_context("spawn")
        self.workers: dict[Connection, BaseProcess] = dict(self._start() for _ in range(size))

    def _start(self) -> tuple[Connection, BaseProcess]:
        allow_open_files(FILES_TO_START)
        ours, theirs = self._context.Pipe()
        process = child_process(self._context, "fedgg.lab.run_processes:work", theirs, trusted_here())
        process.start()
        theirs.close()  # so that the worker's death closes the pipe
        return ours, process

    def work_off(self, jobs: list[Job], observer: Observer) -> list[Job]:
        """Run all; those that another process is working on are returned."""
        in_use: list[Job] = []
        waiting = [(job, 1) for job in reversed(jobs)]
        at_work: dict[Connection, tuple[Job, int]] = {}
        idle = list(self.workers)
        while waiting or at_work:
            while idle and waiting:
                pipe, (job, attempt) = idle.pop(), waiting.pop()
                at_work[pipe] = (job, attempt)
                with suppress(ConnectionError):  # a worker that died while idle is noticed below
                    pipe.send(job)
            for ready in wait(list(at_work)):
                assert isinstance(ready, Connection)
                job, attempt = at_work[ready]
                try:
                    kind, what = ready.recv()
                except (EOFError, ConnectionError):
                    del at_work[ready], self.workers[ready]
                    waiting.append((job, _next_attempt(job, attempt, observer)))
                    pipe, process = self._start()
                    self.workers[pipe] = process
                    idle.append(pipe)
                    continue
                if kind == "failed":
                    raise what
                if kind == "in use":
                    in_use.append(job)
                else:
                    getattr(observer, kind)(*what)
                if kind in ("on_end", "in use"):
                    del at_work[ready]
                    idle.append(ready)
        return in_use

    def stop(self) -> None:
        for pipe, process in self.workers.items():
            pipe.close()
            process.terminate()
        for process in self.workers.values():
            process.join()


@contextmanager
def _pool(size: int) -> Iterator[_Pool]:
    pool = _Pool(size)
    try:
        yield pool
    finally:
        pool.stop()


def _next_attempt(job: Job, attempt: int, observer: Observer) -> int:
    if attempt >= ATTEMPTS:
        raise UserError(
            f"the process running {job.name} was killed {ATTEMPTS} times (out of memory?): "
            f"try --jobs 1; finished rounds are kept in {job.folder}"
        )
    observer.on_notice(job.name, "its process was killed; a new one resumes from the last checkpoint")
    return attempt + 1


def work(pipe: Connection, trusted: frozenset[str]) -> None:
    """The worker: one job after another until the pipe closes."""
    inherit(trusted)
    try:
        while True:
            job = pipe.recv()
            try:
                _run_here(job, _Forwarding(pipe))
            except InUse:
                pipe.send(("in use", None))
            except (BrokenPipeError, EOFError):
                return
            except Exception as error:
                if not isinstance(error, UserError):
                    error.add_note(f"in the process that ran {job.name}:\n{traceback.format_exc()}")
                pipe.send(("failed", error))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
