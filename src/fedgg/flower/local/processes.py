"""Supervision of the processes of a local federation: start them, find all of their descendants, end them together.

Flower's processes start others, some of them detached, which outlive their parents. All inherit an environment variable
that names the federation and the process they descend from (the mark). A watchdog process ends everything with the
federation's mark once the supervising process is gone, also after a kill -9.

This file is also the program of the watchdog: python processes.py FEDERATION, run by its path.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from fedgg import child_process
from fedgg.errors import UserError
from fedgg.files import open_in_place, open_regular
from fedgg.flower.local.namespaces import PrivateNetwork
from fedgg.lab.trusted_code import environment_for_children

MARK = "FEDGG_FEDERATION"  # environment variable
SECONDS_TO_END = 4.0  # after SIGTERM, before SIGKILL
WATCHING = b"watching\n"  # what the watchdog prints once it has started
LOG_LINES = 12  # of a log in an error message
EMPTY_SEARCHES = 3  # in a row, until the watchdog ends: one search may miss a process that is just being started


def psutil() -> ModuleType:
    return child_process.psutil("fedgg flower up", "flower")


@dataclass(frozen=True)
class ProcessSpec:
    """A SuperLink or SuperNode to start; the processes that it starts itself belong to it."""

    federation: str  # unique id
    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    network: PrivateNetwork | None = None  # None: the network of this machine

    @property
    def mark(self) -> str:
        return f"{self.federation}/{self.name}"


@dataclass
class StartedProcess:
    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    started_at: float = field(default_factory=time.monotonic)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def age(self) -> float:
        return time.monotonic() - self.started_at

    def tree(self) -> list[Any]:
        """This process and its descendants, as psutil processes."""
        return marked(self.spec.mark)

    def end(self) -> None:
        end(self.spec.mark)
        self.process.wait()


def _start(spec: ProcessSpec) -> StartedProcess:
    """Started in a new session, so that Ctrl-C in the terminal reaches only the supervisor."""
    with open_in_place(spec.log, "ab") as log:
        process = subprocess.Popen(
            spec.command if spec.network is None else spec.network.inside(spec.command),
            pass_fds=() if spec.network is None else spec.network.descriptors,
            env=spec.environment | {MARK: spec.mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return StartedProcess(spec, process)


def marked(mark: str) -> list[Any]:
    """Running processes with this mark, or below it: a federation's mark finds all of its processes."""
    return child_process.marked_processes(psutil(), MARK, mark)


def end(mark: str) -> None:
    """SIGTERM, and SIGKILL after some seconds, until no process with this mark runs."""
    child_process.signal_all(psutil(), marked(mark), kill=False)
    deadline = time.monotonic() + SECONDS_TO_END
    while running := marked(mark):
        if time.monotonic() > deadline:
            child_process.signal_all(psutil(), running, kill=True)
        time.sleep(0.05)


def is_running(process: Any, program: str) -> bool:
    """Whether this process runs that program, directly or through an interpreter."""
    library = psutil()
    try:
        return any(Path(argument).name == program for argument in process.cmdline()[:3])
    except (library.Error, OSError):
        return False  # it has ended meanwhile


@contextmanager
def supervised(federation: str) -> Iterator[Callable[[ProcessSpec], StartedProcess]]:
    """Yields a function that starts a process. Everything started ends with the block, or with this process."""
    started: list[StartedProcess] = []

    def start(spec: ProcessSpec) -> StartedProcess:
        started.append(_start(spec))
        return started[-1]

    watchdog = subprocess.Popen(
        [sys.executable, str(Path(__file__)), federation],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert watchdog.stdin is not None
    assert watchdog.stdout is not None
    with watchdog:
        if watchdog.stdout.readline() != WATCHING:
            raise UserError(f"the watchdog process did not start: run {sys.executable} {__file__} to see why")
        try:
            yield start
        finally:
            end(federation)
            for process in started:
                process.process.wait()
            watchdog.stdin.close()  # ends it


def _watch(federation: str) -> None:
    """The watchdog: its standard input is closed when the supervising process ends for any reason."""
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, signal.SIG_IGN)
    os.write(sys.stdout.fileno(), WATCHING)
    sys.stdin.buffer.read()
    empty_searches = 0
    while empty_searches < EMPTY_SEARCHES:
        running = marked(federation)
        child_process.signal_all(psutil(), running, kill=True)
        empty_searches = 0 if running else empty_searches + 1
        time.sleep(0.1)


def tail(log: Path, lines: int = LOG_LINES) -> str:
    """The last lines of a log, for an error message."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            content = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join([line for line in content if line.strip()][-lines:])


def flower_environment(home: Path, host: str) -> dict[str, str]:
    """Environment of Flower's processes: programs of this Python first in PATH, no telemetry, no proxy for `host`."""
    inherited = {key: value for key, value in os.environ.items() if key != MARK}
    programs = str(Path(sys.executable).parent)
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), host, "localhost"]))
    return {
        "OMP_NUM_THREADS": "1",  # many processes share this machine
        **inherited,
        **environment_for_children(),
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }


if __name__ == "__main__":
    _watch(sys.argv[1])
