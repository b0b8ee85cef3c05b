"""Writing into a run folder: what goes wrong is one clear line."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedgg.errors import UserError
from fedgg.files import write_atomically


@contextmanager
def writing_to(folder: Path, instead: str = "choose another folder (--out, or out= in Python)") -> Iterator[None]:
    """Turns a full disk or a forbidden folder into one clear line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
        way_out = {
            errno.ENOSPC: "free some space, then resume it or call the same command again: finished rounds are safe",
            errno.EDQUOT: "free some space, then resume it or call the same command again: finished rounds are safe",
            errno.EFBIG: "the file size limit is too small for this run",
            errno.EMFILE: "allow more open files (ulimit -n)",
        }.get(error.errno or 0, instead)
        raise UserError(f"cannot write to {folder}: {reason}; {way_out}") from error


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
