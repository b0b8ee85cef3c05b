"""A run's state as one safetensors file: torn and foreign ones are recognised, equal tensors are stored once.

Clients' rows that lie in a file of their own (lab/client_state.py) are stored as their places in it.

Writing has two parts. `snapshot` reads the state between two rounds; `write_snapshot` does the rest, and may run in a
thread beside the next round: it leaves the interpreter to other threads while it computes checksums and writes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedgg.core.server import ServerState
from fedgg.core.tensor_rows import Rows
from fedgg.files import check_regular, replacing
from fedgg.lab.client_state import FILES, NOWHERE, Places, RecordLayout, RowsOnDisk, Shelf, SlotFile
from fedgg.lab.one_round import State
from fedgg.runfolder.checksums import with_checksum

FORMAT = "1"
WITH_PLACES = "2"  # an older fedgg would go on without the clients' memory
PLACES_KEYS = ("clients", "slots", "sums", "population")


class BadCheckpoint(Exception):
    """This file is no checkpoint of this run; the message says why."""


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint."""

    rounds_done: int
    tensors: Rows  # on the CPU, contiguous
    facts: dict[str, str]
    shelved: dict[str, RowsOnDisk]  # client state in files, which must be on the disk before the checkpoint is


def write_checkpoint(
    path: Path, state: State, experiment_hash: str, checksums: Mapping[str, str] | None = None
) -> None:
    """`checksums`: SHA-256 of the other files of the run folder at this round, by name."""
    write_snapshot(path, snapshot(state, experiment_hash, checksums))


def snapshot(
    state: State,
    experiment_hash: str,
    checksums: Mapping[str, str] | None = None,
    copy_into: Rows | None = None,
) -> Snapshot:
    """What a checkpoint of this state holds, `checksums` as in `write_checkpoint`.

    Rows in files that it refers to are not overwritten from now on, until `unpin`. With `copy_into` the tensors are
    copied, so that training may continue before they are written. The copies are put into it by name: passed again with
    the next state, their memory is used again.
    """
    named = {"w": state.server.w}
    named |= {f"buffers/{name}": tensor for name, tensor in state.server.buffers.items()}
    named |= {f"server/{name}": tensor for name, tensor in state.server.memory.items()}
    for group, clients in (("client", state.memory), ("client_buffers", state.kept_buffers)):
        if isinstance(clients, dict):
            named |= {f"{group}/{client}/{name}": t for client, rows in clients.items() for name, t in rows.items()}
    # A tensor that several names stand for is written once: FedGG's clients all remember the same model.
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    tensors: Rows = {}
    same_as: dict[str, str] = {}
    for name, tensor in named.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and identity in first:
            same_as[name] = first[identity]
            continue
        first[identity] = name
        tensors[name] = tensor.detach()
    if copy_into is None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    else:
        tensors = _copied(tensors, copy_into)
    shelved = {name: rows for name in FILES if isinstance(rows := getattr(state, name), RowsOnDisk)}
    if shelved:
        tensors |= _named_places(shelved)
        for rows in shelved.values():
            rows.shelf.pinned[state.rounds_done] = rows.places
    facts = {
        "format": WITH_PLACES if shelved else FORMAT,
        "experiment": experiment_hash,
        "rounds_done": str(state.rounds_done),
        "same_as": json.dumps(same_as),
    }
    if checksums:
        facts["checksums"] = json.dumps(with_checksum(checksums))
    if shelved:
        facts["records"] = json.dumps({name: rows.shelf.record.described() for name, rows in shelved.items()})
    return Snapshot(state.rounds_done, tensors, facts, shelved)


def write_snapshot(path: Path, snapshot: Snapshot, check: Callable[[], None] = lambda: None) -> None:
    """`check` as in `files.replacing`."""
    for rows in snapshot.shelved.values():
        rows.shelf.file.sync()  # what is referred to before what refers to it
    metadata = snapshot.facts | {"checksum": _checksum(snapshot.tensors, snapshot.facts)}
    with replacing(path, check=check) as file:
        _write_safetensors(file, snapshot.tensors, metadata)


def unpin(snapshot: Snapshot, rounds: set[int]) -> None:
    """Let rows in files be overwritten, except those to which checkpoints of these rounds refer."""
    for rows in snapshot.shelved.values():
        rows.shelf.pinned = {number: places for number, places in rows.shelf.pinned.items() if number in rounds}


def _copied(tensors: Rows, copies: Rows) -> Rows:
    """Copies on the CPU, in the memory of those with the same name where they fit.

    From a GPU all are copied at the same time, into page-locked memory, and then waited for.
    """
    for name in copies.keys() - tensors.keys():
        del copies[name]
    for name, tensor in tensors.items():
        copy = copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = copy.copy_(tensor, non_blocking=True)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return dict(copies)


def _write_safetensors(file: IO[bytes], tensors: Rows, metadata: dict[str, str]) -> None:
    """As `safetensors.torch.save`, which first copies all tensors twice, and no other thread runs Python meanwhile."""
    header: dict[str, Any] = {"__metadata__": metadata}
    in_order, end = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)), 0
    for name in in_order:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        dtype, shape = _dtype_name(tensor.dtype), list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)  # tensors start at a multiple of 8
    file.write(len(content).to_bytes(8, "little") + content)
    for name in in_order:
        file.write(_content(tensors[name]))


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """As safetensors files have it."""
    content = save({"empty": torch.empty(0, dtype=dtype)})
    name = json.loads(content[8:])["empty"]["dtype"]
    assert isinstance(name, str)
    return name


