"""Writing run folders and reports: folders are made, and what goes wrong is one line that names the way out."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedgg import files
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


PAGE = "report.html"


def write_text(file: Path, content: str, within: Path | None = None) -> Path:
    """Readers see the old page or the new one. `within`: the folder that the user named."""
    with writing(file, within):
        files.write_text(file, content)
    return file


@contextmanager
def writing(file: Path, within: Path | None = None) -> Iterator[None]:
    """Makes the file's folder, and turns what goes wrong in the block into one line."""
    try:
        files.make_folder(file.parent, within or file.parent)
        yield
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {error.strerror or error}; choose another place, or make room"
        ) from error


def file_name(words: str) -> str:
    """A title or label as a part of a file's name."""
    return re.sub(r"[^a-z0-9.=]+", "-", words.lower()).strip("-.")[:60]
