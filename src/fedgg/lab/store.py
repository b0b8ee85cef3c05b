"""The run folder: what was asked, what happened round by round, and where to go on.

config.toml       the experiment, complete
checksums.json    SHA-256 of config.toml and of what is written once; lines and objects elsewhere carry their own
versions.json     format of this folder; fedgg, its commit, torch, Python, machine; hash of experiment and data; the
                  engine at the start, its precision, and why it was chosen
attackers.json    the clients that attack, where some do
inputs.json       what the final model expects of its inputs: shape, scaling, classes and how they are labelled
partition.npz     the examples of all clients in a row, and how many each has; partition.json: hash and counts by class
rounds.jsonl      one line a round
resumes.jsonl     one line each time the run was taken up again, where it was
flower.json       of a run over Flower: its name on messages, its clients; exchanges.jsonl: what went over the network
checkpoint/       the two latest states; *.slots: what clients keep between rounds, where that is much
summary.json      how it ended; model.safetensors: the final model under the module's own names; buffers.safetensors:
                  what training changed of the buffers that a module's state_dict leaves out, where it did
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from fedgg import __version__
from fedgg.core.client_rows import Rows
from fedgg.core.layout import Layout
from fedgg.errors import UserError
from fedgg.files import (
    LARGE,
    append_line,
    make_folder,
    open_to_append,
    parse_json,
    read_bytes,
    replacing,
    write_atomically,
)
from fedgg.lab.build import Federation
from fedgg.lab.checkpoint import BadCheckpoint, pin, read_checkpoint, write_checkpoint
from fedgg.lab.client_state import RowsOnDisk
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.name_resolution import engine_class, used_code
from fedgg.lab.predictions import Inputs
from fedgg.lab.provenance import code_of, commit, structure_of
from fedgg.lab.run_state import State
from fedgg.output_files import check_reachable, write_json, writing_to
from fedgg.runfolder import checksums
from fedgg.runfolder.checksums import HISTORY, LineChecksums, Manifest, known_checksums, newest_checkpoint, sha256
from fedgg.runfolder.locks import InUse, LockFile
from fedgg.runfolder.rounds import IntactRounds, read_intact_rounds
from fedgg.runfolder.schema import summary_in

FORMAT = 1
KEPT_CHECKPOINTS = 2
AFRESH = "put the file back, or move the folder away to run it afresh"


class ChangedConfig(UserError):
    """config.toml is not what this library wrote."""


class Store:
    """One run folder, held by one process at a time."""

    def __init__(self, folder: Path):
        check_reachable(folder)
        self.folder = folder
        self._lock: LockFile | None = None
        self._manifest: Manifest | None = None  # of a folder that was opened to be written; None: without checksums
        self._lines: LineChecksums | None = None  # of its history

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def lock_file(self) -> Path:
        return self.folder / "lock"

    @contextmanager
    def locked(self) -> Iterator[Store]:
        """Creates the folder and keeps every other process out; a kill releases it. InUse if another one is there."""
        lock = LockFile(self.lock_file)
        with writing_to(self.folder):
            make_folder(self.checkpoint_folder, self.folder)
            if not lock.acquire():
                raise InUse(f"another process is working in {self.folder}: wait for it, or stop it")
        self._lock = lock
        try:
            yield self
        finally:
            self._lock = None
            lock.release()

    def check_lock(self) -> None:
        """LockLost if this process locked the folder and it was removed or replaced since."""
        if self._lock is not None:
            self._lock.check()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One clear line where nothing can be written, and where another process may own the folder by now."""
        self.check_lock()
        try:
            with writing_to(self.folder):
                yield
        except UserError:
            self.check_lock()  # a folder that is gone explains a file that is missing
            raise

    # What was asked ---------------------------------------------------------------------------------------------------

    def holds_a_run(self) -> bool:
        return (self.folder / "config.toml").exists()

    def experiment(self) -> Experiment:
        if not self.holds_a_run():
            self._refuse_a_history_alone()
            raise UserError(f"{self.folder} holds no run (there is no config.toml in it)")
        self.check_format()
        path = self.folder / "config.toml"
        self._check("config.toml", self._read("config.toml"))
        return self.as_begun(load_experiment(path))

    def as_begun(self, experiment: Experiment) -> Experiment:
        """The experiment with the engine that trained the rounds of this folder (see `Experiment.as_begun`)."""
        if not self.holds_a_run():
            return experiment
        begun_as = self._json("versions.json").get("experiment")
        return experiment.as_begun(begun_as) if isinstance(begun_as, str) else experiment

    def _check(self, name: str, content: bytes) -> None:
        """UserError if the file is listed with another SHA-256 than that of its content."""
        known = known_checksums(self.folder)
        if known is None:
            return
        if known.fault is not None and not known.files:
            raise UserError(f"{self.folder / checksums.FILE} cannot be used ({known.fault}): {AFRESH}")
        if known.fits(name, sha256(content)):
            return
        path = self.folder / name
        changed = f"{path} is not as fedgg wrote it (its SHA-256 is not the one in {known.source})"
        if name == "config.toml":
            raise ChangedConfig(
                f"{changed}: if it is damaged, put it back; if you edited it, `fedgg run {path} --out {self.folder}` "
                f"takes over what may change, and `fedgg resume {self.folder} --rounds N` is for more rounds"
            )
        raise UserError(f"{changed}: {AFRESH}")

    def refuse_another(self, experiment: Experiment) -> None:
        """Whatever lies here must be a part of this experiment, or nothing."""
        if (self.folder / "study.json").exists():
            raise UserError(f"{self.folder} holds a comparison: choose another folder (--out, or out= in Python)")
        if not self.holds_a_run():
            self._refuse_a_history_alone()
            return
        experiment = self.as_begun(experiment)
        try:
            there = self.experiment()
        except ChangedConfig:
            # What is to be run is given. versions.json says what the folder is of.
            begun_as = self._facts("versions.json", "experiment")["experiment"]
            if begun_as not in experiment.trajectories() or experiment.rounds < newest_checkpoint(self.folder):
                raise
            return
        if there.trajectory() != experiment.trajectory():
            differences = there.differences(experiment)
            raise UserError(
                f"{self.folder} holds another experiment ({differences}): choose another folder (--out, or out= in "
                f"Python)"
            )
        if experiment.rounds < there.rounds:
            raise UserError(
                f"{self.folder} holds a run of {there.rounds} rounds, more than the {experiment.rounds} asked for: "
                f"ask for {there.rounds} or more"
            )

    def _refuse_a_history_alone(self) -> None:
        """config.toml is there before the first round: without it nobody knows what the rounds are of."""
        if self.rounds():
            raise UserError(
                f"{self.folder} has a history, and its config.toml is gone: put the file back, or move the folder away "
                f"to run it afresh"
            )

    def check_format(self) -> None:
        found = self._json("versions.json").get("format")
        if found != FORMAT:
            raise UserError(
                f"{self.folder} was written in run-folder format {found}; this fedgg {__version__} reads {FORMAT}"
            )

    def create(self, federation: Federation) -> None:
        """Write down what was asked; config.toml last, since its presence says that the folder is complete."""
        self.refuse_another(federation.experiment)
        origin = federation.origin
        with self._writing():
            write_json(self.folder / "versions.json", _versions(federation))
            # On one line: a line for each number would be megabytes where clients are many.
            write_atomically(self.folder / "partition.json", json.dumps(origin.described()).encode() + b"\n")
            inputs = Inputs.of(origin, federation.experiment.data.normalise, federation.feed.scaling)
            write_json(self.folder / "inputs.json", inputs.to_json())
            if (attack := federation.aggregation.attack) is not None:
                write_json(self.folder / "attackers.json", {"kind": attack.kind, "clients": sorted(attack.clients)})
            with replacing(self.folder / "partition.npz") as file:
                np.savez_compressed(file, allow_pickle=False, **origin.positions())
            names = ["versions.json", "partition.json", "inputs.json", "partition.npz"]
            names += ["attackers.json"] if federation.aggregation.attack is not None else []
            config = federation.experiment.to_toml().encode()
            files = {name: checksums.sha256_of(self.folder / name) for name in names}
            self._manifest, self._lines = Manifest(files | {"config.toml": sha256(config)}), LineChecksums()
            self._manifest.write(self.folder)
            write_atomically(self.folder / "config.toml", config)

    def update(self, experiment: Experiment, last_round: int) -> list[str]:
        """The same path may be followed further than was asked at first; a finished run is then no longer finished.

        Nor is one whose privacy allows more rounds by a better accountant than that of its time. Returns a sentence for
        each file that had to be written again.
        """
        self._manifest = known_checksums(self.folder)
        notices = self._mend_manifest()
        try:
            changed = experiment.hash() != self.experiment().hash()
        except ChangedConfig as damage:
            changed = True
            notices.append(f"config.toml is written again with the settings that were given: {damage}")
        summary = self.summary()
        with self._writing():
            if changed:
                self._write_config(experiment.to_toml().encode())
            ended = summary and summary["status"] in ("finished", "spent")
            if summary and ended and summary["rounds_done"] < (experiment.rounds if changed else last_round):
                (self.folder / "summary.json").unlink()
        return notices

    def _write_config(self, content: bytes) -> None:
        """A kill at any time leaves a config.toml that checksums.json knows."""
        if self._manifest is None:
            write_atomically(self.folder / "config.toml", content)
            return
        changing = self._manifest.with_config(content)
        changing.write(self.folder)
        write_atomically(self.folder / "config.toml", content)
        self._manifest = replace(changing, replaced=None)
        self._manifest.write(self.folder)

    def _mend_manifest(self) -> list[str]:
        """A checksums.json that is missing or damaged is written again, from what a checkpoint or the summary says."""
        known = self._manifest
        if known is None or known.fault is None:
            return []
        resumes = self.folder / "resumes.jsonl"
        lines = read_bytes(resumes).count(b"\n") if resumes.exists() else 0
        self._manifest = replace(known, fault=None, resumes=lines)
        with self._writing():
            self._manifest.write(self.folder)
        return [
            f"{checksums.FILE} could not be used ({known.fault}) and is written again: the other files are unchanged"
        ]

    def forget_divergence(self) -> str | None:
        """Why a run diverged, if it did; it is then unfinished again. For runs whose clients may send other numbers."""
        summary = self.summary()
        if summary is None or summary["status"] != "diverged":
            return None
        with self._writing():
            (self.folder / "summary.json").unlink()
        return str(summary["why"])

    def code_files(self) -> dict[str, Any]:
        """By part: path and SHA-256 of the code it began with, as the folder says it."""
        files = self._json("versions.json").get("code_files")
        return files if isinstance(files, dict) else {}

    def check_same(self, federation: Federation) -> list[str]:
        """Refuse to go on with other settings, data or split; name what else has changed since."""
        versions = self._facts("versions.json", "experiment", "data", "model", "fedgg", "torch", "machine", "device")
        self.refuse_another(federation.experiment)
        for name in ("partition.npz", "inputs.json", "attackers.json"):  # others are checked as they are read
            if (self.folder / name).exists():
                self._check(name, self._read(name, LARGE))
        if versions["experiment"] not in federation.experiment.trajectories():
            raise UserError(
                f"{self.folder / 'config.toml'} was changed since the run began: it is another experiment now"
            )
        if versions["model"] != _shape_of(federation.net.layout):
            raise UserError(f"{self.folder} was started with a model of other parameters: choose another folder")
        _refuse_another_keeper(self.folder, versions.get("keeper", "here"), federation.origin.keeper)
        if versions["data"] != federation.origin.fingerprint:
            raise UserError(f"{self.folder} was started on other data than {federation.origin.name} holds now")
        if self._facts("partition.json", "hash")["hash"] != federation.origin.split_hash():
            raise UserError(f"{self.folder} was started on another split of the data than this fedgg draws")
        now = _versions(federation)
        own = ":" in federation.experiment.model.name  # from Python or a file; versions tell of ours
        same = versions.get("structure") in (None, now["structure"]) or versions["torch"] != now["torch"]
        if own and not same:
            raise UserError(f"{self.folder} was started with a model of other layers: choose another folder")
        surroundings = [
            f"started under {key} {versions[key]}, goes on under {now[key]}: bits may differ"
            for key in ("fedgg", "torch", "machine", "device")
            if versions[key] != now[key]
        ]
        return [*_changed_code(versions.get("code", {}), now["code"]), *surroundings]

    # What happened ----------------------------------------------------------------------------------------------------

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n" if self._lines is None else self._lines.next_line(record)
        with self._writing():
            append_line(self.folder / HISTORY, line[:-1].decode(), self.check_lock)
        if self._lines is not None:
            self._lines.add(line)

    def rounds(self) -> list[dict[str, Any]]:
        """The history, as far as it is undamaged."""
        return self._history().rounds

    def _history(self) -> IntactRounds:
        content = self._read(HISTORY) if (self.folder / HISTORY).exists() else b""
        return read_intact_rounds(content, checksums_required=(self.folder / checksums.FILE).exists())

    def finished_rounds(self) -> list[dict[str, Any]]:
        """The history of a run that has ended, which must be whole."""
        summary, recorded = self._summary()
        history = self._history()
        done = summary["rounds_done"]
        damage = history.damage
        if damage is None and len(history.rounds) < done:
            damage = f"it ends at round {len(history.rounds)}, and summary.json says that {done} were done"
        if damage is None and recorded.get(HISTORY, history.sha256(done)) != history.sha256(done):
            damage = "it is another history than that of summary.json"
        if damage is not None:
            raise UserError(f"{self.folder / HISTORY} is damaged ({damage}): put the file back, or try fedgg resume")
        return history.rounds

    def cut_history(self, rounds: int) -> list[dict[str, Any]]:
        """Drop what lies beyond the checkpoint: those rounds are played again, and the run has not ended."""
        history = self._history()
        if len(history.rounds) < rounds:
            damage = history.damage or f"it has {len(history.rounds)} rounds, the checkpoint {rounds}"
            raise UserError(f"{self.folder / HISTORY} is damaged ({damage}): history was lost; {AFRESH}")
        summary = self.summary()
        with self._writing():
            if summary is not None and summary["rounds_done"] > rounds:
                (self.folder / "summary.json").unlink()
            for path in self._checkpoints():
                if (
                    _round_of(path) > rounds
                ):  # refused; a name of a later round than the history has is a sign of damage
                    path.replace(path.with_name(f"{path.name}.refused"))
            write_atomically(self.folder / HISTORY, history.up_to(rounds))
        self._lines = None if self._manifest is None else LineChecksums(history.up_to(rounds))
        return history.rounds[:rounds]

    def note_resume(self, rounds_done: int, notes: list[str], engine: dict[str, str]) -> None:
        """That an unfinished run was taken up again, after which round, when, by which engine, and what was said."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"after_round": rounds_done, "when": now, "notes": notes, "engine": engine}
        file = self.folder / "resumes.jsonl"
        with self._writing():
            if self._manifest is None:
                append_line(file, json.dumps(line), self.check_lock)
                return
            self._manifest = replace(self._manifest, resumes=checksums.append_checked(file, line, self.check_lock))
            self._manifest.write(self.folder)

    # Where to go on ---------------------------------------------------------------------------------------------------

    def save(self, state: State, experiment: Experiment) -> None:
        """The history goes onto the disk first: what a checkpoint stands on is not played again."""
        with self._writing():
            with open_to_append(self.folder / "rounds.jsonl") as history:
                os.fsync(history.fileno())
            path = self.checkpoint_folder / f"{state.rounds_done:06d}.safetensors"
            write_checkpoint(path, state, experiment.trajectory(), self._checksums())
            for old in self._checkpoints()[:-KEPT_CHECKPOINTS]:
                old.unlink()
        there = {_round_of(path) for path in self._checkpoints()}
        for rows in (state.memory, state.kept_buffers):
            if isinstance(rows, RowsOnDisk):
                pinned = rows.shelf.pinned | {state.rounds_done: rows.places}
                rows.shelf.pinned = {number: places for number, places in pinned.items() if number in there}

    def _checksums(self) -> dict[str, str]:
        """SHA-256 of the history so far and of the files that do not grow with it."""
        if self._manifest is None or self._lines is None:
            return {}
        return {HISTORY: self._lines.hexdigest(), **self._manifest.files}

    def latest(self, experiment: Experiment, device: torch.device) -> tuple[State | None, list[str]]:
        """The newest state that can be trusted and that the history leads to, and a word on each that cannot."""
        refused: list[str] = []
        paths, history, known = self._checkpoints(), self._history(), known_checksums(self.folder)
        if known is None and history.has_checksums:
            raise UserError(f"{self.folder / checksums.FILE} is missing: {AFRESH}")
        for number, path in reversed(list(enumerate(paths))):
            try:
                state = read_checkpoint(path, experiment.trajectories(), device)
                _check_history(history, path, state.rounds_done, known)
                pin(state, {_round_of(older): older for older in paths[:number]})
                return state, refused
            except BadCheckpoint as reason:
                refused.append(f"checkpoint {path.name} is refused: {reason}")
        if refused and (history.rounds or known is not None):
            raise UserError(
                f"{self.folder}: {'; '.join(refused)}. None is left: put back what is damaged, or start anew in "
                f"another folder"
            )
        return None, refused

    def settled(self) -> int:
        """The round of the oldest checkpoint: no resume goes back further; 0 before there is one."""
        return min(map(_round_of, self._checkpoints()), default=0)

    def _checkpoints(self) -> list[Path]:
        return sorted(self.checkpoint_folder.glob("[0-9]*.safetensors"))

    # How it ended -----------------------------------------------------------------------------------------------------

    def finish(self, weights: Rows, unsaved: Rows, summary: dict[str, Any]) -> None:
        """`unsaved`: buffers that are not among the weights and that training changed."""
        with self._writing():
            if unsaved:
                write_atomically(self.folder / "buffers.safetensors", _packed(unsaved))
            write_atomically(self.folder / "model.safetensors", _packed(weights))
            if recorded := self._checksums():
                names = ["model.safetensors", *(["buffers.safetensors"] if unsaved else [])]
                recorded |= {name: checksums.sha256_of(self.folder / name) for name in names}
                summary = checksums.with_checksum({**summary, "checksums": recorded})
            write_json(self.folder / "summary.json", summary)

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

    def inputs(self, dtype: torch.dtype) -> Inputs:
        """What the final model expects of its inputs."""
        try:
            return Inputs.from_json(self._json("inputs.json"), dtype)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.folder / 'inputs.json'} is not what fedgg wrote ({error!r}): this is no run folder"
            ) from error

    def structure(self) -> tuple[str | None, str]:
        """A hash of the layers of the model that was trained, and the torch version that made it."""
        versions = self._facts("versions.json", "torch")
        return versions.get("structure"), str(versions["torch"])

    def summary(self) -> dict[str, Any] | None:
        return self._summary()[0] if (self.folder / "summary.json").exists() else None

    def _summary(self) -> tuple[dict[str, Any], dict[str, str]]:
        """How the run ended, and the checksums that were written down with it."""
        content = self._facts("summary.json", "status", "rounds_done")
        try:
            return summary_in(content, checksum_required=(self.folder / checksums.FILE).exists())
        except ValueError as error:
            raise UserError(
                f"{self.folder / 'summary.json'} is broken ({error}): delete the file and resume the run, and it is "
                f"written again"
            ) from error

    def _facts(self, name: str, *keys: str) -> dict[str, Any]:
        content = self._json(name)
        for key in keys:
            if key not in content:
                raise UserError(f"{self.folder / name} lacks {key!r}: this is no complete run folder")
        return content

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        raw = self._read(name, LARGE if name == "partition.json" else None)
        self._check(name, raw)
        try:
            content = parse_json(raw)
        except ValueError as error:
            raise UserError(f"{path} cannot be read ({error}): this is no complete run folder") from error
        if not isinstance(content, dict):
            raise UserError(f"{path} is not what fedgg wrote: this is no run folder")
        return content

    def _read(self, name: str, limit: int | None = None) -> bytes:
        path = self.folder / name
        try:
            return read_bytes(path, limit)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror or error}): this is no complete run folder"
            ) from error


def _check_history(history: IntactRounds, checkpoint: Path, rounds: int, known: Manifest | None) -> None:
    """BadCheckpoint if the history does not lead to it, or other files are not those it was written with."""
    if known is None:
        return
    if len(history.rounds) < rounds:
        ends = history.damage or f"it ends at round {len(history.rounds)}"
        raise BadCheckpoint(f"{HISTORY} is damaged ({ends})")
    try:
        recorded = checksums.checkpoint_checksums(checkpoint)
    except (OSError, ValueError) as error:
        raise BadCheckpoint(str(error)) from error
    if recorded.get(HISTORY) != history.sha256(rounds):
        raise BadCheckpoint(f"{HISTORY} has other rounds than those that led to it")
    for name in recorded.keys() & known.files.keys() - {"config.toml"}:  # that one may be changed
        if recorded[name] != known.files[name]:
            raise BadCheckpoint(f"it was written beside another {name}")


def _round_of(checkpoint: Path) -> int:
    return int(checkpoint.stem)


def _refuse_another_keeper(folder: Path, then: str, now: str) -> None:
    """Whoever went on without what the clients have kept would train something else."""
    if then == now:
        return
    if then == "nodes":
        raise UserError(f"the clients of {folder} keep their memory on Flower's nodes: go on there, with the same app")
    raise UserError(f"the clients of {folder} keep their memory in it: go on with fedgg resume, without Flower")


def _shape_of(layout: Layout) -> str:
    """Two models handed in from Python may share a name; their parameters tell them apart."""
    described = [f"{name}{tuple(shape)}" for name, shape in zip(layout.names, layout.shapes, strict=True)]
    return hashlib.sha256(" ".join(described).encode()).hexdigest()


def _packed(tensors: Rows) -> bytes:
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def _changed_code(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"the code of the {part} has changed since this run began, and its rounds so far are of the old code: choose "
        f"another folder to start over"
        for part, code in now.items()
        if code is not None and then.get(part) not in (None, code)
    ]


def _code(federation: Federation) -> dict[str, str | None]:
    """Fingerprints of the user code that trains and aggregates; data and split are known by their content."""
    parts = {"algorithm": code_of(federation.algorithm), "model": code_of(federation.net.module)}
    rule, engine = code_of(federation.aggregation.collector), code_of(engine_class(federation.engine))
    return parts | ({} if rule is None else {"robust": rule}) | ({} if engine is None else {"engine": engine})


def _code_files(experiment: Experiment) -> dict[str, Any]:
    """The files of code that the experiment names, where it does."""
    files = used_code(experiment)
    return {"code_files": files} if files else {}


def described_engine(federation: Federation) -> dict[str, str]:
    """Who trains the clients, in which precision, and why that engine."""
    precision = federation.experiment.engine.precision
    if federation.origin.keeper == "nodes":
        return {"name": "flower", "precision": precision, "reason": "clients train on nodes of their own"}
    return {"name": federation.engine, "precision": precision, "reason": federation.choice.reason}


def _versions(federation: Federation) -> dict[str, Any]:
    device = federation.net.start.device
    return {
        "format": FORMAT,
        "experiment": federation.experiment.trajectory(),
        "data": federation.origin.fingerprint,
        "keeper": federation.origin.keeper,
        "model": _shape_of(federation.net.layout),
        "structure": structure_of(federation.net.module),
        "code": _code(federation),
        **_code_files(federation.experiment),
        "fedgg": __version__,
        **commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "engine": described_engine(federation),
    }
