"""Worker processes that live as long as the pool: who does what, and what happens when one of them dies.

Workers come from a fork server where there is one: it imports torch once, in a process without threads, and every
worker is a copy of it, which starts at once and shares its memory. Forking this process itself would copy threads'
locks in whatever state they are; spawning imports torch again for each worker. Both can be asked for.
"""

from __future__ import annotations

import heapq
import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from fedgg.child_process import child_process, fork_server_modules
from fedgg.engines.workers.process import Done, PackedObject, TorchSettings, Unreadable, pack, receive, send, unpack
from fedgg.engines.workers.requests import Task
from fedgg.errors import UserError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

StartMethod = Literal["forkserver", "spawn", "fork"]
FILES_TO_START = 12  # open at once while a process is started
OPEN_FILES = Path("/dev/fd")
DEATHS = 3  # a task on which this many processes have died is given up


@dataclass(frozen=True)
class Abandoned:
    """Too many processes have died on this task."""

    why: str


TaskResult = Done | Unreadable | Abandoned


@dataclass(order=True)
class Ticket:
    """A task in the queue; the smallest rank is taken first."""

    rank: tuple[int, ...]
    number: int
    task: Task = field(compare=False)
    needs: tuple[int, ...] = field(compare=False)  # what was lent and belongs to it, in the order to be sent
    owner: Any = field(compare=False)
    notice: Callable[[str], None] = field(compare=False)
    deaths: int = field(default=0, compare=False)


@dataclass
class _Worker:
    process: BaseProcess
    ready: bool = False
    ticket: Ticket | None = None
    holds: set[int] = field(default_factory=set)


class Pool:
    def __init__(self, size: int, start: StartMethod | None = None):
        self._size = size
        methods = multiprocessing.get_all_start_methods()
        method = start or ("forkserver" if "forkserver" in methods else "spawn")
        self._context: Any = multiprocessing.get_context(method)
        self._forks = method == "fork"
        if method == "forkserver":
            self._context.set_forkserver_preload(fork_server_modules("fedgg.engines.workers.process"))
        self._workers: dict[Connection, _Worker] = {}
        self._queue: list[Ticket] = []
        self._numbers = itertools.count()
        self._shared: dict[int, tuple[Any, PackedObject]] = {}
        self._known: dict[int, int] = {}
        self._failed_starts = 0

    def share(self, thing: Any, *, mapped: bool = False) -> int:
        """Pack it once for all workers that will need it. Raises what pickle raises if it cannot be sent."""
        if id(thing) not in self._known:
            number = next(self._numbers)
            self._shared[number] = (thing, pack(thing, self._known, shared=mapped))
            self._known[id(thing)] = number
        return self._known[id(thing)]

    def unshare(self, thing: Any) -> None:
        """No task will need it any more."""
        number = self._known.pop(id(thing))
        self._shared.pop(number)[1].close()
        for pipe, worker in self._workers.items():
            if number in worker.holds:
                worker.holds.remove(number)
                with suppress(OSError):  # a dead worker is noticed where it is waited for
                    send(pipe, ("unshare", number))

    def submit(self, ticket: Ticket) -> None:
        heapq.heappush(self._queue, ticket)

    def next_result(self) -> tuple[Ticket, TaskResult]:
        """The next task that is done, whichever it is; an error within a task is raised here."""
        while True:
            self._assign_tasks()
            for pipe in wait(list(self._workers)):
                assert isinstance(pipe, Connection)
                try:
                    (kind,), packed = receive(pipe)
                except EOFError:
                    if (given_up := self._on_death(pipe)) is not None:
                        return given_up
                    continue
                worker = self._workers[pipe]
                if packed is None:
                    worker.ready, self._failed_starts = True, 0
                    continue
                what, ticket = unpack(packed), worker.ticket
                worker.ticket = None
                assert ticket is not None
                if kind == "failed":
                    raise what
                return ticket, what

    def _assign_tasks(self) -> None:
        idle = [pipe for pipe, worker in self._workers.items() if worker.ready and worker.ticket is None]
        while idle and self._queue:
            self._give(idle.pop(0), heapq.heappop(self._queue))
        starting = sum(not worker.ready for worker in self._workers.values())
        for _ in range(min(len(self._queue) - starting, self._size - len(self._workers))):
            self._start()

    def _give(self, pipe: Connection, ticket: Ticket) -> None:
        worker = self._workers[pipe]
        worker.ticket = ticket
        with suppress(OSError):  # it died: its pipe says so when it is waited for
            for number in ticket.needs:
                if number not in worker.holds:
                    send(pipe, ("share", number), self._shared[number][1])
                    worker.holds.add(number)
            packed = pack(ticket.task, self._known)
            try:
                send(pipe, ("do",), packed)
            finally:
                packed.close()

    def _on_death(self, pipe: Connection) -> tuple[Ticket, TaskResult] | None:
        """A worker is gone; its task goes back into the queue, or is given up."""
        worker = self._workers.pop(pipe)
        pipe.close()
        worker.process.join()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= DEATHS:
                raise UserError(
                    "the worker processes cannot start: in a script of your own, call fedgg under "
                    "`if __name__ == '__main__':`; or take engine.name = 'fused'"
                )
        ticket, code = worker.ticket, worker.process.exitcode
        if ticket is None:
            return None
        ticket.deaths += 1
        if ticket.deaths >= DEATHS:
            return ticket, Abandoned(f"its process died {DEATHS} times (exit code {code}; out of memory?)")
        ticket.notice(f"{ticket.task}: its process died (exit code {code}); another one does it again")
        heapq.heappush(self._queue, ticket)
        return None

    def _start(self) -> None:
        allow_open_files(FILES_TO_START)
        with _without_interrupts():
            ours, theirs = self._context.Pipe()
            others = [*self._workers, ours] if self._forks else []
            process = child_process(self._context, "fedgg.engines.workers.process:work", theirs, others)
            process.start()
            theirs.close()  # so that the worker's death closes the pipe
            self._workers[ours] = _Worker(process)
        with suppress(OSError):
            send(ours, ("settings", TorchSettings.of_this_process()))

    def close(self) -> None:
        """All workers end now, whatever they are doing."""
        for pipe, worker in self._workers.items():
            pipe.close()
            worker.process.terminate()
        for worker in self._workers.values():
            worker.process.join()
        for _, packed in self._shared.values():
            packed.close()
        self._workers, self._shared, self._known, self._queue = {}, {}, {}, []


def allow_open_files(count: int) -> None:
    """Before a process is started: if so many more files cannot be opened, the limit is raised as far as it may be."""
    if resource is None or not OPEN_FILES.exists():
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(list(OPEN_FILES.iterdir())) + count
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(
            f"another process needs about {count} open files, and of the {hard} that are allowed {needed - count} are "
            f"in use: allow more (ulimit -n), or run fewer processes at once"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started in here are deaf to Ctrl-C from birth, not only after two seconds of imports; ours waits."""
    resource_tracker.ensure_running()  # it would lift the block in our midst
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
