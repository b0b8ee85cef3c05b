"""Files that are there whole or not at all, with one clear line where they cannot be written."""

from __future__ import annotations

import re
from pathlib import Path

from fedgg.errors import UserError

PAGE = "report.html"


def write_text(file: Path, content: str) -> Path:
    """Beside its place first: whoever has the old page open never meets half of the new one."""
    beside = file.with_name(file.name + ".tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(content, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {error.strerror or error}; choose another place, or make room"
        ) from error
    return file


def file_name(words: str) -> str:
    """A title or label as a part of a file's name."""
    return re.sub(r"[^a-z0-9.=]+", "-", words.lower()).strip("-.")[:60]
