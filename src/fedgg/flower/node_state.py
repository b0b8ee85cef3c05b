"""What a client keeps between rounds, in files of its node: one for each round it took part in.

A round may be played again: its answer was lost, too few clients answered, the server was killed and went back to its
last checkpoint. So the node keeps what it had before, until the server says that it never goes back that far. The
server names the round whose memory counts (`met`); whatever the node has of later rounds never became a part of the
run.

A message that was overtaken by a newer one (its process hung, was asked again elsewhere and woke up) writes nothing.
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

from fedgg.core.rows import Rows
from fedgg.errors import UserError
from fedgg.files import MEGABYTE, check_regular, make_folder, read_bytes, write_atomically
from fedgg.flower.messages import NEVER, About
from fedgg.output_files import writing_to
from fedgg.runfolder.locks import FOREVER, LockFile

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
RUN_NAMES = re.compile(r"[0-9a-z]{1,64}")


class Overtaken(Exception):
    """A newer message has come in for the same run: this one is nobody's business any more."""


@dataclass(frozen=True)
class Kept:
    """A client between two rounds."""

    memory: Rows
    buffers: Rows  # its own batch statistics, under the policy `local`


class NodeMemory:
    """One client's memory of one run."""

    def __init__(self, folder: Path, run: str):
        if not RUN_NAMES.fullmatch(run):  # it becomes a folder's name
            raise UserError(f"a message names the run {run!r}, which is no name fedgg gives")
        self.folder = folder / run

    def begin(self, about: About, ticket: str, device: torch.device) -> tuple[Kept | None, str]:
        """What the round starts from, and why there is nothing if the server thinks there is; makes this the newest
        message, and forgets what no round can start from any more."""
        with self._locked():
            write_atomically(self.folder / "newest", ticket.encode(), PRIVATE_FILE)
            self._forget(about)
            if about.met == NEVER:
                return None, ""
            try:
                return _read(self._file(about.met), device), ""
            except FileNotFoundError:
                return None, f"its memory of round {about.met} is gone, it started anew"
            except (SafetensorError, OSError, ValueError) as error:
                return None, f"its memory of round {about.met} cannot be read ({error}), it started anew"

    def keep(self, about: About, ticket: str, kept: Kept) -> None:
        with self._locked() as lock:
            if read_bytes(self.folder / "newest", MEGABYTE) != ticket.encode():
                raise Overtaken(f"round {about.round}: a newer message has come in")
            lock.check()
            _write(self._file(about.round), kept)

    def _forget(self, about: About) -> None:
        """Later than `met`: never became a part of the run. Before the newest that is settled: nobody goes back."""
        rounds = sorted(self._rounds())
        settled = [number for number in rounds if number <= min(about.settled, about.met)]
        oldest = settled[-1] if settled else NEVER
        for number in rounds:
            if number > about.met or number < oldest:
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


def _write(path: Path, kept: Kept) -> None:
    named = {f"memory/{name}": rows for name, rows in kept.memory.items()}
    named |= {f"buffers/{name}": rows for name, rows in kept.buffers.items()}
    content = {name: rows.detach().cpu().contiguous().clone() for name, rows in named.items()}
    write_atomically(path, save(content, metadata={"sums": json.dumps(_sums(content))}), PRIVATE_FILE)


def _read(path: Path, device: torch.device) -> Kept:
    check_regular(path)
    with safe_open(path, framework="pt") as file:
        facts = file.metadata() or {}
        content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    if json.loads(facts.get("sums", "null")) != _sums(content):
        raise ValueError("its checksums do not fit")
    found: dict[str, Rows] = {"memory": {}, "buffers": {}}
    for full, rows in content.items():
        group, _, name = full.partition("/")
        found[group][name] = rows.to(device)
    return Kept(**found)


def _sums(content: Rows) -> dict[str, int]:
    return {name: zlib.crc32(rows.reshape(-1).view(torch.uint8).numpy().data) for name, rows in sorted(content.items())}
