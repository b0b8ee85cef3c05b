"""The run folder: the experiment, its rounds, its checkpoints and its end, written and read by the run itself.

config.toml       the experiment, complete
checksums.json    SHA-256 of config.toml and of what is written once; lines and objects elsewhere carry their own
versions.json     format of this folder; fedgg, its commit, torch, Python, machine; hash of experiment and data; the
                  engine at the start, its precision, and why it was chosen
attackers.json    the clients that attack, where some do
inputs.json       what the final model expects of its inputs: shape, scaling, classes and how they are labelled
partition.npz     the examples of all clients in a row, how many each has, and those held out; partition.json: hash,
                  counts by class, and the clients that never train
rounds.jsonl      one line a round
resumes.jsonl     one line each time the run was resumed, where it was
flower.json       of a run over Flower: its name on messages, its clients; exchanges.jsonl: what went over the network
checkpoint/       the two latest states; *.slots: client state, where it is too large for a checkpoint
summary.json      how it ended; model.safetensors: the final model under the module's own names; buffers.safetensors:
                  what training changed of the buffers that a module's state_dict leaves out, where it did

`lab/resume.py` checks a folder before its run is resumed; `runfolder` reads folders for reports, without torch.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from fedgg import __version__
from fedgg.core.tensor_rows import Rows
from fedgg.errors import UserError
from fedgg.files import (
    ANOTHER_FOLDER,
    LARGE,
    indented_json,
    make_folder,
    open_in_place,
    parse_json,
    read_bytes,
    replacing,
    writing_to,
)
from fedgg.lab.build import Federation
from fedgg.lab.checkpoint import Snapshot, write_snapshot
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.provenance import versions_of
from fedgg.runfolder import checksums
from fedgg.runfolder.checksums import (
    HISTORY,
    LineChecksums,
    Manifest,
    checkpoints_in,
    known_checksums,
    newest_checkpoint,
    sha256,
)
from fedgg.runfolder.locks import InUse, LockFile
from fedgg.runfolder.read_rounds import IntactRounds, read_intact_rounds
from fedgg.runfolder.validation import summary_in

FORMAT = 1
KEPT_CHECKPOINTS = 2
LONGEST_INSIDE = 100  # characters of a path within a run folder, and more than any has
RESTORE = "put the file back, or move the folder away to run it afresh"


class ChangedConfig(UserError):
    """config.toml is not what this library wrote."""


def not_locked() -> None:
    """The check of a folder that this process has not locked: there is nothing to lose."""


class Store:
    """One run folder, held by one process at a time."""

    def __init__(self, folder: Path):
        """UserError where a file in the folder could neither exist nor be missing: a name too long, a closed folder."""
        try:
            (folder / ("x" * LONGEST_INSIDE)).lstat()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except ValueError as error:  # a null byte, half of a surrogate pair
            raise UserError(f"{str(folder)[:80]!r} is not the name of a folder: {error}; {ANOTHER_FOLDER}") from error
        except OSError as error:
            way_out = "choose a shorter name" if error.errno == errno.ENAMETOOLONG else ANOTHER_FOLDER
            raise UserError(f"{str(folder)[:80]}: {error.strerror}; {way_out}") from error
        self.folder = folder
        self.checkpoint_folder = folder / "checkpoint"
        self.lock_file = folder / "lock"
        self.check_lock = not_locked  # within `locked`: LockLost if the folder was removed or replaced since
        self.manifest: Manifest | None = None  # of a folder that was opened to be written; None: without checksums
        self.lines: LineChecksums | None = None  # of its history

    @contextmanager
    def locked(self) -> Iterator[Store]:
        """Creates the folder and keeps every other process out; a kill releases it. InUse if another one is there."""
        lock = LockFile(self.lock_file)
        with writing_to(self.folder):
            make_folder(self.checkpoint_folder, self.folder)
            if not lock.acquire():
                raise InUse(f"another process is working in {self.folder}: wait for it, or stop it")
        self.check_lock = lock.check
        try:
            yield self
        finally:
            self.check_lock = not_locked
            lock.release()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One clear line where nothing can be written, and where another process may own the folder by now."""
        self.check_lock()
        try:
            with writing_to(self.folder):
                yield
        except UserError:
            self.check_lock()  # a folder that is gone explains a file that is missing
            raise

    def replace_file(self, name: str, content: bytes) -> None:
        """Write a file of the folder in one move, within `writing`; LockLost rather than into another folder."""
        with replacing(self.folder / name, check=self.check_lock) as file:
            file.write(content)

    def write_manifest(self) -> None:
        """Write checksums.json, where the folder has one, within `writing`."""
        if self.manifest is not None:
            self.replace_file(checksums.FILE, self.manifest.content())

    # The experiment ---------------------------------------------------------------------------------------------------

    def holds_a_run(self) -> bool:
        return (self.folder / "config.toml").exists()

    def experiment(self) -> Experiment:
        if not self.holds_a_run():
            self._refuse_a_history_alone()
            raise UserError(f"{self.folder} holds no run (there is no config.toml in it)")
        self.check_format()
        self.check_content("config.toml", self.read("config.toml"))
        return self.as_begun(load_experiment(self.folder / "config.toml"))

    def as_begun(self, experiment: Experiment) -> Experiment:
        """The experiment with the engine that trained the rounds of this folder (see `Experiment.as_begun`)."""
        begun_as = self.read_json("versions.json").get("experiment")
        return experiment.as_begun(begun_as) if isinstance(begun_as, str) else experiment

    def refuse_another(self, experiment: Experiment) -> None:
        """UserError unless the folder holds a part of this experiment, or nothing."""
        if (self.folder / "study.json").exists():
            raise UserError(f"{self.folder} holds a comparison: {ANOTHER_FOLDER}")
        if not self.holds_a_run():
            if (self.folder / HISTORY).exists():
                self._refuse_a_history_alone()
            return
        experiment = self.as_begun(experiment)
        try:
            there = self.experiment()
        except ChangedConfig:
            # The settings to run are given, and versions.json identifies the experiment of the folder.
            begun_as = self.read_json("versions.json", "experiment")["experiment"]
            if begun_as not in experiment.trajectories() or experiment.rounds < newest_checkpoint(self.folder):
                raise
            return
        if there.trajectory() != experiment.trajectory():
            differences = there.differences(experiment)
            raise UserError(f"{self.folder} holds another experiment ({differences}): {ANOTHER_FOLDER}")
        if experiment.rounds < there.rounds:
            raise UserError(
                f"{self.folder} holds a run of {there.rounds} rounds, more than the {experiment.rounds} asked for: "
                f"ask for {there.rounds} or more"
            )

    def _refuse_a_history_alone(self) -> None:
        """config.toml is written before the first round: rounds without it belong to an unknown experiment."""
        if self.rounds():
            raise UserError(f"{self.folder} has a history, and its config.toml is gone: {RESTORE}")

    def check_format(self) -> None:
        written = self.read_json("versions.json").get("format")
        if written != FORMAT:
            raise UserError(
                f"{self.folder} was written in run-folder format {written}; this fedgg {__version__} reads {FORMAT}"
            )

    def create(self, federation: Federation, inputs: dict[str, Any]) -> None:
        """Write all files of a new run; config.toml last, since its presence says that the folder is complete.

        `inputs`: the content of inputs.json.
        """
        if any((self.folder / name).exists() for name in ("study.json", "config.toml", HISTORY)):
            self.refuse_another(federation.experiment)
        origin, attack = federation.origin, federation.aggregation.attack
        partition, positions = origin.described(), origin.positions()
        if origin.keeper == "here" and any(map(len, federation.feed.held_out)):
            positions["held_out"] = np.unique(np.concatenate(federation.feed.held_out))
        if federation.unseen:
            partition["unseen"] = federation.unseen
        with BytesIO() as file:
            np.savez_compressed(file, allow_pickle=False, **positions)
            compressed = file.getvalue()
        contents = {
            "versions.json": indented_json({"format": FORMAT, **versions_of(federation)}),
            # On one line: a line for each number would be megabytes where clients are many.
            "partition.json": json.dumps(partition).encode() + b"\n",
            "inputs.json": indented_json(inputs),
            "partition.npz": compressed,
        }
        if attack is not None:
            contents["attackers.json"] = indented_json({"kind": attack.kind, "clients": sorted(attack.clients)})
        config = {"config.toml": federation.experiment.to_toml().encode()}
        self.manifest = Manifest({name: sha256(content) for name, content in {**contents, **config}.items()})
        self.lines = LineChecksums()
        with self.writing():
            for name, content in {**contents, checksums.FILE: self.manifest.content(), **config}.items():
                self.replace_file(name, content)

    def code_files(self) -> dict[str, Any]:
        """By part: path and SHA-256 of the code that the run began with, as the folder records it."""
        files = self.read_json("versions.json").get("code_files")
        return files if isinstance(files, dict) else {}

    # Rounds and checkpoints -------------------------------------------------------------------------------------------

    def append(self, record: dict[str, Any]) -> None:
        """Add a round to the history."""
        line = json.dumps(record).encode() + b"\n" if self.lines is None else self.lines.next_line(record)
        with self.writing(), open_in_place(self.folder / HISTORY, "ab") as file:
            self.check_lock()  # a folder that is replaced from now on leaves the open file behind
            file.write(line)
        if self.lines is not None:
            self.lines.add(line)

    def rounds(self) -> list[dict[str, Any]]:
        """The history, as far as it is undamaged."""
        return self.history().rounds

    def history(self) -> IntactRounds:
        content = self.read(HISTORY) if (self.folder / HISTORY).exists() else b""
        return read_intact_rounds(content, checksums_required=(self.folder / checksums.FILE).exists())

    def finished_rounds(self) -> list[dict[str, Any]]:
        """The history of a run that has ended, which must be whole."""
        summary, recorded = self._summary()
        history = self.history()
        rounds_done = summary["rounds_done"]
        damage = history.damage
        if damage is None and len(history.rounds) < rounds_done:
            damage = f"it ends at round {len(history.rounds)}, and summary.json says that {rounds_done} were done"
        if damage is None and recorded.get(HISTORY, history.sha256(rounds_done)) != history.sha256(rounds_done):
            damage = "it is another history than that of summary.json"
        if damage is not None:
            raise UserError(f"{self.folder / HISTORY} is damaged ({damage}): put the file back, or try fedgg resume")
        return history.rounds

    def write(self, content: Snapshot) -> set[int]:
        """Write a checkpoint and remove the oldest; returns the rounds of those that remain. May run in a thread.

        The history is synced to the disk first, since a resumed run starts from both. It may have more rounds by now.
        """
        with self.writing():
            with suppress(FileNotFoundError), open_in_place(self.folder / HISTORY, "r+b") as history:
                os.fsync(history.fileno())
            path = self.checkpoint_folder / f"{content.rounds_done:06d}.safetensors"
            write_snapshot(path, content, self.check_lock)
            paths = checkpoints_in(self.folder)
            self.check_lock()  # these paths are of this run
            for old in paths[:-KEPT_CHECKPOINTS]:
                old.unlink()
        return {int(path.stem) for path in paths[-KEPT_CHECKPOINTS:]}

    def digests(self) -> dict[str, str]:
        """SHA-256 of the history so far and of the files that do not grow with it."""
        if self.manifest is None or self.lines is None:
            return {}
        return {HISTORY: self.lines.sha256.hexdigest(), **self.manifest.files}

    def settled(self) -> int:
        """The round of the oldest checkpoint: no resume starts earlier; 0 before there is one."""
        return min((int(path.stem) for path in checkpoints_in(self.folder)), default=0)

    # The end ----------------------------------------------------------------------------------------------------------

    def finish(self, weights: Rows, unsaved: Rows, summary: dict[str, Any]) -> None:
        """`unsaved`: buffers that are not among the weights and that training changed."""
        recorded = self.digests()
        with self.writing():
            for name, tensors in (("buffers.safetensors", unsaved), ("model.safetensors", weights)):
                if tensors:
                    content = save({key: rows.detach().cpu().contiguous().clone() for key, rows in tensors.items()})
                    self.replace_file(name, content)
                    recorded |= {name: sha256(content)} if recorded else {}
            if recorded:
                summary = checksums.with_checksum({**summary, "checksums": recorded})
            self.replace_file("summary.json", indented_json(summary))

    def damage_of_final(self, name: str) -> str | None:
        """What is wrong with a file that was written at the end, model.safetensors or buffers.safetensors."""
        expected = self._summary()[1].get(name)
        if expected is None:
            return None
        try:
            fits = checksums.sha256_of(self.folder / name) == expected
        except OSError as error:
            return f"{self.folder / name} cannot be read ({error.strerror or error})"
        return None if fits else f"{self.folder / name} is damaged (its SHA-256 is not the one in summary.json)"

    def check_final(self, name: str) -> None:
        if (damage := self.damage_of_final(name)) is not None:
            raise UserError(f"{damage}: fedgg resume {self.folder} writes it again from the last checkpoint")

    def summary(self) -> dict[str, Any] | None:
        return self._summary()[0] if (self.folder / "summary.json").exists() else None

    def _summary(self) -> tuple[dict[str, Any], dict[str, str]]:
        """How the run ended, and the checksums that were written down with it."""
        content = self.read_json("summary.json", "status", "rounds_done")
        try:
            return summary_in(content, checksum_required=(self.folder / checksums.FILE).exists())
        except ValueError as error:
            raise UserError(
                f"{self.folder / 'summary.json'} is broken ({error}): delete the file and resume the run, and it is "
                f"written again"
            ) from error

    # Single files -----------------------------------------------------------------------------------------------------

    def read_json(self, name: str, *keys: str) -> dict[str, Any]:
        """The object in a file; UserError if it does not fit its SHA-256, or lacks one of the keys."""
        path = self.folder / name
        raw = self.read(name, LARGE if name == "partition.json" else None)
        self.check_content(name, raw)
        try:
            content = parse_json(raw)
        except ValueError as error:
            raise UserError(f"{path} cannot be read ({error}): this is no complete run folder") from error
        if not isinstance(content, dict):
            raise UserError(f"{path} is not what fedgg wrote: this is no run folder")
        for key in keys:
            if key not in content:
                raise UserError(f"{path} lacks {key!r}: this is no complete run folder")
        return content

    def read(self, name: str, limit: int | None = None) -> bytes:
        path = self.folder / name
        try:
            return read_bytes(path, limit)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror or error}): this is no complete run folder"
            ) from error

    def check_content(self, name: str, content: bytes) -> None:
        """UserError if the file is listed with another SHA-256 than that of its content."""
        known = known_checksums(self.folder)
        if known is None:
            return
        if known.fault is not None and not known.files:
            raise UserError(f"{self.folder / checksums.FILE} cannot be used ({known.fault}): {RESTORE}")
        if known.fits(name, sha256(content)):
            return
        path = self.folder / name
        changed = f"{path} is not as fedgg wrote it (its SHA-256 is not the one in {known.source})"
        if name == "config.toml":
            raise ChangedConfig(
                f"{changed}: if it is damaged, put it back; if you edited it, `fedgg run {path} --out {self.folder}` "
                f"takes over what may change, and `fedgg resume {self.folder} --rounds N` is for more rounds"
            )
        raise UserError(f"{changed}: {RESTORE}")
