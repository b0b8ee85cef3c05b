"""The run folder: what was asked, what happened round by round, and where to go on.

config.toml       the experiment, complete
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors.torch import save

from fedgg.core.layout import Layout
from fedgg.core.rows import Rows
from fedgg.errors import UserError
from fedgg.files import (
    LARGE,
    append_line,
    check_lock,
    make_folder,
    open_to_append,
    parse_lines,
    read_bytes,
    read_json,
    replacing,
    write_atomically,
)
from fedgg.lab.build import Federation
from fedgg.lab.checkpoint import BadCheckpoint, pin, read_checkpoint, write_checkpoint
from fedgg.lab.code import code_of, structure_of
from fedgg.lab.commit import commit
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.files import write_json, writing_to
from fedgg.lab.predictions import Inputs
from fedgg.lab.shelf import RowsOnDisk
from fedgg.lab.state import State
from fedgg.lab.trust import used_code
from fedgg.run_records import check_round, check_summary
from fedgg.version import VERSION

FORMAT = 1
KEPT_CHECKPOINTS = 2


class Store:
    """One run folder, held by one process at a time."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoint"

    @contextmanager
    def locked(self) -> Iterator[Store]:
        """Creates the folder and keeps every other process out; a kill releases it."""
        with writing_to(self.folder):
            make_folder(self.checkpoint_folder, self.folder)
            check_lock(self.folder / "lock")
            lock = FileLock(self.folder / "lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise UserError(f"another process is working in {self.folder}: wait for it, or stop it") from None
        try:
            yield self
        finally:
            lock.release()

    # What was asked ---------------------------------------------------------------------------------------------------

    def holds_a_run(self) -> bool:
        return (self.folder / "config.toml").exists()

    def experiment(self) -> Experiment:
        if not self.holds_a_run():
            self._refuse_a_history_alone()
            raise UserError(f"{self.folder} holds no run (there is no config.toml in it)")
        self.check_format()
        return load_experiment(self.folder / "config.toml")

    def refuse_another(self, experiment: Experiment) -> None:
        """Whatever lies here must be a part of this experiment, or nothing."""
        if (self.folder / "study.json").exists():
            raise UserError(f"{self.folder} holds a comparison: choose another folder (--out, or out= in Python)")
        if not self.holds_a_run():
            self._refuse_a_history_alone()
            return
        there = self.experiment()
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
                f"{self.folder} was written in run-folder format {found}; this fedgg {VERSION} reads {FORMAT}"
            )

    def create(self, federation: Federation) -> None:
        """Write down what was asked; config.toml last, since its presence says that the folder is complete."""
        self.refuse_another(federation.experiment)
        origin = federation.origin
        with writing_to(self.folder):
            write_json(self.folder / "versions.json", _versions(federation))
            # On one line: a line for each number would be megabytes where clients are many.
            write_atomically(self.folder / "partition.json", json.dumps(origin.described()).encode() + b"\n")
            inputs = Inputs.of(origin, federation.experiment.data.normalise, federation.feed.scaling)
            write_json(self.folder / "inputs.json", inputs.to_json())
            if (attack := federation.wrappers.attack) is not None:
                write_json(self.folder / "attackers.json", {"kind": attack.kind, "clients": sorted(attack.clients)})
            with replacing(self.folder / "partition.npz") as file:
                np.savez_compressed(file, allow_pickle=False, **origin.positions())
            write_atomically(self.folder / "config.toml", federation.experiment.to_toml().encode())

    def update(self, experiment: Experiment) -> None:
        """The same path may be followed further than was asked at first; a finished run is then no longer finished."""
        if experiment.hash() == self.experiment().hash():
            return
        summary = self.summary()
        with writing_to(self.folder):
            write_atomically(self.folder / "config.toml", experiment.to_toml().encode())
            ended = summary and summary["status"] in ("finished", "spent")
            if summary and ended and summary["rounds_done"] < experiment.rounds:
                (self.folder / "summary.json").unlink()

    def forget_divergence(self) -> str | None:
        """Why a run diverged, if it did; it is then unfinished again. For runs whose clients may send other numbers."""
        summary = self.summary()
        if summary is None or summary["status"] != "diverged":
            return None
        with writing_to(self.folder):
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
        with writing_to(self.folder):
            append_line(self.folder / "rounds.jsonl", json.dumps(record))

    def rounds(self) -> list[dict[str, Any]]:
        """The history; a last line torn by a kill does not count."""
        path = self.folder / "rounds.jsonl"
        if not path.exists():
            return []
        try:
            content = read_bytes(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error}): this is no run folder") from error
        records: list[dict[str, Any]] = []
        for _, line in parse_lines(content[: content.rfind(b"\n") + 1]):
            try:
                check_round(line)
            except ValueError:
                break
            records.append(line)
        return records

    def cut_history(self, rounds: int) -> list[dict[str, Any]]:
        """Drop what lies beyond the checkpoint: those rounds are played again."""
        records = self.rounds()[:rounds]
        if len(records) < rounds:
            raise UserError(
                f"{self.folder / 'rounds.jsonl'} has {len(records)} rounds, the checkpoint {rounds}: history was lost; "
                f"put the file back, or move the folder away to run it afresh"
            )
        with writing_to(self.folder):
            content = "".join(json.dumps(record) + "\n" for record in records)
            write_atomically(self.folder / "rounds.jsonl", content.encode())
        return records

    def note_resume(self, rounds_done: int, notes: list[str], engine: dict[str, str]) -> None:
        """That an unfinished run was taken up again, after which round, when, by which engine, and what was said."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"after_round": rounds_done, "when": now, "notes": notes, "engine": engine}
        with writing_to(self.folder):
            append_line(self.folder / "resumes.jsonl", json.dumps(line))

    # Where to go on ---------------------------------------------------------------------------------------------------

    def save(self, state: State, experiment: Experiment) -> None:
        """The history goes onto the disk first: what a checkpoint stands on is not played again."""
        with writing_to(self.folder):
            with open_to_append(self.folder / "rounds.jsonl") as history:
                os.fsync(history.fileno())
            write_checkpoint(
                self.checkpoint_folder / f"{state.rounds_done:06d}.safetensors", state, experiment.trajectory()
            )
            for old in self._checkpoints()[:-KEPT_CHECKPOINTS]:
                old.unlink()
        there = {_round_of(path) for path in self._checkpoints()}
        for rows in (state.memory, state.kept_buffers):
            if isinstance(rows, RowsOnDisk):
                pinned = rows.shelf.pinned | {state.rounds_done: rows.places}
                rows.shelf.pinned = {number: places for number, places in pinned.items() if number in there}

    def latest(self, experiment: Experiment, device: torch.device) -> tuple[State | None, list[str]]:
        """The newest state that can be trusted, and a word on each that cannot."""
        refused: list[str] = []
        paths = self._checkpoints()
        for number, path in reversed(list(enumerate(paths))):
            try:
                state = read_checkpoint(path, experiment.trajectories(), device)
                pin(state, {_round_of(older): older for older in paths[:number]})
                return state, refused
            except BadCheckpoint as reason:
                refused.append(f"checkpoint {path.name} is refused: {reason}")
        if refused and self.rounds():
            raise UserError(f"{self.folder}: {'; '.join(refused)}. None is left: start anew in another folder")
        return None, refused

    def settled(self) -> int:
        """The round of the oldest checkpoint: no resume goes back further; 0 before there is one."""
        return min(map(_round_of, self._checkpoints()), default=0)

    def _checkpoints(self) -> list[Path]:
        return sorted(self.checkpoint_folder.glob("[0-9]*.safetensors"))

    # How it ended -----------------------------------------------------------------------------------------------------

    def finish(self, weights: Rows, unsaved: Rows, summary: dict[str, Any]) -> None:
        """`unsaved`: buffers that are not among the weights and that training changed."""
        with writing_to(self.folder):
            if unsaved:
                write_atomically(self.folder / "buffers.safetensors", _packed(unsaved))
            write_atomically(self.folder / "model.safetensors", _packed(weights))
            write_json(self.folder / "summary.json", summary)

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
        if not (self.folder / "summary.json").exists():
            return None
        summary = self._facts("summary.json", "status", "rounds_done")
        try:
            check_summary(summary)
        except ValueError as error:
            raise UserError(
                f"{self.folder / 'summary.json'} {error}: delete the file and resume the run, and it is written again"
            ) from error
        return summary

    def _facts(self, name: str, *keys: str) -> dict[str, Any]:
        content = self._json(name)
        for key in keys:
            if key not in content:
                raise UserError(f"{self.folder / name} lacks {key!r}: this is no complete run folder")
        return content

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            content = read_json(path, LARGE if name == "partition.json" else None)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}): this is no complete run folder") from error
        if not isinstance(content, dict):
            raise UserError(f"{path} is not what fedgg wrote: this is no run folder")
        return content


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


def _code_files(experiment: Experiment) -> dict[str, Any]:
    """The files of code that the experiment names, where it does."""
    files = used_code({"algorithm": experiment.algorithm.name, "model": experiment.model.name})
    return {"code_files": files} if files else {}


def described_engine(federation: Federation) -> dict[str, str]:
    """Who trains the clients, in which precision, and why that engine."""
    precision = federation.experiment.engine.precision
    if federation.origin.keeper == "nodes":
        return {"name": "flower", "precision": precision, "reason": "clients train on nodes of their own"}
    return {"name": federation.engine.name, "precision": precision, "reason": federation.engine.reason}


def _versions(federation: Federation) -> dict[str, Any]:
    device = federation.net.start.device
    return {
        "format": FORMAT,
        "experiment": federation.experiment.trajectory(),
        "data": federation.origin.fingerprint,
        "keeper": federation.origin.keeper,
        "model": _shape_of(federation.net.layout),
        "structure": structure_of(federation.net.module),
        "code": {"algorithm": code_of(federation.algorithm), "model": code_of(federation.net.module)},
        **_code_files(federation.experiment),
        "fedgg": VERSION,
        **commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "engine": described_engine(federation),
    }
