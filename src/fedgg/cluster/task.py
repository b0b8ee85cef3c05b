"""What a Ray task does on its node: one run, or several as a stack, in the study folder or in copies of run folders."""

from __future__ import annotations

import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

import fedgg
from fedgg.child_process import end_with
from fedgg.cluster.run_file_transfer import Files, RunFiles, folder_of_a_node
from fedgg.data.dataset import Dataset
from fedgg.errors import UserError
from fedgg.lab.engine_setup import chosen_device
from fedgg.lab.observer import Observer
from fedgg.lab.parallel_runs import run_stack
from fedgg.lab.run_places import machine_name, record_place
from fedgg.lab.run_processes import Given, Job
from fedgg.lab.task_and_metrics import NAMED_OBJECTIVE, Objective
from fedgg.lab.trusted_code import code_at, inherit
from fedgg.older_python import add_note
from fedgg.runfolder.locks import LockFile

SEND_EVENTS = 0.25  # seconds between two messages to the driver
CLIENTS = "on_client"


@dataclass(frozen=True)
class DriverInfo:
    """What a node has to know of the process that started the study."""

    root: Path  # the study folder
    token: str  # the name of a file in it that the driver has locked
    working_folder: Path
    trusted: frozenset[str]
    code: Mapping[str, str]  # SHA-256 of the files that experiments name
    fedgg: str
    torch: str


@dataclass(frozen=True)
class RunsRequest:
    """The runs of one task. Objects from Python come separately, through the object store."""

    task_number: int
    jobs: tuple[Job, ...]
    begun: bool  # whether one of them has files in the study folder
    files: tuple[Files, ...] | None = None  # of each run, for a node that does not see the folder


@dataclass(frozen=True)
class Outcome:
    messages: int  # that the task has sent
    in_use: tuple[Path, ...] = ()  # folders that another process is working on
    needs_files: bool = False
    error: Exception | None = None


def run_request(driver_info: DriverInfo, request: RunsRequest, event_queue: Any, shared: SharedParts) -> Outcome:
    """The function of the Ray task."""
    event_sender = EventSender(event_queue, request.task_number)

    def run() -> Outcome:
        jobs = [_with_parts(job, shared) for job in request.jobs]
        if sees_folder(driver_info):
            in_use = run_stack(jobs, event_sender.observer())
            return Outcome(event_sender.flush(), tuple(job.folder for job in in_use))
        if request.begun and request.files is None:
            return Outcome(event_sender.flush(), needs_files=True)
        event_sender.send("without folder", None)
        _run_without_folder(jobs, request, event_sender)
        return Outcome(event_sender.flush())

    return on_node(driver_info, event_sender, run)


def on_node(driver_info: DriverInfo, event_sender: EventSender, work: Callable[[], Outcome]) -> Outcome:
    """Do the work of a task in the folder, with the permissions and under the conditions of the driver.

    Errors are returned, since Ray's own wrapping would hide their kind.
    """
    end_with(os.getppid())  # Ray lets a busy worker outlive its raylet, and the run could not continue elsewhere
    try:
        with in_folder(driver_info.working_folder):
            place = place_of_worker()
            event_sender.send("began", place)
            if (sentence := check_node(driver_info, place)) is not None:
                event_sender.send("on_notice", ("", sentence))
            inherit(driver_info.trusted)
            record_place(**place)
            return work()
    except Exception as error:
        if isinstance(error, UserError):
            return Outcome(event_sender.flush(), error=UserError(f"{error} (on the node {machine_name()})"))
        add_note(error, f"on the node {machine_name()}:\n{traceback.format_exc()}")
        return Outcome(event_sender.flush(), error=error)
    finally:
        record_place()


def sees_folder(driver_info: DriverInfo) -> bool:
    """Whether the study folder is the driver's, and locks of one machine hold on the other."""
    with suppress(OSError, UserError):
        return LockFile(driver_info.root / driver_info.token).is_held_elsewhere()
    return False


def _run_without_folder(jobs: list[Job], request: RunsRequest, event_sender: EventSender) -> None:
    with folder_of_a_node() as folder:
        copies, carried = [], dict[str, tuple[int, RunFiles]]()
        for number, job in enumerate(jobs):
            copy = folder / str(number)
            carried[job.name] = (number, RunFiles(copy, request.files[number] if request.files else {}))
            copies.append(replace(job, folder=copy))
        run_stack(copies, event_sender.observer(carried))


