"""Files that are there whole or not at all, with one clear line where they cannot be written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedgg import files
from fedgg.errors import UserError

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
