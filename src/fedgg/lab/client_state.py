"""Client state on disk: records of one size in a file, read when needed, unchanged once a checkpoint refers to it.

Plain reads and writes, no memory map: through a map a full disk ends the process by a signal, and every page that was
looked at counts as memory of the process.

Copy on write: a client's new rows go to a slot that neither the state before nor any checkpoint refers to. So a kill at
any moment leaves every checkpoint with the slots it refers to as they were, and a checkpoint needs to hold only where
each client's rows lie and their checksum. Which slots are free is not kept anywhere; it follows from those who refer.
"""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.core.tensor_rows import Rows, identity
from fedgg.errors import UserError
from fedgg.files import open_in_place, open_new, sync_folder, writing_to

ALIGNMENT = 64  # bytes, as torch aligns what it allocates: a row read back is computed with in the same way
NOWHERE = -1
FILES = {"memory": "client-memory.slots", "kept_buffers": "client-buffers.slots"}  # beside the checkpoints


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
class RecordLayout:
    """How a client's rows lie one behind the other as bytes."""

    fields: tuple[Field, ...]
    size: int

    @classmethod
    def like(cls, rows: Rows) -> RecordLayout:
        return cls.of([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in rows.items()])

    @classmethod
    def of(cls, described: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> RecordLayout:
        fields, end = [], 0
        for name, dtype, shape in sorted(described, key=lambda one: one[0]):
            fields.append(Field(name, dtype, shape, end))
            end += -(-fields[-1].bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields), max(end, ALIGNMENT))

    def takes(self, rows: Rows) -> bool:
        return RecordLayout.like(rows) == self

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
    def from_description(cls, described: list[list[Any]]) -> RecordLayout:
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
                self._file = open_in_place(path, "r+b", buffering=0)
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


@dataclass(frozen=True, eq=False)
class Places:
    """For each client the slot of its rows, NOWHERE if there are none yet, and their checksum."""

    slot: NDArray[np.int32]
    sum: NDArray[np.uint32]

    @classmethod
    def none(cls, population: int) -> Places:
        return cls(np.full(population, NOWHERE, np.int32), np.zeros(population, np.uint32))

    def taken(self) -> NDArray[np.int32]:
        slots: NDArray[np.int32] = self.slot[self.slot != NOWHERE]
        return slots


class Shelf:
    """The slots of one run for one kind of rows, and who refers to them."""

    def __init__(self, file: SlotFile, record: RecordLayout, device: torch.device):
        self.file = file
        self.record = record
        self.device = device
        self.pinned: dict[int, Places] = {}  # by round: what checkpoints refer to, one that is being written included

    @classmethod
    def new(cls, path: Path | None, like: Rows, device: torch.device) -> Shelf:
        record = RecordLayout.like(like)
        return cls(SlotFile(record.size, path), record, device)

    def put(self, before: Places, rows: Mapping[int, Rows]) -> Places:
        """Where everything lies once these clients have new rows. Equal rows lie in one slot."""
        places = Places(before.slot.copy(), before.sum.copy())
        free = self._free(before)
        same_tensors: dict[Any, tuple[int, int]] = {}
        same_content: dict[int, int] = {}  # by checksum: the slot written in this call
        for client, client_rows in rows.items():
            tensors = identity(client_rows)
            if tensors not in same_tensors:
                same_tensors[tensors] = self._written(client, client_rows, free, same_content)
            places.slot[client], places.sum[client] = same_tensors[tensors]
        return places

    def get(self, client: int, places: Places) -> Rows:
        record = self.file.read(int(places.slot[client]))
        if checksum(record) != places.sum[client]:
            raise UserError(
                f"{self.file}: the memory of client {client} does not fit its checksum, so the file was changed or the "
                f"disk failed: start anew in another folder"
            )
        return self.record.unpack(record, self.device)

    def spoilt(self, places: Places, trusted: Places | None) -> int | None:
        """A client whose rows are not what was written, looking only where `trusted` does not refer to as well."""
        looked = places.slot != NOWHERE if trusted is None else (places.slot != NOWHERE) & _moved(places, trusted)
        _, first = np.unique(places.slot[looked], return_index=True)
        for client in np.flatnonzero(looked)[first]:
            if checksum(self.file.read(int(places.slot[client]))) != places.sum[client]:
                return int(client)
        return None

    def _written(
        self, client: int, client_rows: Rows, free: Iterator[int], same_content: dict[int, int]
    ) -> tuple[int, int]:
        if not self.record.takes(client_rows):
            before, now = self.record.described(), RecordLayout.like(client_rows).described()
            raise UserError(
                f"client {client} keeps {now}, but memory in a file must keep its names, shapes and types, and they "
                f"were {before}"
            )
        record = self.record.pack(client_rows)
        its_sum = checksum(record)
        if its_sum in same_content and torch.equal(self.file.read(same_content[its_sum]), record):
            return same_content[its_sum], its_sum
        slot = next(free)
        self.file.write(slot, record)
        same_content[its_sum] = slot
        return slot, its_sum

    def _free(self, before: Places) -> Iterator[int]:
        """Slots that nobody refers to, lowest first, then new ones at the end of the file."""
        there = self.file.count
        taken = np.zeros(there, dtype=bool)
        for places in (before, *self.pinned.values()):
            slots = places.taken()
            taken[slots[slots < there]] = True
        return chain(map(int, np.flatnonzero(~taken)), count(there))


class RowsOnDisk(Mapping[int, Rows]):
    """The clients met so far and their rows. `rows | {client: new}` is the next round's.

    The rows before stay readable until the rows after are extended in their turn; checkpoints stay readable as long as
    they are pinned.
    """

    def __init__(self, shelf: Shelf, places: Places):
        self.shelf = shelf
        self.places = places

    def __getitem__(self, client: int) -> Rows:
        if client not in self:
            raise KeyError(client)
        return self.shelf.get(client, self.places)

    def __contains__(self, client: object) -> bool:
        slots = self.places.slot
        if not isinstance(client, int | np.integer) or not 0 <= client < len(slots):
            return False
        return bool(slots[client] != NOWHERE)

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.places.slot != NOWHERE).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.places.slot != NOWHERE))

    def __or__(self, rows: Mapping[int, Rows]) -> RowsOnDisk:
        return RowsOnDisk(self.shelf, self.shelf.put(self.places, rows)) if rows else self


def _moved(now: Places, then: Places) -> NDArray[np.bool_]:
    moved: NDArray[np.bool_] = now.slot != then.slot
    return moved


ClientRows = dict[int, Rows] | RowsOnDisk
