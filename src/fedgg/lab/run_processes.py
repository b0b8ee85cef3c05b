"""Several runs at a time, each in a process of its own with one torch thread, or one process for each device.

When the parent is stopped, by Ctrl-C or SIGTERM, its workers write a checkpoint and end; when it is killed, they end at
once (child_process.py). When a worker ends, the parent sees its pipe close and gives the run to a new one, which
resumes it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fedgg.child_process import child_process
from fedgg.core.algorithm import Algorithm
from fedgg.engines.workers.pool import FILES_TO_START, allow_open_files
from fedgg.engines.workers.process import see_only
from fedgg.errors import UserError
from fedgg.lab.build import ModelGiven, build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.federated_data import DataGiven
from fedgg.lab.observer import Observer
from fedgg.lab.provenance import code_of
from fedgg.lab.run_places import PLACE, machine_name, record_place
from fedgg.lab.run_session import opened
from fedgg.lab.runner import name_of_part, run_rounds
from fedgg.lab.task_and_metrics import NAMED_OBJECTIVE, Objective
from fedgg.lab.trusted_code import inherit, trusted_here
from fedgg.older_python import add_note
from fedgg.runfolder.locks import InUse

ATTEMPTS = 3  # a run whose worker died this often is given up
SECONDS_TO_END = 60.0  # for a worker to write its checkpoint, before it is killed
MOST_TOGETHER = 24  # runs of one stack; more of them would wait for one device while others are idle


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
        with _pool(["cpu"] * min(processes, len(jobs)), "fedgg.lab.run_processes:run_one_by_one") as pool:
            return pool.work_off([[job] for job in jobs], observer)
    return run_one_by_one(jobs, observer)


def run_one_by_one(jobs: list[Job], observer: Observer) -> list[Job]:
    """In this process; those that another process is working on are returned."""
    in_use = []
    for job in jobs:
        try:
            _run_here(job, observer)
        except InUse:
            in_use.append(job)
    return in_use


def run_on_devices(jobs: list[Job], devices: Sequence[str], observer: Observer) -> list[Job]:
    """Run all with one process for each device; those that another process is working on are returned."""
    for job in jobs:
        _check_can_be_sent(job)
    stacks = stacks_of(jobs, len(devices))
    processes = list(devices[: len(stacks)])
    with _pool(processes, "fedgg.lab.parallel_runs:run_stack", PLACE | {"node": machine_name()}) as pool:
        return pool.work_off(stacks, observer)


def stacks_of(jobs: Sequence[Job], devices: int) -> list[list[Job]]:
    """Runs that one device trains together: those of one [engine] section, spread evenly over the devices.

    Without a GPU, or where an engine cannot train several runs together, each run is on its own.
    """
    by_engine: dict[str, list[Job]] = {}
    for job in jobs:
        by_engine.setdefault(f"{job.experiment.engine!r} {job.experiment.data.data_set!r}", []).append(job)
    stacks = []
    for some in by_engine.values():
        size = min(MOST_TOGETHER, -(-len(jobs) // max(1, devices))) if go_together(some[0]) else 1
        stacks += [some[start : start + size] for start in range(0, len(some), size)]
    return stacks


def go_together(job: Job) -> bool:
    """Whether the runs of a study that have this job's engine are trained in one process, as stacks."""
    engine = job.experiment.engine
    return (engine.devices[0] != "cpu" or engine.name == "stacked") and len(engine.devices) == 1


