"""The driver of a study on Ray: runs, grouped into stacks, become tasks, and what these report goes to the observer.

Ray schedules the tasks. A task that ends without an answer, because its worker or its node has died, is submitted again
and continues from the last checkpoint. Tasks are not repeated by Ray itself (`max_retries=0`), since a run may have
ended meanwhile. Messages carry the task_number of their attempt; those of earlier attempts are ignored.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import fedgg
from fedgg.cluster.connect import (
    OwnNodeDied,
    RayAddress,
    Resources,
    amounts,
    check_can_run,
    check_own_node,
    connected,
    describe,
    shown,
    what_waits,
)
from fedgg.cluster.event_queue import EventQueue
from fedgg.cluster.memory_estimate import MemoryEstimates, with_memory
from fedgg.cluster.run_file_transfer import has_begun, read_files, write_files
from fedgg.cluster.task import DriverInfo, Outcome, RunsRequest, SharedParts, run_request, without_parts
from fedgg.errors import UserError
from fedgg.files import writing_to
from fedgg.lab.config import Experiment
from fedgg.lab.name_resolution import named_parts
from fedgg.lab.observer import Observer
from fedgg.lab.parallel_runs import run_until_ended
from fedgg.lab.run_processes import ATTEMPTS, Job, go_together, stacks_of
from fedgg.lab.store import Store
from fedgg.lab.trusted_code import HANDED_IN, code_at, trusted_here
from fedgg.registry import names_code
from fedgg.runfolder.locks import InUse, LockFile

TOKEN = ".ray-"  # begins the name of the file by which a node sees whether it has the study folder
POLL = 0.1  # seconds
ANSWER = 5.0  # seconds for the event queue to answer, before it is asked whether this machine's node is alive
LAST_MESSAGES = 20.0  # seconds to wait for messages that a finished task has sent
WAITING = 20.0  # seconds without a task that runs, before the user is told what the first one waits for
STOPPING = 5.0  # seconds for cancelled tasks to write their checkpoints


def run_on_ray(
    jobs: list[Job],
    observer: Observer,
    *,
    address: RayAddress,
    root: Path,
    at_once: int | None = None,
    resources: Resources | None = None,
) -> None:
    """Run what is missing in the jobs' folders, which lie below `root`; at most `at_once` at a time."""
    if not jobs:
        return
    local_cpus = at_once if not go_together(jobs[0]) else None
    with connected(address, local_cpus) as ray, _token(root) as token:
        observer.on_notice("", describe(ray))
        absolute = {job.folder: replace(job, folder=job.folder.absolute()) for job in jobs}
        driver = _Driver(
            ray,
            address,
            observer,
            driver_info_of(root, token, [job.experiment for job in jobs]),
            at_once,
            resources or Resources(),
        )
        try:
            run_until_ended(list(absolute.values()), observer, driver.run)
        except OwnNodeDied:
            raise  # nothing can be cancelled any more; the tasks end with their driver
        except BaseException:
            driver.stop()
            raise
        driver.stop()


def driver_info_of(root: Path, token: str, experiments: Sequence[Experiment]) -> DriverInfo:
    names = {name for experiment in experiments for name in named_parts(experiment).values() if names_code(name)}
    places = {name.rpartition(":")[0] for name in names if not name.startswith(f"{HANDED_IN}:")}
    code = {place: code_at(place).sha256 for place in places}
    versions = (fedgg.__version__, torch.__version__)
    return DriverInfo(root.absolute(), token, Path.cwd(), trusted_here(), code, *versions)


def task_options(experiment: Experiment, asked: Resources) -> dict[str, Any]:
    """The resources of a task: what was asked for, else the cores or the GPU that its engine uses.

    Memory that was not asked for is estimated (memory_estimate.py).
    """
    engine = experiment.engine
    cores = engine.workers or 1 if engine.name == "workers" else engine.threads_in_use
    on_gpu = engine.devices[0] != "cpu"
    if not on_gpu:
        cores *= len(engine.devices)
    options: dict[str, Any] = {
        "num_cpus": cores if asked.cpu is None else asked.cpu,
        "num_gpus": float(on_gpu and len(set(engine.devices))) if asked.gpu is None else asked.gpu,
        "max_retries": 0,
    }
    if asked.memory is not None:
        options["memory"] = asked.memory
    if asked.others:
        options["resources"] = dict(asked.others)
    return options


@contextmanager
def _token(root: Path) -> Iterator[str]:
    """A file in the study folder that this process has locked; those that killed processes have left are removed."""
    lock = LockFile(root / f"{TOKEN}{secrets.token_hex(8)}")
    with writing_to(root):
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(f"{TOKEN}*"):
            other = LockFile(left)
            if other.acquire(timeout=0):
                left.unlink(missing_ok=True)
                other.release()
        lock.acquire()
    try:
        yield lock.path.name
    finally:
        with suppress(OSError):
            lock.path.unlink()
        lock.release()


