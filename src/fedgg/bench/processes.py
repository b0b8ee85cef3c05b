"""A contender's whole family of processes: its memory, its processor time, its end.

Families are found by descent and by a mark in their environment: a child whose parent died still bears the mark.
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
EVERY = 0.1  # seconds between two looks at the memory
PATIENCE = 5.0  # seconds for a family to leave by itself


def psutil() -> ModuleType:
    """The library that looks at processes; only the bench needs it."""
    try:
        return importlib.import_module("psutil")
    except ImportError:
        raise UserError("fedgg bench needs psutil: pip install 'fedgg[bench]'") from None


def family(root: int) -> list[Any]:
    """The process and all its descendants that live."""
    library = psutil()
    try:
        parent = library.Process(root)
        return [parent, *parent.children(recursive=True)]
    except library.NoSuchProcess:
        return []


def marked(mark: str) -> list[Any]:
    """Every process of this user that bears the mark."""
    library, found = psutil(), []
    for process in library.process_iter():
        with contextlib.suppress(library.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def end_family(root: int, mark: str) -> None:
    """Ask all of them to leave, then make them."""
    library = psutil()
    everyone = {process.pid: process for process in [*family(root), *marked(mark)]}.values()
    for process in everyone:
        with contextlib.suppress(library.Error):
            process.terminate()
    _, deaf = library.wait_procs(everyone, timeout=PATIENCE)
    for process in {process.pid: process for process in [*deaf, *marked(mark)]}.values():
        with contextlib.suppress(library.Error):
            process.kill()
    library.wait_procs(deaf, timeout=PATIENCE)


def memory(root: int) -> int:
    """Bytes the family holds: PSS, where shared pages count once in all; RSS where the system does not tell PSS."""
    return int(_sum(root, _bytes))


def processor_seconds(root: int) -> float:
    """Processor time the living members have used so far."""
    return float(_sum(root, lambda process: sum(process.cpu_times()[:2])))


def busy_seconds() -> float:
    """Processor time that this machine has spent on anything so far, over all cores."""
    spent = psutil().cpu_times()
    waiting = spent.idle + getattr(spent, "iowait", 0.0)
    return float(sum(spent[:8]) - waiting)  # beyond the eighth, Linux counts guests a second time


def memory_kind() -> str:
    return "PSS" if hasattr(psutil().Process().memory_full_info(), "pss") else "RSS"


def _bytes(process: Any) -> int:
    full = process.memory_full_info()
    return int(getattr(full, "pss", full.rss))


def _sum(root: int, measure: Callable[[Any], Any]) -> Any:
    library, total = psutil(), 0
    for process in family(root):
        with contextlib.suppress(library.Error):
            total += measure(process)
    return total


class Peak:
    """The most memory a family was seen to hold."""

    def __init__(self, root: int):
        self._root = root
        self.bytes = 0

    def look(self) -> None:
        self.bytes = max(self.bytes, memory(self._root))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look again and again while the block runs."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(EVERY):
                self.look()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            self.look()