def _check_can_be_sent(job: Job) -> None:
    try:
        pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"{job.name}: an object from Python cannot be sent to another process ({error}): define it in a module "
            f"that can be imported, or run on one device"
        ) from error


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
    """One process for each device; `runner` (`module:function`) is what they call with a list of jobs."""

    def __init__(self, devices: Sequence[str], runner: str, place: dict[str, str] | None = None):
        self._context = multiprocessing.get_context("spawn")
        self._runner, self._place = runner, dict(PLACE) if place is None else place
        self.workers: dict[Connection, tuple[BaseProcess, str]] = dict(self._start(device) for device in devices)

    def _start(self, device: str) -> tuple[Connection, tuple[BaseProcess, str]]:
        allow_open_files(FILES_TO_START)
        ours, theirs = self._context.Pipe()
        settings = (self._runner, device, self._place, trusted_here())
        process = child_process(self._context, "fedgg.lab.run_processes:work", theirs, *settings)
        process.start()
        theirs.close()  # so that the worker's death closes the pipe
        return ours, (process, device)

    def work_off(self, stacks: list[list[Job]], observer: Observer) -> list[Job]:
        """Run all; jobs that another process is working on are returned."""
        in_use: list[Job] = []
        waiting = [(stack, 1) for stack in reversed(stacks)]
        at_work: dict[Connection, tuple[list[Job], int]] = {}
        idle = list(self.workers)
        while waiting or at_work:
            while idle and waiting:
                pipe, (stack, attempt) = self._alive(idle.pop()), waiting.pop()
                at_work[pipe] = (stack, attempt)
                with suppress(ConnectionError):  # a worker that died just now is noticed below
                    pipe.send(stack)
            for ready in wait(list(at_work)):
                assert isinstance(ready, Connection)
                stack, attempt = at_work[ready]
                try:
                    kind, what = ready.recv()
                except (EOFError, ConnectionError):
                    del at_work[ready]
                    if stack:
                        waiting.append((stack, _next_attempt(stack, attempt, observer)))
                    idle.append(self._replaced(ready))
                    continue
                if kind == "failed":
                    raise what
                if kind == "done":
                    in_use += [job for job in stack if job.folder in what]
                    del at_work[ready]
                    idle.append(ready)
                    continue
                getattr(observer, kind)(*what)
                if kind == "on_end":  # it need not be run again if the worker dies before the others have ended
                    at_work[ready] = ([job for job in stack if job.name != what[0]], attempt)
        return in_use

    def _alive(self, pipe: Connection) -> Connection:
        """The pipe of a worker that has not died while it was idle."""
        return pipe if self.workers[pipe][0].is_alive() else self._replaced(pipe)

    def _replaced(self, dead: Connection) -> Connection:
        _, device = self.workers.pop(dead)
        pipe, worker = self._start(device)
        self.workers[pipe] = worker
        return pipe

    def stop(self) -> None:
        for process, _ in self.workers.values():
            process.terminate()
        deadline = time.monotonic() + SECONDS_TO_END
        for pipe, (process, _) in self.workers.items():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            pipe.close()


@contextmanager
def _pool(devices: Sequence[str], runner: str, place: dict[str, str] | None = None) -> Iterator[_Pool]:
    pool = _Pool(devices, runner, place)
    try:
        yield pool
    finally:
        pool.stop()


def _next_attempt(stack: list[Job], attempt: int, observer: Observer) -> int:
    job = stack[0]
    if attempt >= ATTEMPTS:
        raise UserError(
            f"the process running {job.name} was killed {ATTEMPTS} times (out of memory?): "
            f"try --jobs 1; finished rounds are kept in {job.folder}"
        )
    observer.on_notice(job.name, "its process was killed; a new one resumes from the last checkpoint")
    return attempt + 1


def _stop(*_: object) -> None:
    """Once: the second SIGTERM, where a whole process group gets one, must not interrupt the last checkpoint."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def work(pipe: Connection, runner: str, device: str, place: dict[str, str], trusted: frozenset[str]) -> None:
    """The worker: one list of jobs after another until the pipe closes, or SIGTERM, which has the effect of Ctrl-C.

    It sees no other GPU than its own.
    """
    inherit(trusted)
    see_only(device)
    if place:
        record_place(**place | {"device": device})
    module, _, function = runner.partition(":")
    run = getattr(importlib.import_module(module), function)
    try:
        signal.signal(signal.SIGTERM, _stop)
        while True:
            jobs: list[Job] = pipe.recv()
            try:
                in_use = run(jobs, _Forwarding(pipe))
                pipe.send(("done", {job.folder for job in in_use}))
            except (BrokenPipeError, EOFError):
                return
            except Exception as error:
                if not isinstance(error, UserError):
                    names = ", ".join(job.name for job in jobs)
                    add_note(error, f"in the process that ran {names}:\n{traceback.format_exc()}")
                pipe.send(("failed", error))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return
