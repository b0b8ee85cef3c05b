"""The clients' rows in a file: a mapping from client to rows that reads when asked and never changes what was saved.

Copy on write: a client's new rows go to a slot that neither the state before nor any checkpoint refers to. So a kill at
any moment leaves every checkpoint with the slots it refers to as they were, and a checkpoint needs to hold only where
each client's rows lie and their checksum. Which slots are free is not kept anywhere; it follows from those who refer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.core.rows import Rows
from fedgg.errors import UserError
from fedgg.lab.slots import Record, SlotFile, checksum

NOWHERE = -1


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

    def __init__(self, file: SlotFile, record: Record, device: torch.device):
        self.file = file
        self.record = record
        self.device = device
        self.pinned: dict[int, Places] = {}  # by round: what the checkpoints on disk refer to

    @classmethod
    def new(cls, path: Path | None, like: Rows, device: torch.device) -> Shelf:
        record = Record.like(like)
        return cls(SlotFile(record.size, path), record, device)

    def put(self, before: Places, rows: Mapping[int, Rows]) -> Places:
        """Where everything lies once these clients have new rows. Equal rows lie in one slot."""
        places = Places(before.slot.copy(), before.sum.copy())
        free = self._free(before)
        same_tensors: dict[Any, tuple[int, int]] = {}
        same_content: dict[int, int] = {}  # by checksum: the slot written in this call
        for client, own in rows.items():
            tensors = identity(own)
            if tensors not in same_tensors:
                same_tensors[tensors] = self._written(client, own, free, same_content)
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

    def _written(self, client: int, own: Rows, free: Iterator[int], same_content: dict[int, int]) -> tuple[int, int]:
        if not self.record.takes(own):
            kept, now = self.record.described(), Record.like(own).described()
            raise UserError(
                f"client {client} keeps {now}, but memory in a file must keep its names, shapes and types, and they "
                f"were {kept}"
            )
        record = self.record.pack(own)
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


ClientRows = dict[int, Rows] | RowsOnDisk


def identity(rows: Rows) -> tuple[Any, ...]:
    """The same for rows made of the very same tensors: FedGG's clients all remember the model they received."""
    return tuple((name, _address(tensor)) for name, tensor in rows.items())


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _moved(now: Places, then: Places) -> NDArray[np.bool_]:
    moved: NDArray[np.bool_] = now.slot != then.slot
    return moved
