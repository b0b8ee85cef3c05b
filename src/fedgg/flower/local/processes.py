"""The processes of a federation: started in the open, found again by a mark, ended together.

Flower's processes start others, some of them detached, which outlive their parents. All inherit their environment, and
with it a mark that says which federation and which part of it they belong to. A watchdog ends everybody who bears it
when the process that holds the federation is gone, however that came about.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from fedgg.errors import UserError
from fedgg.files import open_regular, open_to_append
from fedgg.flower.local.private_network import PrivateNetwork
from fedgg.lab.trust import environment_for_children

MARK = "FEDGG_FEDERATION"
PATIENCE = 4.0  # seconds to leave by oneself
TAIL = 12  # lines of a log that are shown


def psutil() -> ModuleType:
    try:
        return importlib.import_module("psutil")
    except ImportError:
        raise UserError("fedgg flower up needs psutil: pip install 'fedgg[flower]'") from None


@dataclass(frozen=True)
class Part:
    """One of Flower's long-lived processes, and all that it starts."""

    federation: str  # a word of its own for each federation
    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    network: PrivateNetwork | None = None  # in which it runs; None: that of this machine

    @property
    def mark(self) -> str:
        return f"{self.federation}/{self.name}"


@dataclass
class Running:
    """A part that was started."""

    part: Part
    process: subprocess.Popen[bytes]
    since: float = field(default_factory=time.monotonic)

    @property
    def ended(self) -> int | None:
        """Its exit code, once it has one."""
        return self.process.poll()

    def age(self) -> float:
        return time.monotonic() - self.since

    def family(self) -> list[Any]:
        return marked(self.part.mark)

    def end(self) -> None:
        end(self.part.mark)
        self.process.wait()


def _start(part: Part) -> Running:
    """In a session of its own, so that Ctrl-C reaches nobody but us; what it says goes into its log."""
    with open_to_append(part.log) as log:
        process = subprocess.Popen(
            part.command if part.network is None else part.network.inside(part.command),
            pass_fds=() if part.network is None else part.network.descriptors,
            env=part.environment | {MARK: part.mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(part, process)


def marked(mark: str) -> list[Any]:
    """Every living process of this part, or of all parts where only the federation is named."""
    library, found = psutil(), []
    for process in library.process_iter():
        with contextlib.suppress(library.Error, OSError):
            theirs = process.environ().get(MARK, "")
            if theirs == mark or theirs.startswith(f"{mark}/"):
                found.append(process)
    return found


def end(mark: str) -> None:
    """Ask them to leave, then make them, until nobody is left."""
    library = psutil()
    for process in marked(mark):
        with contextlib.suppress(library.Error):
            process.terminate()
    patience = time.monotonic() + PATIENCE
    while there := marked(mark):
        if time.monotonic() > patience:
            for process in there:
                with contextlib.suppress(library.Error):
                    process.kill()
        time.sleep(0.05)


def is_running(process: Any, program: str) -> bool:
    """Whether this process is that program, called by its path or through an interpreter."""
    library = psutil()
    try:
        return any(Path(word).name == program for word in process.cmdline()[:3])
    except (library.Error, OSError):
        return False  # it ended while we looked


@contextmanager
def watched_over(federation: str) -> Iterator[Callable[[Part], Running]]:
    """Gives what starts a part. Whatever happens to us, even a kill -9: nobody of the federation outlives the block."""
    started: list[Running] = []

    def start(part: Part) -> Running:
        started.append(_start(part))
        return started[-1]

    dog = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("watchdog.py")), MARK, federation],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield start
    finally:
        end(federation)
        for running in started:
            running.process.wait()
        assert dog.stdin is not None
        dog.stdin.close()  # that is what it waits for
        dog.wait()


def tail(log: Path, lines: int = TAIL) -> str:
    """The end of a log, for an error message."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            said = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return "(there is no log)"
    return "\n".join([line for line in said if line.strip()][-lines:])


def surroundings(home: Path, host: str) -> dict[str, str]:
    """What Flower's processes inherit: they find each other by PATH, call nobody's home, and go round no proxy."""
    inherited = {key: value for key, value in os.environ.items() if key != MARK}
    own_folder = str(Path(sys.executable).parent)
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), host, "localhost"]))
    return {
        "OMP_NUM_THREADS": "1",  # many processes share this machine
        **inherited,
        **environment_for_children(),
        "PATH": os.pathsep.join([own_folder, os.environ.get("PATH", os.defpath)]),
        "NO_PROXY": direct,
        "no_proxy": direct,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }
