"""The process tree of a contender: its memory, its processor time, and how to end it.

Processes are found as descendants and by an environment variable (the mark), which children inherit even if their
parent has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fedgg.errors import UserError

MARK = "FEDGG_BENCH_MARK"
POLL_SECONDS = 0.1  # between two measurements of memory
SECONDS_TO_END = 5.0  # after SIGTERM, before SIGKILL


def psutil() -> ModuleType:
    """The optional dependency of `fedgg bench`."""
    try:
        return importlib.import_module("psutil")
    except ImportError:
        raise UserError("fedgg bench needs psutil: pip install 'fedgg[bench]'") from None


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
    library, processes = psutil(), []
    for process in library.process_iter():
        with contextlib.suppress(library.Error, OSError):
            if process.environ().get(MARK) == mark:
                processes.append(process)
    return processes


def end_tree(root: int, mark: str) -> None:
    """SIGTERM, then SIGKILL, for the process, its descendants and all processes with the mark."""
    library = psutil()
    processes = {process.pid: process for process in [*process_tree(root), *marked(mark)]}.values()
    for process in processes:
        with contextlib.suppress(library.Error):
            process.terminate()
    _, running = library.wait_procs(processes, timeout=SECONDS_TO_END)
    for process in {process.pid: process for process in [*running, *marked(mark)]}.values():
        with contextlib.suppress(library.Error):
            process.kill()
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
