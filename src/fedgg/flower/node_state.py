"""Client state on a node's disk: one file for each round the client took part in.

A round may be repeated: the reply was lost, too few clients replied, or the server was killed and resumed from its last
checkpoint. So the node keeps the state of earlier rounds until the oldest checkpoint of the server is newer
(`settled`). The server names the round whose state counts (`met`); state of later rounds was not used and is deleted.

A process that hung must not overwrite newer state when it continues after a new message for its client: it finds that a
newer message has started (`StaleMessage`) and writes nothing.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedgg.core.tensor_rows import Rows
from fedgg.errors import UserError
from fedgg.files import MEGABYTE, check_regular, make_folder, read_bytes, write_atomically, writing_to
from fedgg.flower.messages import NO_ROUND, InvalidMessage, MessageHeader
from fedgg.runfolder.locks import FOREVER, LockFile

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
RUN_ID = re.compile(r"[0-9a-z]{1,64}")


class StaleMessage(Exception):
    """A newer message for the same run has started, so the result of this one is not needed."""


@dataclass(frozen=True)
class SavedClientState:
    """Client state: what is saved from one round to the next."""

    memory: Rows  # of the algorithm
    buffers: Rows  # the client's own batch statistics, if `model.statistics` is `local`


class NodeStateFolder:
    """The state of one client in one run."""

    def __init__(self, folder: Path, run: str):
        if not RUN_ID.fullmatch(run):  # it becomes the name of a folder
            raise UserError(f"a message has the run id {run!r}, which is not a fedgg run id")
        self.folder = folder / run

    def begin(
        self, header: MessageHeader, message_id: str, device: torch.device
    ) -> tuple[SavedClientState | None, str]:
        """The state a round starts from, or None, with a reason if the server expects state that is missing.

        Marks this message as the newest, and deletes state that no round can start from any more.
        """
        with self._locked():
            write_atomically(self.folder / "newest", message_id.encode(), PRIVATE_FILE)
            self._delete_unused(header)
            if header.met == NO_ROUND:
                return None, ""
            try:
                return _read(self._file(header.met), device), ""
            except FileNotFoundError:
                return None, f"its client state of round {header.met} is missing; it started from the initial state"
            except (SafetensorError, OSError, ValueError) as error:
                return None, (
                    f"its client state of round {header.met} cannot be read ({error}); "
                    f"it started from the initial state"
                )

    def read(self, round_: int, device: torch.device) -> SavedClientState | None:
        """The state after a round, which is not changed; None before the first. InvalidMessage if it is missing."""
        if round_ == NO_ROUND:
            return None
        with self._locked():
            try:
                return _read(self._file(round_), device)
            except (SafetensorError, OSError, ValueError) as error:
                raise InvalidMessage(f"its client state of round {round_} cannot be read ({error})") from error

    def save(self, header: MessageHeader, message_id: str, state: SavedClientState) -> None:
        with self._locked() as lock:
            if read_bytes(self.folder / "newest", MEGABYTE) != message_id.encode():
                raise StaleMessage(f"round {header.round}: a newer message has arrived")
            lock.check()
            _write(self._file(header.round), state)

    def _delete_unused(self, header: MessageHeader) -> None:
        """Rounds after `met` were not used by the server; rounds before the newest settled one are never repeated."""
        rounds = sorted(self._rounds())
        settled = [number for number in rounds if number <= min(header.settled, header.met)]
        oldest = settled[-1] if settled else NO_ROUND
        for number in rounds:
            if number > header.met or number < oldest:
                self._file(number).unlink(missing_ok=True)

    def _rounds(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("[0-9]*.safetensors")]

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"

    @contextmanager
    def _locked(self) -> Iterator[LockFile]:
        with writing_to(self.folder):
            self.folder.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
            make_folder(self.folder, self.folder.parent, PRIVATE_FOLDER)
            lock = LockFile(self.folder / "lock", PRIVATE_FILE)
            lock.acquire(FOREVER)
            try:
                yield lock
            finally:
                lock.release()


def _write(path: Path, state: SavedClientState) -> None:
    tensors = {f"memory/{name}": rows for name, rows in state.memory.items()}
    tensors |= {f"buffers/{name}": rows for name, rows in state.buffers.items()}
    content = {name: rows.detach().cpu().contiguous().clone() for name, rows in tensors.items()}
    write_atomically(path, save(content, metadata={"sums": json.dumps(_checksums(content))}), PRIVATE_FILE)


def _read(path: Path, device: torch.device) -> SavedClientState:
    check_regular(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    if json.loads(metadata.get("sums", "null")) != _checksums(content):
        raise ValueError("its content does not match its checksums")
    groups: dict[str, Rows] = {"memory": {}, "buffers": {}}
    for full_name, rows in content.items():
        group, _, name = full_name.partition("/")
        groups[group][name] = rows.to(device)
    return SavedClientState(**groups)


def _checksums(content: Rows) -> dict[str, int]:
    return {name: zlib.crc32(rows.reshape(-1).view(torch.uint8).numpy().data) for name, rows in sorted(content.items())}
