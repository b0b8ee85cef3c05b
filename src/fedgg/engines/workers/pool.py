"""A pool of worker processes, each on a device: assigns tasks, and repeats a task whose worker died.

Workers are started by a fork server if the platform has one: it imports torch once, in a process without threads, and
each worker is a fork of it, which starts quickly and shares its memory. Forking this process would copy locks that its
threads may hold; spawning imports torch again for each worker. Both can be chosen (`start`). Workers on GPUs are
spawned: CUDA must not have been in use before a fork.
"""

from __future__ import annotations

import heapq
import itertools
import multiprocessing
import pickle
import signal
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from fedgg.child_process import child_process, fork_server_modules
from fedgg.engines.workers.process import Done, PackedObject, TorchSettings, Unreadable, pack, receive, send, unpack
from fedgg.engines.workers.tasks import WorkerTask
from fedgg.errors import UserError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

StartMethod = Literal["forkserver", "spawn", "fork"]
FILES_TO_START = 12  # files open at the same time while a process is started
OPEN_FILES = Path("/dev/fd")
INSTEAD = "set engine.name = 'fused'"
DEATHS = 3  # after this many dead processes a task is abandoned


@dataclass(frozen=True)
class Abandoned:
    """The result of a task on which too many processes died."""

    reason: str


TaskResult = Done | Unreadable | Abandoned


@dataclass(order=True)
class Ticket:
    """A task in the queue; the one with the smallest rank goes first."""

    rank: tuple[int, ...]
    number: int
    task: WorkerTask = field(compare=False)
    needs: tuple[int, ...] = field(compare=False)  # numbers of shared objects, in the order to be sent
    owner: Any = field(compare=False)
    notice: Callable[[str], None] = field(compare=False)
    place: int | None = field(default=None, compare=False)  # of the worker that has to do it; None: any
    deaths: int = field(default=0, compare=False)


@dataclass
class _Worker:
    place: int
    process: BaseProcess
    ready: bool = False
    ticket: Ticket | None = None
    holds: set[int] = field(default_factory=set)  # numbers of the shared objects it has received


@dataclass
class _SharedObject:
    packed: PackedObject
    value: Any  # a weak reference to the object, or the object itself where it cannot have one


class CannotBeSent(Exception):
    """An object that pickle cannot send to another process, or a process that may not have others."""