def check_node(driver_info: DriverInfo, place: Mapping[str, str]) -> str | None:
    """UserError where this node cannot take part; a sentence where bits may differ."""
    if fedgg.__version__ != driver_info.fedgg:
        raise UserError(
            f"this node has fedgg {fedgg.__version__} and the study is run by {driver_info.fedgg}: install the same "
            f"version"
        )
    for name, sha256 in driver_info.code.items():
        if code_at(name).sha256 != sha256:
            raise UserError(f"{name} is another file on this node than on the machine of the study: copy it there")
    if torch.__version__ != driver_info.torch:
        return f"the node {place['node']} has torch {torch.__version__}, not {driver_info.torch}: bits may differ"
    return None


def place_of_worker() -> dict[str, str]:
    import ray

    context = ray.get_runtime_context()
    gpus = ", ".join(f"cuda:{number}" for number in context.get_accelerator_ids().get("GPU", []))
    return {"node": machine_name(), "ray_node": context.get_node_id()[:8], "device": gpus or "cpu"}


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Relative names of files mean the same as for the driver, where the node has its folder."""
    before = Path.cwd()
    with suppress(OSError):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class EventSender:
    """Messages to the driver, several events in one."""

    def __init__(self, event_queue: Any, task_number: int):
        self._event_queue, self._ticket = event_queue, task_number
        self._events: list[tuple[str, Any]] = []
        self._sent_at = 0.0
        self._messages = 0

    def send(self, kind: str, what: Any, *, at_once: bool = False) -> None:
        if kind == CLIENTS and self._events and self._events[-1][0] == CLIENTS and self._events[-1][1][0] == what[0]:
            self._events.pop()  # the latest number of clients is enough
        self._events.append((kind, what))
        if at_once or time.monotonic() - self._sent_at >= SEND_EVENTS:
            self.flush()

    def flush(self) -> int:
        """Send what is left; the number of messages so far."""
        if self._events:
            self._event_queue.put.remote(self._ticket, self._events)
            self._events = []
            self._messages += 1
            self._sent_at = time.monotonic()
        return self._messages

    def observer(self, carried: Mapping[str, tuple[int, RunFiles]] | None = None) -> Observer:
        return _Forwarding(self, carried or {})


class _Forwarding(Observer):
    """Sends every call to the driver, and before it the files of a run that the driver cannot read."""

    def __init__(self, event_sender: EventSender, carried: Mapping[str, tuple[int, RunFiles]]):
        def forward(method: str, *arguments: Any) -> None:
            if method in ("on_start", "on_round", "on_end") and arguments[0] in carried:
                number, run_files = carried[arguments[0]]
                changed = run_files.changed(at_once=method != "on_round")
                if changed is not None:
                    event_sender.send("files", (number, *changed), at_once=True)
            event_sender.send(method, arguments, at_once=method in ("on_start", "on_end"))

        for method in vars(Observer):
            if method.startswith("on_"):
                setattr(self, method, lambda *arguments, method=method: forward(method, *arguments))


# Objects from Python --------------------------------------------------------------------------------------------------

TENSORS = ("x_train", "y_train", "x_test", "y_test", "owners")


@dataclass(frozen=True)
class SharedParts:
    """Model, loss, metrics and data that all runs share: once in the object store, and mapped into memory on a node."""

    model: Any = None
    objective: Objective = NAMED_OBJECTIVE
    data: Any = None  # fields of a Dataset with arrays in place of tensors, or anything else
    is_dataset: bool = False
    fingerprint: str = ""

    @classmethod
    def of(cls, given: Given) -> SharedParts:
        data = given.data
        if not isinstance(data, Dataset):
            return cls(given.model, given.objective, data)
        values = {f.name: getattr(data, f.name) for f in fields(data) if f.init}
        values |= {name: values[name].cpu().numpy() for name in TENSORS if values[name] is not None}
        return cls(given.model, given.objective, values, True, data.fingerprint)

    def dataset(self, device: torch.device) -> Any:
        if not self.is_dataset:
            return self.data
        values = dict(self.data)
        for name in TENSORS:
            if values[name] is not None:
                values[name] = _tensor(values[name])
        dataset = Dataset(**values).to(device)
        vars(dataset)["fingerprint"] = self.fingerprint  # where the cached property keeps its value
        return dataset


def _tensor(array: Any) -> torch.Tensor:
    """Without a copy; the library does not write into data sets."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def without_parts(job: Job) -> Job:
    """The job as it is sent: its algorithm stays with it."""
    return replace(job, given=Given(algorithm=job.given.algorithm))


def _with_parts(job: Job, shared: SharedParts) -> Job:
    data = None if shared.data is None else shared.dataset(chosen_device(job.experiment))
    return replace(job, given=Given(shared.model, data, job.given.algorithm, shared.objective))