def _content(tensor: Tensor) -> memoryview:
    content: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return content


def read_checkpoint(path: Path, experiment_hashes: Collection[str], device: torch.device) -> State:
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"it is torn or no safetensors file ({error})") from error
    if facts.get("format") not in (FORMAT, WITH_PLACES):
        raise BadCheckpoint(f"it has format {facts.get('format')}, this fedgg reads {FORMAT} and {WITH_PLACES}")
    if facts.pop("checksum", None) != _checksum(tensors, facts):
        raise BadCheckpoint("its checksum does not fit its content")
    if facts.get("experiment") not in experiment_hashes:
        raise BadCheckpoint("it belongs to another experiment")
    shelved = _shelved(path.parent, json.loads(facts.get("records", "{}")), tensors, device)
    # At addresses of torch's own: where a tensor lies in the file, products would be summed in another order.
    tensors = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
    for name, original in json.loads(facts["same_as"]).items():
        tensors[name] = tensors[original]
    return replace(_state(tensors, int(facts["rounds_done"])), **shelved)


def pin(state: State, older: Mapping[int, Path]) -> None:
    """Keep what this and older checkpoints, by round, refer to; refuse a state whose rows are not what was written.

    What a kill or a power cut can spoil was written since the newest of the older ones: no more than that is looked at.
    """
    for name in FILES:
        rows = getattr(state, name)
        if isinstance(rows, RowsOnDisk):
            by_round = {number: _places_in(path, name) for number, path in older.items()}
            rows.shelf.pinned = {number: places for number, places in by_round.items() if places is not None}
            newest = max(rows.shelf.pinned, default=None)
            trusted = None if newest is None else rows.shelf.pinned[newest]
            spoilt = rows.shelf.spoilt(rows.places, trusted)
            if spoilt is not None:
                raise BadCheckpoint(f"{rows.shelf.file} does not hold what client {spoilt} kept")
            rows.shelf.pinned[state.rounds_done] = rows.places


def _places_in(path: Path, name: str) -> Places | None:
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            return _places({key: file.get_tensor(f"places/{name}/{key}") for key in PLACES_KEYS})
    except (OSError, SafetensorError, ValueError, IndexError):
        return None


def _state(tensors: dict[str, Tensor], rounds_done: int) -> State:
    buffers: Rows = {}
    server: Rows = {}
    clients: dict[str, dict[int, Rows]] = {"client": {}, "client_buffers": {}}
    for full, tensor in tensors.items():
        group, _, name = full.partition("/")
        if group == "buffers":
            buffers[name] = tensor
        elif group == "server":
            server[name] = tensor
        elif group in clients:
            client, _, name = name.partition("/")
            clients[group].setdefault(int(client), {})[name] = tensor
    return State(rounds_done, ServerState(tensors["w"], buffers, server), clients["client"], clients["client_buffers"])


def _named_places(shelved: Mapping[str, RowsOnDisk]) -> dict[str, Tensor]:
    """Of the clients met so far alone: the file is small as long as they are few."""
    named: dict[str, Tensor] = {}
    for name, rows in shelved.items():
        places = rows.places
        clients = np.flatnonzero(places.slot != NOWHERE)
        columns = {
            "clients": clients.astype(np.int32),
            "slots": places.slot[clients],
            "sums": places.sum[clients].view(np.int32),
            "population": np.array([len(places.slot)], np.int32),
        }
        named |= {f"places/{name}/{key}": torch.from_numpy(columns[key]) for key in PLACES_KEYS}
    return named


def _places(columns: Mapping[str, Tensor]) -> Places:
    places = Places.none(int(columns["population"]))
    clients = columns["clients"].numpy()
    places.slot[clients] = columns["slots"].numpy()
    places.sum[clients] = columns["sums"].numpy().view(np.uint32)
    return places


def _shelved(
    folder: Path, records: dict[str, Any], tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Any]:
    shelved = {}
    for name, described in records.items():
        record, path = RecordLayout.from_description(described), folder / FILES[name]
        if not path.exists():
            raise BadCheckpoint(f"{path} is missing, in which the clients' memory lies")
        shelf = Shelf(SlotFile(record.size, path, fresh=False), record, device)
        places = _places({key: tensors[f"places/{name}/{key}"] for key in PLACES_KEYS})
        if places.taken().max(initial=NOWHERE) >= shelf.file.count:
            raise BadCheckpoint(f"{path} is shorter than it was: clients' memory is lost")
        shelved[name] = RowsOnDisk(shelf, places)
    return shelved


def _checksum(tensors: Rows, facts: dict[str, str]) -> str:
    """Over content and facts: a flipped bit in the header must not pass either."""
    value = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        value = zlib.crc32(f"{name}{tensors[name].dtype}{tuple(tensors[name].shape)}".encode(), value)
        value = zlib.crc32(_content(tensors[name]), value)
    return f"{value:08x}"
