"""Records of one size in one file, addressed by number: what a record holds, and how it is read and written.

Plain reads and writes, no memory map: through a map a full disk ends the process by a signal, and every page that was
looked at counts as memory of the process.
"""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fedgg.core.rows import Rows
from fedgg.errors import UserError
from fedgg.files import open_existing, open_new, sync_folder
from fedgg.lab.files import writing_to

ALIGNMENT = 64  # bytes, as torch aligns what it allocates: a row read back is computed with in the same way


@dataclass(frozen=True)
class Field:
    """One tensor of a record."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True)
class Record:
    """How a client's rows lie one behind the other as bytes."""

    fields: tuple[Field, ...]
    size: int

    @classmethod
    def like(cls, rows: Rows) -> Record:
        return cls.of([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in rows.items()])

    @classmethod
    def of(cls, described: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> Record:
        fields, end = [], 0
        for name, dtype, shape in sorted(described, key=lambda one: one[0]):
            fields.append(Field(name, dtype, shape, end))
            end += -(-fields[-1].bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields), max(end, ALIGNMENT))

    def takes(self, rows: Rows) -> bool:
        return Record.like(rows) == self

    def pack(self, rows: Rows) -> Tensor:
        packed = torch.zeros(self.size, dtype=torch.uint8)
        for field in self.fields:
            content = rows[field.name].detach().contiguous().reshape(-1).view(torch.uint8)
            packed[field.start : field.start + field.bytes].copy_(content)
        return packed

    def unpack(self, packed: Tensor, device: torch.device) -> Rows:
        parts = {f.name: packed[f.start : f.start + f.bytes].view(f.dtype).view(f.shape) for f in self.fields}
        return {name: part.to(device) for name, part in parts.items()}

    def described(self) -> list[list[Any]]:
        """For a checkpoint's header; `from_description` reads it."""
        return [[field.name, str(field.dtype).removeprefix("torch."), list(field.shape)] for field in self.fields]

    @classmethod
    def from_description(cls, described: list[list[Any]]) -> Record:
        return cls.of([(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in described])


class SlotFile:
    """A file of slots of one size: in a run's folder, or a nameless one that is gone with the process."""

    def __init__(self, size: int, path: Path | None, *, fresh: bool = True):
        self.size = size
        self.path = path
        self._folder_knows = path is None or not fresh
        # Unbuffered: what is written is at once with the operating system, and a full disk is noticed at once.
        with self._writing():
            if path is None:
                self._file: IO[bytes] = tempfile.TemporaryFile(prefix="fedgg-", buffering=0)  # noqa: SIM115 (by close)
            elif fresh:
                path.unlink(missing_ok=True)
                self._file = open_new(path, buffering=0)
            else:
                self._file = open_existing(path, buffering=0)
        self.close = weakref.finalize(self, self._file.close)

    def __str__(self) -> str:
        return str(self.path or f"a temporary file in {tempfile.gettempdir()}")

    @property
    def count(self) -> int:
        """Whole slots there are."""
        return os.fstat(self._file.fileno()).st_size // self.size

    def write(self, slot: int, record: Tensor) -> None:
        content = record.numpy().data
        with self._writing():
            self._file.seek(slot * self.size)
            while content:
                content = content[self._file.write(content) :]

    def read(self, slot: int) -> Tensor:
        """What lies in a slot; behind the end of the file there are zeros."""
        record = torch.zeros(self.size, dtype=torch.uint8)
        content = record.numpy().data
        self._file.seek(slot * self.size)
        while content and (count := self._file.readinto(content)):  # type: ignore[attr-defined]
            content = content[count:]
        return record

    def sync(self) -> None:
        """Onto the disk, whatever was written; the name of a new file too."""
        if self.path is None:
            return
        with self._writing():
            os.fsync(self._file.fileno())
            if not self._folder_knows:
                sync_folder(self.path.parent)
                self._folder_knows = True

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self.path is not None:
            with writing_to(self.path.parent):
                yield
            return
        try:
            yield
        except OSError as error:
            raise UserError(
                f"the clients' memory does not fit into {tempfile.gettempdir()} ({error.strerror or error}): set "
                f"TMPDIR to a folder with room, raise server.memory_limit_mb, or give the run a folder"
            ) from error


def checksum(record: Tensor) -> int:
    return zlib.crc32(record.numpy().data)
