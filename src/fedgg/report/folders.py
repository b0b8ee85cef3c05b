"""Run folders and comparison folders, read back as plain records; this room needs nothing else of the library."""

from __future__ import annotations

import json
import math
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgg.errors import UserError

PROCESSES = "federation/events.jsonl"
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STUDY_FORMAT = 1
BYTES_PER_MEGABYTE = 1_000_000


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run as its folder tells it."""

    path: Path
    config: dict[str, Any]
    rounds: list[dict[str, Any]]
    partition: dict[str, Any] | None
    summary: dict[str, Any] | None
    versions: dict[str, Any] | None = None
    resumes: tuple[dict[str, Any], ...] = ()  # after which round it was taken up again, and what was said of it
    processes: tuple[dict[str, Any], ...] = ()  # of a federation of processes: which of them ended, after which round

    @property
    def status(self) -> str:
        """What the summary says ("finished", "diverged", "spent", "stopped"), and "running" until there is one."""
        return "running" if self.summary is None else str(self.summary.get("status", "running"))

    @property
    def complete(self) -> bool:
        """Whether it has got as far as it was meant to: all rounds, or all that its privacy budget allows."""
        return self.status in ("finished", "spent")

    def split_title(self) -> str:
        """How the data were split, in a few words."""
        split = self.config.get("split", {})
        scheme = str(split.get("scheme", "split"))
        beta = f" {split.get('beta')}" if scheme.startswith("dirichlet") else ""
        return f"{self.config.get('data', {}).get('source', '')}: {scheme}{beta}, seed {self.config.get('seed')}"

    def accuracy(self) -> tuple[Ints, Floats]:
        """The evaluated rounds and their test accuracies."""
        evaluated = [line for line in self.rounds if _evaluated(line)]
        rounds = np.array([line["round"] for line in evaluated], dtype=np.int64)
        return rounds, np.array([line["test_accuracy"] for line in evaluated], dtype=np.float64)

    @property
    def seconds(self) -> float:
        """What its rounds took, training and looking together."""
        told = [sum(line["seconds"].values()) for line in self.rounds if isinstance(line.get("seconds"), dict)]
        return float(sum(told)) if told else float((self.summary or {}).get("seconds") or 0.0)

    def megabytes(self, ways: tuple[str, ...] = ("up", "down")) -> Floats:
        """What all clients together had sent up and received by each evaluated round, in MB of 10^6 bytes."""
        per_round = [sum(int(line.get(f"bytes_{way}") or 0) for way in ways) for line in self.rounds]
        so_far = np.cumsum(np.array(per_round, dtype=np.float64)) / BYTES_PER_MEGABYTE
        at_evaluation: Floats = so_far[np.array([_evaluated(line) for line in self.rounds], dtype=bool)]
        return at_evaluation

    def reading(self, name: str) -> tuple[Ints, Floats]:
        """The rounds in which the algorithm told this of itself, and the mean over its clients."""
        told = [line for line in self.rounds if _is_number((line.get("readings") or {}).get(name))]
        rounds = np.array([line["round"] for line in told], dtype=np.int64)
        return rounds, np.array([line["readings"][name] for line in told], dtype=np.float64)

    def numbers(self, key: str) -> tuple[Ints, Floats]:
        """The rounds that have a number under `key` ("train_loss", "holdout_accuracy", ...), and those numbers."""
        told = [line for line in self.rounds if _is_number(line.get(key))]
        rounds = np.array([line["round"] for line in told], dtype=np.int64)
        return rounds, np.array([line[key] for line in told], dtype=np.float64)


@dataclass(frozen=True)
class StudyPlan:
    """What a comparison's study.json says: rows, seeds, and where the run of each lies."""

    path: Path
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str
    places: dict[str, dict[int, Path]]


@dataclass(frozen=True, eq=False)
class StudyRecord:
    """A comparison: the runs of every label by seed, as far as they have been started."""

    path: Path
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str
    runs: dict[str, dict[int, RunRecord]]

    @property
    def missing(self) -> list[tuple[str, int]]:
        """The (label, seed) pairs that have no run folder yet."""
        return [(label, seed) for label in self.labels for seed in self.seeds if seed not in self.runs[label]]


