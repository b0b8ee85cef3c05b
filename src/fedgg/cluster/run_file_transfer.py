"""The files of a run whose node does not see the study folder: packed to be sent, and written where they arrive.

A node works in a temporary folder of its own. What has changed there is sent at the start, after checkpoints and at the
end, and the driver, which holds the lock of the run in the study folder, writes it. A file is written at once or not at
all, and in an order in which a kill between two files leaves a folder that can be resumed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from fedgg.errors import UserError
from fedgg.files import make_folder, read_bytes, write_atomically, writing_to
from fedgg.lab.store import Store
from fedgg.runfolder.locks import LockFile

PREFIX = "fedgg-ray-"
SEND_EVERY = 2.0  # seconds between two sendings of a run's files, and at least ten times what one takes
BUSY = 10
MOST = 1 << 40  # bytes of a file: checkpoints may be large

Files = dict[str, bytes]  # by path within the run folder
Stamp = tuple[int, int, int]


@contextmanager
def folder_of_a_node() -> Iterator[Path]:
    """A temporary folder; those that killed tasks of this account have left are removed."""
    base = Path(tempfile.gettempdir())
    mine = f"{PREFIX}{os.getuid() if hasattr(os, 'getuid') else 0}-"
    for leftover in base.glob(f"{mine}*"):
        lock = LockFile(leftover / "in-use")
        with suppress(OSError, UserError):
            if not leftover.is_symlink() and leftover.is_dir() and lock.acquire(timeout=0):
                shutil.rmtree(leftover, ignore_errors=True)
                lock.release()
    with writing_to(base, "set TMPDIR of the node to a folder with enough space"):
        folder = Path(tempfile.mkdtemp(prefix=mine))
        lock = LockFile(folder / "in-use")
        lock.acquire()
    try:
        yield folder
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


class RunFiles:
    """A run folder on a node: what has changed since it was last sent."""

    def __init__(self, folder: Path, files: Files):
        self.folder = folder
        self._sent: dict[str, Stamp] = {}
        self._next = 0.0
        with writing_to(folder, "set TMPDIR of the node to a folder with enough space"):
            write_files(folder, files, list(files))
        self._sent = self._stamps()

    def changed(self, *, at_once: bool = False) -> tuple[Files, list[str]] | None:
        """New and changed files, and the names of all; None if it is too early for another sending."""
        started = time.monotonic()
        if started < self._next and not at_once:
            return None
        stamps = self._stamps()
        files = {
            name: read_bytes(self.folder / name, MOST) for name, one in stamps.items() if self._sent.get(name) != one
        }
        self._sent = stamps
        ended = time.monotonic()
        self._next = ended + max(SEND_EVERY, BUSY * (ended - started))
        return files, list(stamps)

    def _stamps(self) -> dict[str, Stamp]:
        stamps = {}
        for path in files_in(self.folder):
            status = path.stat()
            stamps[path.relative_to(self.folder).as_posix()] = (status.st_ino, status.st_mtime_ns, status.st_size)
        return stamps


def files_in(folder: Path) -> list[Path]:
    """The files of a run, without its lock and what a kill has left half written."""
    if not folder.is_dir():
        return []
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [path for path in paths if path.name != "lock" and path.suffix != ".tmp"]


def read_files(folder: Path) -> Files:
    return {path.relative_to(folder).as_posix(): read_bytes(path, MOST) for path in files_in(folder)}


def write_files(folder: Path, files: Files, names: list[str]) -> None:
    """Write the files into a run folder. `names`: all files of the run; other checkpoints and summaries are removed."""
    if "summary.json" not in names:
        (folder / "summary.json").unlink(missing_ok=True)
    for name in sorted(files, key=_order):
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts:
            raise UserError(f"a node has sent the file {name!r}, which is not within a run folder")
        make_folder((folder / place).parent, folder)
        write_atomically(folder / place, files[name])
    for path in files_in(folder / "checkpoint"):
        if path.relative_to(folder).as_posix() not in names:
            path.unlink(missing_ok=True)


def _order(name: str) -> int:
    """History before checkpoints, the final model before the summary; a new folder is complete with config.toml."""
    if name.startswith("checkpoint/"):
        return 2 if name.endswith(".safetensors") else 1
    last = {"resumes.jsonl": 0, "checksums.json": 1, "rounds.jsonl": 1, "model.safetensors": 3, "summary.json": 5}
    return last.get(name, 4 if name == "config.toml" else 0)


def has_begun(folder: Path) -> bool:
    return Store(folder).holds_a_run()
