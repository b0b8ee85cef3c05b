"""Writing that survives a kill: a file is either the old one or the new one, never half of either."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedgg.errors import UserError


@contextmanager
def writing_to(folder: Path, instead: str = "choose another folder (--out, or out= in Python)") -> Iterator[None]:
    """Turns a full disk or a forbidden folder into one clear line."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        way_out = {
            errno.ENOSPC: "free some space, then resume it or call the same command again: finished rounds are safe",
            errno.EDQUOT: "free some space, then resume it or call the same command again: finished rounds are safe",
            errno.EFBIG: "the file size limit is too small for this run",
        }.get(error.errno or 0, instead)
        raise UserError(f"cannot write to {folder}: {reason}; {way_out}") from error


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Beside the file first, onto the disk, then in its place in one move; `mode` as for `os.open`."""
    beside = path.with_name(path.name + ".tmp")
    beside.unlink(missing_ok=True)  # a torn one may have another mode
    with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Make a rename durable; Windows can neither open folders nor needs to."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