def read_run(path: str | Path) -> RunRecord:
    """Read one run folder; a last line that was torn off while it was written is left out."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a run")
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.toml; give a folder that a run has written")
    return RunRecord(
        path=folder,
        config=read_toml(folder / "config.toml"),
        rounds=_read_rounds(folder / "rounds.jsonl"),
        partition=_read_optional(folder / "partition.json"),
        summary=_read_optional(folder / "summary.json"),
        versions=_read_optional(folder / "versions.json"),
        resumes=read_resumes(folder / "resumes.jsonl"),
        processes=read_resumes(folder / PROCESSES),
    )


def read_plan(path: str | Path) -> StudyPlan:
    """Read a comparison folder's study.json; none of the runs it names has to be there."""
    folder = Path(path)
    file = folder / "study.json"
    if not file.is_file():
        raise UserError(f"{folder} is not a comparison folder: it has no study.json; give one that a comparison wrote")
    study = read_object(file)
    if study.get("format") != STUDY_FORMAT:
        raise UserError(
            f"{file} has format {study.get('format')!r} and this version reads {STUDY_FORMAT}; run the comparison again"
        )
    labels, seeds, reference, runs = (study.get(key) for key in ("labels", "seeds", "reference", "runs"))
    if not (isinstance(labels, list) and labels and all(isinstance(label, str) for label in labels)):
        raise _broken(file, "labels is not a list of names")
    if not (isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)):
        raise _broken(file, "seeds is not a list of whole numbers")
    if len(set(labels)) < len(labels) or len(set(seeds)) < len(seeds):
        raise _broken(file, "a label or a seed is listed twice")
    if reference not in labels:
        raise _broken(file, f"the reference {reference!r} is not among the labels")
    if not (isinstance(runs, dict) and all(isinstance(runs.get(label), dict) for label in labels)):
        raise _broken(file, "runs does not name the folders of every label")
    places: dict[str, dict[int, Path]] = {label: {} for label in labels}
    for label in labels:
        for seed in seeds:
            place = _inside(folder, runs[label].get(str(seed)), file)
            if place is not None:
                places[label][seed] = place
    return StudyPlan(folder, tuple(labels), tuple(seeds), str(reference), places)


def read_study(path: str | Path) -> StudyRecord:
    """Read a comparison folder with all its runs; runs that have not started yet are `missing`, not an error."""
    plan = read_plan(path)
    found = {
        # A starting run writes config.toml last, so a folder without one has not started rather than broken.
        label: {seed: read_run(place) for seed, place in by_seed.items() if (place / "config.toml").exists()}
        for label, by_seed in plan.places.items()
    }
    if not any(found.values()):
        raise UserError(f"{plan.path} holds none of the runs that its study.json names; run the comparison first")
    return StudyRecord(plan.path, plan.labels, plan.seeds, plan.reference, found)


def _inside(folder: Path, relative: object, file: Path) -> Path | None:
    if relative is None:
        return None
    if not isinstance(relative, str) or PurePosixPath(relative).is_absolute() or ".." in PurePosixPath(relative).parts:
        raise _broken(file, f"{relative!r} is not a path inside the comparison folder")
    return folder / relative


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _evaluated(line: dict[str, Any]) -> bool:
    return _is_number(line.get("test_accuracy"))


def _broken(file: Path, why: str) -> UserError:
    return UserError(f"{file} is broken: {' '.join(why.split())}; restore the file or run again into a new folder")


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; check the path and its permissions") from error


def read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_bytes(file).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _broken(file, str(error)) from error


def read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_bytes(file))
    except ValueError as error:
        raise _broken(file, str(error)) from error
    if not isinstance(value, dict):
        raise _broken(file, "it does not hold one JSON object")
    return value


def _read_optional(file: Path) -> dict[str, Any] | None:
    return read_object(file) if file.exists() else None


def read_resumes(file: Path) -> tuple[dict[str, Any], ...]:
    """When the run was taken up again; a line torn by a kill is left out."""
    told = []
    for line in _read_bytes(file).split(b"\n") if file.exists() else ():
        with suppress(ValueError):
            told.append(json.loads(line))
    return tuple(line for line in told if isinstance(line, dict))


def _read_rounds(file: Path) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = []
    if file.exists():
        add_rounds(rounds, _read_bytes(file), file)
    return rounds


def add_rounds(rounds: list[dict[str, Any]], content: bytes, file: Path, first_line: int = 1) -> None:
    """Append the rounds that some lines of rounds.jsonl tell to those already known."""
    lines = content.rstrip().split(b"\n")
    for number, line in enumerate(lines, start=first_line):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
        except ValueError as error:
            # Lines are only ever appended, so a kill can tear the last one and no other.
            if number == first_line + len(lines) - 1:
                break
            raise _broken(file, f"line {number}: {error}") from error
        if not isinstance(told, dict) or type(told.get("round")) is not int:
            raise _broken(file, f"line {number} is not a round")
        if rounds and told["round"] <= rounds[-1]["round"]:
            raise _broken(file, f"line {number} tells round {told['round']} after round {rounds[-1]['round']}")
        rounds.append(told)
