"""Which runs of a study have not begun, and what they wait for: a file of each process at work in its folder.

`fedgg watch` and the report show it. The file beside it that the process has locked says whether it is still at work; a
killed process leaves both, and the next one removes them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fedgg.errors import UserError
from fedgg.files import read_json, write_json
from fedgg.runfolder.locks import LockFile

PREFIX, LOCK = ".waiting-", ".lock"
LONGEST = 300  # characters of a reason


class WaitingRuns:
    """By the place of a run within the study folder: what it waits for."""

    def __init__(self, file: Path):
        self._file = file
        self._written: dict[str, str] | None = None

    def write(self, reasons: Mapping[str, str]) -> None:
        """Nothing happens where the reasons are as before, or the file cannot be written: it is for people only."""
        if dict(reasons) != self._written:
            with suppress(OSError):
                write_json(self._file, {"runs": dict(reasons)})
                self._written = dict(reasons)


@contextmanager
def waiting_runs(folder: Path) -> Iterator[WaitingRuns]:
    """A file of this process; those of processes that have ended are removed."""
    for lock_file in folder.glob(f"{PREFIX}*{LOCK}"):
        with suppress(OSError, UserError):
            lock = LockFile(lock_file)
            if lock.acquire(timeout=0):
                lock_file.with_suffix(".json").unlink(missing_ok=True)
                lock_file.unlink(missing_ok=True)
                lock.release()
    file = folder / f"{PREFIX}{secrets.token_hex(8)}.json"
    lock = LockFile(file.with_suffix(LOCK))
    with suppress(OSError, UserError):
        lock.acquire()
    try:
        yield WaitingRuns(file)
    finally:
        for path in (file, lock.path):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        lock.release()


def read_waiting(folder: Path) -> dict[str, str]:
    """By the place of a run: what it waits for, as the processes say that are at work in the folder."""
    reasons: dict[str, str] = {}
    for file in sorted(folder.glob(f"{PREFIX}*.json")):
        with suppress(OSError, ValueError, UserError, AttributeError, TypeError):
            if LockFile(file.with_suffix(LOCK)).is_held_elsewhere():
                for place, reason in read_json(file)["runs"].items():
                    if isinstance(reason, str):
                        reasons.setdefault(place, " ".join(reason.split())[:LONGEST])
    return reasons
