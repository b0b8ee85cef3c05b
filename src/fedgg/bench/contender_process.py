"""A contender as a process: commands and replies, memory and processor time of its process tree, and its end.

Processes are found as descendants and by an environment variable (the mark), which children inherit even if their
parent has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fedgg import child_process
from fedgg.bench import bench_kit
from fedgg.bench.contenders import Contender
from fedgg.files import open_log, read_bytes, write_atomically

MARK = "FEDGG_BENCH_MARK"
POLL_SECONDS = 0.1  # between two measurements of memory
SECONDS_TO_QUIT = 20.0  # Ray takes several
LOG_LINES = 3  # of the log in the error message of a contender
SECONDS_TO_END = 5.0  # after SIGTERM, before SIGKILL


def psutil() -> ModuleType:
    """The optional dependency of `fedgg bench`."""
    return child_process.psutil("fedgg bench", "bench")


def process_tree(root: int) -> list[Any]:
    """The process and its running descendants."""
    library = psutil()
    try:
        parent = library.Process(root)
        return [parent, *parent.children(recursive=True)]
    except library.NoSuchProcess:
        return []


def marked(mark: str) -> list[Any]:
    """Every process of this user with the mark."""
    return child_process.marked_processes(psutil(), MARK, mark)


def end_tree(root: int, mark: str) -> None:
    """SIGTERM, then SIGKILL, for the process, its descendants and all processes with the mark."""
    library = psutil()
    processes = {process.pid: process for process in [*process_tree(root), *marked(mark)]}.values()
    child_process.signal_all(library, processes, kill=False)
    _, running = library.wait_procs(processes, timeout=SECONDS_TO_END)
    remaining = {process.pid: process for process in [*running, *marked(mark)]}
    child_process.signal_all(library, remaining.values(), kill=True)
    library.wait_procs(running, timeout=SECONDS_TO_END)


def memory(root: int) -> int:
    """Bytes of memory of the tree: PSS, which counts shared pages once, or RSS if the system has no PSS."""
    return int(_sum(root, _bytes))


def processor_seconds(root: int) -> float:
    """Processor time that the running processes of the tree have used."""
    return float(_sum(root, lambda process: sum(process.cpu_times()[:2])))


def busy_seconds() -> float:
    """Processor time that all processes of this machine have used, over all cores."""
    spent = psutil().cpu_times()
    waiting = spent.idle + getattr(spent, "iowait", 0.0)
    return float(sum(spent[:8]) - waiting)  # from the ninth field on, Linux counts guest time a second time


def memory_kind() -> str:
    return "PSS" if hasattr(psutil().Process().memory_full_info(), "pss") else "RSS"


def _bytes(process: Any) -> int:
    full = process.memory_full_info()
    return int(getattr(full, "pss", full.rss))


def _sum(root: int, measure: Callable[[Any], Any]) -> Any:
    library, total = psutil(), 0
    for process in process_tree(root):
        with contextlib.suppress(library.Error):
            total += measure(process)
    return total


class PeakMemory:
    """The largest measured memory of a process tree."""

    def __init__(self, root: int):
        self._root = root
        self.bytes = 0

    def measure(self) -> None:
        self.bytes = max(self.bytes, memory(self._root))

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Measure repeatedly while the block runs."""
        stopped = threading.Event()

        def poll() -> None:
            while not stopped.wait(POLL_SECONDS):
                self.measure()

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
            self.measure()


class ContenderFailed(Exception):
    """One contender has failed; the others are still measured."""


class ContenderProcess:
    """A started contender."""

    def __init__(self, contender: Contender, workload: Path, device: str, log: Path, scratch: Path):
        self.contender, self._log, self._mark = contender, log, uuid.uuid4().hex
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.perf_counter()
        with open_log(log) as output:
            try:
                self._process = subprocess.Popen(
                    contender.words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    bufsize=1,
                    cwd=scratch,
                    env=_environment(contender, workload, device, self._mark, scratch),
                    start_new_session=True,  # on Ctrl-C the driver ends it
                )
            except OSError as error:
                raise ContenderFailed(f"cannot be started: {error}") from error
        self.peak = PeakMemory(self._process.pid)
        self._processor_seconds, self._idle_since = 0.0, time.perf_counter()
        self._idle_processor_seconds = self._idle_seconds = 0.0
        self.others = 0.0  # cores used by other programs during its last round
        self._reader = threading.Thread(target=self._read_replies, daemon=True)
        self._reader.start()

    def wait_until_ready(self, timeout: float) -> tuple[float, dict[str, str]]:
        """Seconds from its start until it is ready for the first round, and the versions of its packages."""
        versions = json.loads(self._receive("ready", timeout))
        seconds = time.perf_counter() - self._started
        self._begin_idle()
        return seconds, versions

    def run_round(self, timeout: float) -> float:
        """Seconds for one round, by the driver's clock."""
        self._end_idle()
        machine_before, tree_before = busy_seconds(), processor_seconds(self._process.pid)
        started = time.perf_counter()
        self._send("round")
        self._receive("done", timeout)
        seconds = time.perf_counter() - started
        self._begin_idle()
        tree_seconds = self._processor_seconds - tree_before
        self.others = max((busy_seconds() - machine_before - tree_seconds) / seconds, 0.0)
        return seconds

    def score(self, timeout: float) -> float:
        """Test accuracy of its global model as it is now."""
        self._end_idle()
        self._send("score")
        accuracy = float(self._receive("accuracy", timeout))
        self._begin_idle()
        return accuracy

    @property
    def idle_share(self) -> float:
        """Processor time used between its turns, as a share of that time: 1.0 is one busy core."""
        return self._idle_processor_seconds / self._idle_seconds if self._idle_seconds else 0.0

    def end(self) -> None:
        """Let it quit, then end its whole process tree."""
        with contextlib.suppress(ContenderFailed, OSError, subprocess.TimeoutExpired):
            self._send("quit")
            self._process.wait(SECONDS_TO_QUIT)
        self.kill()

    def kill(self) -> None:
        end_tree(self._process.pid, self._mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        self._reader.join(SECONDS_TO_END)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # unwritten data for a process that has ended
                if pipe is not None:
                    pipe.close()

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line.strip())
        self._replies.put(None)

    def _send(self, command: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
        except OSError as error:
            raise ContenderFailed(self._exit_reason()) from error

    def _receive(self, word: str, timeout: float) -> str:
        """The rest of its next line, which must begin with this word."""
        try:
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            raise ContenderFailed(f"no reply within {timeout:.0f} s") from None
        if line is None:
            raise ContenderFailed(self._exit_reason())
        first, _, rest = line.partition(" ")
        if first != word:
            raise ContenderFailed(f"replied {line!r}, expected {word!r}")
        return rest

    def _exit_reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        lines = [line.strip() for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines()]
        quoted = " | ".join([line for line in lines if line][-LOG_LINES:]) or "its log is empty"
        return f"ended with code {self._process.returncode}: {quoted}"

    def _begin_idle(self) -> None:
        self._processor_seconds, self._idle_since = processor_seconds(self._process.pid), time.perf_counter()

    def _end_idle(self) -> None:
        self._idle_processor_seconds += max(processor_seconds(self._process.pid) - self._processor_seconds, 0.0)
        self._idle_seconds += time.perf_counter() - self._idle_since


def _environment(contender: Contender, workload: Path, device: str, mark: str, scratch: Path) -> dict[str, str]:
    threads = str(contender.threads)
    inherited = dict(os.environ)
    if contender.folder is not None:  # another framework has the kit and its own packages, and not fedgg
        kit = scratch / "kit"
        kit.mkdir(exist_ok=True)
        write_atomically(kit / "bench_kit.py", read_bytes(Path(bench_kit.__file__)))
        inherited["PYTHONPATH"] = str(kit)
        inherited.pop("PYTHONSAFEPATH", None)  # its script imports modules beside it
    return inherited | {
        "FEDGG_BENCH_WORKLOAD": str(workload),
        "FEDGG_BENCH_DEVICE": device,
        "FEDGG_BENCH_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        MARK: mark,
    }