class Pool:
    def __init__(self, devices: Sequence[str], start: StartMethod | None = None, instead: str = INSTEAD):
        """One worker for each device. `instead`: what the user can do where processes cannot be started."""
        self._devices, self._instead = tuple(devices), instead
        methods = multiprocessing.get_all_start_methods()
        on_cpu = "forkserver" in methods and set(devices) <= {"cpu"}
        method = start or ("forkserver" if on_cpu else "spawn")
        self._context: Any = multiprocessing.get_context(method)
        self._forks = method == "fork"
        if method == "forkserver":
            self._context.set_forkserver_preload(fork_server_modules("fedgg.engines.workers.process"))
        self._workers: dict[Connection, _Worker] = {}
        self._queues: defaultdict[int | None, list[Ticket]] = defaultdict(list)  # by place; None: for any worker
        self._numbers = itertools.count()
        self._shared: dict[int, _SharedObject] = {}
        self._shared_numbers: dict[int, int] = {}  # by the object's id
        self._unused: deque[int] = deque()  # numbers of objects that this process has freed
        self._failed_starts = 0

    def share_all(self, constant: Sequence[object], shared: object) -> tuple[int, ...]:
        """What the tasks of a round refer to, as numbers for their tickets: constant parts, and what changes."""
        self._remove_unused()
        try:
            if multiprocessing.current_process().daemon:
                raise RuntimeError("this process is itself a worker")
            return (*(self._share(part, mapped=True) for part in constant), self._share(shared))
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            raise CannotBeSent(str(error)) from error

    def _share(self, value: Any, *, mapped: bool = False) -> int:
        """Packs an object once for all workers and returns its number; it is removed when this process frees it."""
        if id(value) not in self._shared_numbers:
            number = next(self._numbers)
            packed = pack(value, self._shared_numbers, shared=mapped)
            self._shared[number] = _SharedObject(packed, self._reference(value, number))
            self._shared_numbers[id(value)] = number
        return self._shared_numbers[id(value)]

    def _reference(self, value: Any, number: int) -> Any:
        """Weak, where the object allows it. Its workers are told later: it may be freed while a message is sent."""
        numbers, unused, key = self._shared_numbers, self._unused, id(value)

        def freed(_: object) -> None:
            if numbers.get(key) == number:
                del numbers[key]
                unused.append(number)

        try:
            return weakref.ref(value, freed)
        except TypeError:
            return value

    def unshare(self, value: Any) -> None:
        """Removes a shared object that no task needs any more, in the workers too."""
        self._remove(self._shared_numbers.pop(id(value)))

    def _remove_unused(self) -> None:
        while self._unused:
            self._remove(self._unused.popleft())

    def _remove(self, number: int) -> None:
        self._shared.pop(number).packed.close()
        for pipe, worker in self._workers.items():
            if number in worker.holds:
                worker.holds.remove(number)
                with suppress(OSError):  # a dead worker is detected in `next_result`
                    send(pipe, ("unshare", number))

    def submit(self, ticket: Ticket) -> None:
        heapq.heappush(self._queues[ticket.place], ticket)

    def next_result(self) -> tuple[Ticket, TaskResult]:
        """The next finished task and its result; an exception in a task is raised here."""
        while True:
            self._assign_tasks()
            for pipe in wait(list(self._workers)):
                assert isinstance(pipe, Connection)
                try:
                    (kind,), packed = receive(pipe)
                except EOFError:
                    if (abandoned := self._on_death(pipe)) is not None:
                        return abandoned
                    continue
                worker = self._workers[pipe]
                if packed is None:
                    worker.ready, self._failed_starts = True, 0
                    continue
                result, ticket = unpack(packed), worker.ticket
                worker.ticket = None
                assert ticket is not None
                if kind == "failed":
                    raise result
                return ticket, result

    def _assign_tasks(self) -> None:
        self._remove_unused()
        for pipe, worker in self._workers.items():
            queue = self._queues[worker.place] or self._queues[None]
            if queue and worker.ready and worker.ticket is None:
                self._send_task(pipe, heapq.heappop(queue))
        taken = {worker.place for worker in self._workers.values()}
        starting = sum(not worker.ready for worker in self._workers.values())
        for place in range(len(self._devices)):
            if place not in taken and (self._queues[place] or len(self._queues[None]) > starting):
                self._start(place)
                starting += 1

    def _send_task(self, pipe: Connection, ticket: Ticket) -> None:
        worker = self._workers[pipe]
        worker.ticket = ticket
        with suppress(OSError):  # a dead worker is detected in `next_result`
            for number in ticket.needs:
                if number not in worker.holds:
                    send(pipe, ("share", number), self._shared[number].packed)
                    worker.holds.add(number)
            packed = pack(ticket.task, self._shared_numbers)
            try:
                send(pipe, ("do",), packed)
            finally:
                packed.close()

    def _on_death(self, pipe: Connection) -> tuple[Ticket, TaskResult] | None:
        """Removes a dead worker; its task returns to the queue or is abandoned."""
        worker = self._workers.pop(pipe)
        pipe.close()
        worker.process.join()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= DEATHS:
                raise UserError(
                    "the worker processes cannot start: in your own script, call fedgg under "
                    f"`if __name__ == '__main__':`, or {self._instead}"
                )
        ticket, code = worker.ticket, worker.process.exitcode
        if ticket is None:
            return None
        ticket.deaths += 1
        if ticket.deaths >= DEATHS:
            return ticket, Abandoned(f"its process died {DEATHS} times (exit code {code}; out of memory?)")
        ticket.notice(f"{ticket.task}: its process died (exit code {code}); another process repeats it")
        self.submit(ticket)
        return None

    def _start(self, place: int) -> None:
        allow_open_files(FILES_TO_START)
        with _without_interrupts():
            parent_end, worker_end = self._context.Pipe()
            inherited = [*self._workers, parent_end] if self._forks else []
            settings = (worker_end, inherited, self._devices[place])
            process = child_process(self._context, "fedgg.engines.workers.process:work", *settings)
            process.start()
            worker_end.close()  # so that the worker's death closes the pipe
            self._workers[parent_end] = _Worker(place, process)
        with suppress(OSError):
            send(parent_end, ("settings", TorchSettings.of_this_process()))

    def close(self) -> None:
        """Terminates all workers, also in the middle of a task."""
        for pipe, worker in self._workers.items():
            pipe.close()
            worker.process.terminate()
        for worker in self._workers.values():
            worker.process.join()
        for shared in self._shared.values():
            shared.packed.close()
        self._workers, self._shared, self._shared_numbers = {}, {}, {}
        self._queues.clear()
        self._unused.clear()


def allow_open_files(count: int) -> None:
    """Raises the limit of open files if this many more would exceed it; UserError if it cannot be raised enough."""
    if resource is None or not OPEN_FILES.exists():
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(list(OPEN_FILES.iterdir())) + count
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(
            f"another process needs about {count} open files, and {needed - count} of the {hard} allowed files are in "
            f"use: raise the limit (ulimit -n), or run fewer processes at once"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started within ignore Ctrl-C from the start, not only after seconds of imports; here it is delayed."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # started later, it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
