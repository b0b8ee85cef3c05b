"""What Python 3.11 has and Python 3.10 lacks: TOML, `Self`, digests of files, notes on exceptions, classes.

Remove this file, and `tomli` and `typing_extensions` from pyproject.toml, when Python 3.10 is no longer supported.
"""

from __future__ import annotations

import hashlib
import sys
import types
from typing import IO, TypeGuard

if sys.version_info >= (3, 11):
    from typing import Self

    import tomllib
else:  # pragma: no cover
    import tomli as tomllib
    from typing_extensions import Self

__all__ = ["Self", "add_note", "file_digest", "is_class", "tomllib"]
CHUNK = 1 << 20  # bytes that are read at a time


def file_digest(file: IO[bytes], kind: str = "sha256") -> hashlib._Hash:
    """As hashlib.file_digest, of the rest of a file."""
    digest = hashlib.new(kind)
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest


def is_class(thing: object) -> TypeGuard[type]:
    """Whether it can be given to issubclass; in Python 3.10 `list[int]` is an instance of `type`, and cannot."""
    return isinstance(thing, type) and not isinstance(thing, types.GenericAlias)


def add_note(error: BaseException, note: str) -> None:
    """As error.add_note; Python 3.10 keeps the note and does not print it."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:  # pragma: no cover
        error.__notes__ = [*getattr(error, "__notes__", ()), note]