@dataclass
class _Submission:
    """One attempt at the runs of a stack."""

    stack: list[Job]
    attempt: int
    task_number: int
    files: Any = None  # in the object store, for nodes that do not see the study folder
    needs: Mapping[str, float] = field(default_factory=dict)
    place: Mapping[str, str] | None = None  # once it has begun
    messages: int = 0  # received
    progressed: bool = False  # whether a round was done
    ended: set[Path] = field(default_factory=set)
    in_use: set[Path] = field(default_factory=set)
    locks: ExitStack = field(default_factory=ExitStack)  # held for a node that does not see the folder

    @property
    def left(self) -> list[Job]:
        return [job for job in self.stack if job.folder not in self.ended | self.in_use]


class _Driver:
    def __init__(
        self,
        ray: ModuleType,
        address: RayAddress,
        observer: Observer,
        driver_info: DriverInfo,
        at_once: int | None,
        resources: Resources,
    ):
        self._ray, self._address, self._observer = ray, address, observer
        self._at_once, self._resources = at_once, resources
        self._driver_info = ray.put(driver_info)
        self._root = driver_info.root
        self._event_queue = self._new_event_queue()
        self._task_numbers = itertools.count(1)
        self._submissions: dict[Any, _Submission] = {}  # by the reference to the task's outcome
        self._estimates, self._notices = MemoryEstimates(), set[str]()
        self._shared: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def _new_event_queue(self) -> Any:
        return self._ray.remote(num_cpus=0)(EventQueue).remote()

    def run(self, jobs: list[Job]) -> list[Job]:
        """Run all but those that another process is working on, which are returned."""
        options = task_options(jobs[0].experiment, self._resources)
        check_can_run(self._ray, amounts(options), self._address.text)
        devices = 1
        if options.get("num_gpus"):
            devices = max(1, int(self._ray.cluster_resources().get("GPU", 0) / options["num_gpus"]))
        else:
            jobs = [job.under("fused", f"{len(jobs)} runs of a study on Ray") for job in jobs]
        waiting = deque(_Submission(stack, 1, 0) for stack in stacks_of(jobs, devices))
        in_use: list[Job] = []
        idle_since = time.monotonic()
        while waiting or self._submissions:
            while waiting and len(self._submissions) < (self._at_once or len(jobs)):
                self._submit(waiting.popleft())
            self._read_messages()
            done, _ = self._ray.wait(list(self._submissions), timeout=POLL)  # as soon as one has ended
            if done or any(submission.place for submission in self._submissions.values()):
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > WAITING:
                self._notice_once(what_waits(self._ray, next(iter(self._submissions.values())).needs))
            for reference in done:
                submission = self._submissions[reference]
                again = self._close(reference, submission)
                in_use += [job for job in submission.stack if job.folder in submission.in_use]
                waiting.extend(again)
        return in_use

    def _submit(self, submission: _Submission) -> None:
        submission.task_number = next(self._task_numbers)
        begun = any(has_begun(job.folder) for job in submission.stack)
        request = RunsRequest(
            submission.task_number, tuple(without_parts(job) for job in submission.stack), begun, submission.files
        )
        options = self._options(submission.stack)
        task = self._ray.remote(run_request).options(**options)
        shared, submission.needs = self._shared_parts(submission.stack[0]), amounts(options)
        self._submissions[task.remote(self._driver_info, request, self._event_queue, shared)] = submission
        for job in submission.stack:
            self._observer.on_phase(job.name, f"for {shown(submission.needs)} of the Ray cluster")

    def _options(self, stack: list[Job]) -> dict[str, Any]:
        options = task_options(stack[0].experiment, self._resources)
        if "memory" in options:
            return options
        options = with_memory(self._ray, options, self._estimates.of(stack[0], len(stack)), self._notice_once)
        if "memory" in options:
            self._notice_once(f"each task asks for {shown(amounts(options))} (memory as estimated)")
        return options

    def _notice_once(self, sentence: str) -> None:
        if sentence not in self._notices:
            self._notices.add(sentence)
            self._observer.on_notice("", sentence)

    def _shared_parts(self, job: Job) -> Any:
        given = job.given
        key = (id(given.model), id(given.data), id(given.objective))
        if key not in self._shared:
            self._shared[key] = (self._ray.put(SharedParts.of(given)), given)  # `given` keeps the ids unique
        return self._shared[key][0]

    # Messages ---------------------------------------------------------------------------------------------------------

    def _read_messages(self) -> None:
        by_task_number = {
            submission.task_number: (reference, submission) for reference, submission in self._submissions.items()
        }
        reference = self._event_queue.take.remote()
        while True:
            try:
                messages = self._ray.get(reference, timeout=ANSWER)
                break
            except self._ray.exceptions.GetTimeoutError:
                check_own_node(self._ray, self._address.text)
            except self._ray.exceptions.RayError:
                check_own_node(self._ray, self._address.text)
                self._replace_event_queue()
                return
        for task_number, events in messages:
            if task_number in by_task_number:
                reference, submission = by_task_number[task_number]
                submission.messages += 1
                for kind, what in events:
                    self._receive(reference, submission, kind, what)

    def _receive(self, reference: Any, submission: _Submission, kind: str, what: Any) -> None:
        if kind == "began":
            submission.place = what
        elif kind == "without folder":
            self._lock_for(reference, submission)
        elif kind == "files":
            number, files, names = what
            job = submission.stack[number]
            if job.folder not in submission.in_use:
                store = Store(job.folder)
                with store.writing():
                    write_files(job.folder, files, names)
        else:
            getattr(self._observer, kind)(*what)
            submission.progressed |= kind == "on_round"
            if kind == "on_end":
                submission.ended |= {job.folder for job in submission.stack if job.name == what[0]}

    def _lock_for(self, reference: Any, submission: _Submission) -> None:
        """The driver holds the locks of runs whose node does not see the study folder."""
        for job in submission.stack:
            try:
                submission.locks.enter_context(Store(job.folder).locked())
            except InUse:
                submission.in_use.add(job.folder)
        if submission.in_use:
            self._ray.cancel(reference, force=True)

    def _replace_event_queue(self) -> None:
        """The node of the event queue has died: tasks start again from their checkpoints, with a new one."""
        self._event_queue = self._new_event_queue()
        for reference in self._submissions:
            with suppress(Exception):
                self._ray.cancel(reference, force=True)

    # Ends -------------------------------------------------------------------------------------------------------------

    def _close(self, reference: Any, submission: _Submission) -> list[_Submission]:
        """What is still to be run of a task that has ended, in whatever way."""
        ray = self._ray
        try:
            outcome: Outcome = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise UserError(f"--on {self._address.text}: {in_one_line(error)}") from error
        except ray.exceptions.TaskUnschedulableError as error:
            raise UserError(f"--on {self._address.text}: {in_one_line(error)}") from error
        except ray.exceptions.RayError as error:
            self._read_messages()
            return self._again(reference, submission, error)
        self._wait_for_messages(submission, outcome.messages)
        del self._submissions[reference]
        submission.locks.close()
        if outcome.error is not None:
            raise outcome.error
        submission.in_use |= set(outcome.in_use)
        if outcome.needs_files:
            files = tuple(read_files(job.folder) for job in submission.stack)
            return [_Submission(submission.stack, submission.attempt, 0, files)]
        return []

    def _wait_for_messages(self, submission: _Submission, count: int) -> None:
        """Messages may arrive after the outcome of their task."""
        until = time.monotonic() + LAST_MESSAGES
        while submission.messages < count and time.monotonic() < until:
            self._read_messages()
            time.sleep(0.005)

    def _again(self, reference: Any, submission: _Submission, error: Exception) -> list[_Submission]:
        """Attempts count only if no round was done since the last one: nodes may die as often as they like."""
        del self._submissions[reference]
        submission.locks.close()
        if not submission.left:
            return []
        job, attempt = submission.left[0], submission.attempt
        if not isinstance(error, self._ray.exceptions.TaskCancelledError):
            where = f"on the node {shown_place(submission.place)} " if submission.place else ""
            self._observer.on_notice(job.name, f"its process {where}has died; it continues from its last checkpoint")
            attempt = 1 if submission.progressed else attempt + 1
            if attempt > ATTEMPTS:
                raise UserError(
                    f"the process running {job.name} has died {ATTEMPTS} times ({in_one_line(error)}): finished "
                    f"rounds are kept in {job.folder}"
                )
        return [_Submission(submission.left, attempt, 0)]

    def stop(self) -> None:
        """Cancel what is running; it writes a checkpoint if it can within a few seconds."""
        references = list(self._submissions)
        with suppress(Exception):
            for reference in references:
                self._ray.cancel(reference)
            if references:
                self._ray.wait(references, num_returns=len(references), timeout=STOPPING)
                self._read_messages()  # files of runs that were stopped
        with suppress(Exception):
            for reference in references:
                self._ray.cancel(reference, force=True)
            self._ray.kill(self._event_queue)
        for submission in self._submissions.values():
            submission.locks.close()
        self._submissions = {}


def shown_place(place: Mapping[str, str]) -> str:
    """The name of a machine; several nodes may be on one."""
    return f"{place['node']} ({place['ray_node']})"


def in_one_line(error: Exception) -> str:
    """The last line of what Ray says of a failure, which names it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
