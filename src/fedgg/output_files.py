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

ANOTHER_FOLDER = "choose another folder (--out, or out= in Python)"
LONGEST_INSIDE = 100  # characters of a path within a run folder, and more than any has


def check_reachable(folder: Path) -> None:
    """UserError where a file in the folder could neither be there nor be missing: a name too long, a closed folder."""
    try:
        (folder / ("x" * LONGEST_INSIDE)).lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except ValueError as error:  # a null byte, half of a surrogate pair
        raise UserError(f"{str(folder)[:80]!r} is not the name of a folder: {error}; {ANOTHER_FOLDER}") from error
    except OSError as error:
        way_out = "choose a shorter name" if error.errno == errno.ENAMETOOLONG else ANOTHER_FOLDER
        raise UserError(f"{str(folder)[:80]}: {error.strerror}; {way_out}") from error


@contextmanager
def writing_to(folder: Path, instead: str = ANOTHER_FOLDER) -> Iterator[None]:
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
