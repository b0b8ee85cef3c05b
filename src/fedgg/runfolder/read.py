"""Run folders and comparison folders, read back as plain records; this room needs nothing else of the library."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgg.errors import UserError
from fedgg.files import LARGE
from fedgg.runfolder.checksums import LineChecksums, known_checksums, newest_checkpoint, sha256
from fedgg.runfolder.faults import Fault, checksum_faults, event_faults, history_checksum_faults, history_faults
from fedgg.runfolder.records import (
    add_rounds,
    broken,
    check_partition,
    is_number,
    parsed_config,
    parsed_object,
    read_bytes,
    read_events,
    read_object,
    summary_in,
)

UNFINISHED = "unfinished"  # at work, or killed: its folder does not tell

PROCESSES = "federation/events.jsonl"
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STUDY_FORMAT = 1
OLD_ACCOUNTANT = "rdp"  # of lines that have an epsilon and name no accountant: docs/run-folder.md
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
    unreadable: tuple[Fault, ...] = ()  # what reading the files found amiss

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        """All that is wrong with the folder, though not so wrong that nothing could be shown."""
        return (*self.unreadable, *history_faults(self.rounds, self.summary))

    @cached_property
    def status(self) -> str:
        """What the summary says ("finished", "diverged", "spent", "stopped"), and "unfinished" until there is one.

        A run whose history is not whole is "damaged", whatever its summary says, unless that is that it diverged.
        """
        told = UNFINISHED if self.summary is None else str(self.summary.get("status", UNFINISHED))
        return "damaged" if told != "diverged" and self.damaged else told

    @property
    def damaged(self) -> bool:
        """Whether its numbers can no longer stand for a whole run."""
        return any(fault.damages for fault in self.faults)

    @property
    def complete(self) -> bool:
        """Whether it has got as far as it was meant to: all rounds, or all that its privacy budget allows."""
        return self.status in ("finished", "spent")

    @property
    def sound(self) -> bool:
        """Whether what it has told so far can be averaged with others."""
        return self.status not in ("diverged", "damaged")

    @property
    def client_names(self) -> tuple[str, ...] | None:
        """By client, where the data give them names."""
        return names_in(self.partition or {})

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

    @property
    def epsilon(self) -> float | None:
        """The privacy spent by the end or so far; infinite without noise, None where the run is not private."""
        told = [place["epsilon"] for place in self._privacy()]
        return max((float(one) if is_number(one) else math.inf for one in told), default=None)

    @property
    def delta(self) -> float | None:
        """The delta beside it."""
        return next((float(place["delta"]) for place in self._privacy() if is_number(place.get("delta"))), None)

    @property
    def accountant(self) -> str | None:
        """How that epsilon is bounded; None where the run is not private, or nothing bounds it."""
        places = [place for place in self._privacy() if is_number(place["epsilon"])]
        return str(places[-1].get("accountant", OLD_ACCOUNTANT)) if places else None

    def _privacy(self) -> list[dict[str, Any]]:
        """Round by round what is spent grows, and a history may be shorter than its end."""
        return [place for place in (*self.rounds[-1:], self.summary or {}) if "epsilon" in place]

    def megabytes(self, ways: tuple[str, ...] = ("up", "down")) -> Floats:
        """What all clients together had sent up and received by each evaluated round, in MB of 10^6 bytes."""
        per_round = [sum(int(line.get(f"bytes_{way}") or 0) for way in ways) for line in self.rounds]
        so_far = np.cumsum(np.array(per_round, dtype=np.float64)) / BYTES_PER_MEGABYTE
        at_evaluation: Floats = so_far[np.array([_evaluated(line) for line in self.rounds], dtype=bool)]
        return at_evaluation

    def reading(self, name: str) -> tuple[Ints, Floats]:
        """The rounds in which the algorithm told this of itself, and the mean over its clients."""
        told = [line for line in self.rounds if is_number((line.get("readings") or {}).get(name))]
        rounds = np.array([line["round"] for line in told], dtype=np.int64)
        return rounds, np.array([line["readings"][name] for line in told], dtype=np.float64)

    def numbers(self, key: str) -> tuple[Ints, Floats]:
        """The rounds that have a number under `key` ("train_loss", "holdout_accuracy", ...), and those numbers."""
        told = [line for line in self.rounds if is_number(line.get(key))]
        rounds = np.array([line["round"] for line in told], dtype=np.int64)
        return rounds, np.array([line[key] for line in told], dtype=np.float64)


@dataclass(frozen=True)
class StudyPlan:
    """What a comparison's study.json says: rows, seeds, and where the run of each lies; rows may lack some seeds."""

    path: Path
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str
    places: dict[str, dict[int, Path]]

    @property
    def planned(self) -> dict[str, tuple[int, ...]]:
        """The seeds each row is to be run with."""
        return {label: tuple(by_seed) for label, by_seed in self.places.items()}


@dataclass(frozen=True, eq=False)
class StudyRecord:
    """A comparison: the runs of every label by seed, as far as they have been started.

    Where several calls have added to it, rows may have different seeds; `seeds` are those of any.
    """

    path: Path
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str
    runs: dict[str, dict[int, RunRecord]]
    unreadable: tuple[tuple[str, int], ...] = ()  # the (label, seed) pairs that have begun but cannot be read
    planned: dict[str, tuple[int, ...]] | None = None  # the seeds each label is to be run with; None: all

    def seeds_of(self, label: str) -> tuple[int, ...]:
        """The seeds that this row has or is to have."""
        return self.seeds if self.planned is None else self.planned[label]

    @property
    def size(self) -> int:
        """How many runs there are once all have been run."""
        return sum(len(self.seeds_of(label)) for label in self.labels)

    @property
    def missing(self) -> list[tuple[str, int]]:
        """The (label, seed) pairs that have no run folder yet, or none that can be read."""
        return [(label, seed) for label in self.labels for seed in self.seeds_of(label) if seed not in self.runs[label]]

    def diverged(self, label: str) -> list[int]:
        """Its seeds that left the finite numbers."""
        return self._of(label, "diverged")

    def damaged(self, label: str) -> list[int]:
        """Its seeds that have begun and are not whole, or cannot be read at all."""
        return sorted([*self._of(label, "damaged"), *(seed for of, seed in self.unreadable if of == label)])

    def _of(self, label: str, status: str) -> list[int]:
        return [seed for seed, run in self.runs[label].items() if run.status == status]


def names_in(partition: dict[str, Any]) -> tuple[str, ...] | None:
    """The clients' names in a partition.json, where it has one for each."""
    names, clients = partition.get("names"), partition.get("counts") or partition.get("sizes")
    if not isinstance(names, list) or not isinstance(clients, list) or len(names) != len(clients):
        return None
    return tuple(str(name) for name in names)


def read_run(path: str | Path) -> RunRecord:
    """Read one run folder; a last line that was torn off while it was written is left out."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a run")
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.toml; give a folder that a run has written")
    record = _read_run(folder)
    return _read_run(folder) if record.unreadable else record  # its settings may have been replaced meanwhile


def _read_run(folder: Path) -> RunRecord:
    known, checkpoint = known_checksums(folder), newest_checkpoint(folder)
    lines, resumes, processes = (LineChecksums(required=known is not None and own) for own in (True, True, False))
    digests: dict[str, str | None] = {}

    def optional(name: str) -> dict[str, Any] | None:
        content = read_bytes(folder / name, LARGE) if (folder / name).exists() else None
        digests[name] = None if content is None else sha256(content)
        return None if content is None else _object(folder / name, content)

    # The summary before the history: a run may end while it is read.
    summary, recorded = _read_summary(folder / "summary.json", known is not None)
    config = read_bytes(folder / "config.toml")
    digests["config.toml"] = sha256(config)
    record = RunRecord(
        path=folder,
        config=parsed_config(folder / "config.toml", config),
        rounds=_read_rounds(folder / "rounds.jsonl", lines),
        partition=optional("partition.json"),
        summary=summary,
        versions=optional("versions.json"),
        resumes=read_events(folder / "resumes.jsonl", resumes),
        processes=read_events(folder / PROCESSES, processes),
    )
    faults = (
        *checksum_faults(folder, known, digests, lines, record.resumes),
        *history_checksum_faults(lines, record.rounds, summary, recorded, checkpoint),
        *event_faults({"resumes.jsonl": resumes, PROCESSES: processes}),
    )
    return replace(record, unreadable=faults)


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
        raise broken(file, "labels is not a list of names")
    if not (isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)):
        raise broken(file, "seeds is not a list of whole numbers")
    if len(set(labels)) < len(labels) or len(set(seeds)) < len(seeds):
        raise broken(file, "a label or a seed is listed twice")
    if reference not in labels:
        raise broken(file, f"the reference {reference!r} is not among the labels")
    if not (isinstance(runs, dict) and all(isinstance(runs.get(label), dict) for label in labels)):
        raise broken(file, "runs does not name the folders of every label")
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
    return StudyRecord(plan.path, plan.labels, plan.seeds, plan.reference, found, planned=plan.planned)


def _inside(folder: Path, relative: object, file: Path) -> Path | None:
    if relative is None:
        return None
    if not isinstance(relative, str) or not _is_a_place(PurePosixPath(relative)):
        raise broken(file, f"{repr(relative)[:80]} is not a path inside the comparison folder")
    return folder / relative


def _is_a_place(path: PurePosixPath) -> bool:
    parts = path.parts
    return not path.is_absolute() and ".." not in parts and not any("\0" in part or len(part) > 255 for part in parts)


def _evaluated(line: dict[str, Any]) -> bool:
    return is_number(line.get("test_accuracy"))


def _object(file: Path, content: bytes) -> dict[str, Any]:
    try:
        value = parsed_object(content)
        if file.name == "partition.json":
            check_partition(value)
    except ValueError as error:
        raise broken(file, str(error)) from error
    return value


def _read_summary(file: Path, checksum_required: bool) -> tuple[dict[str, Any] | None, dict[str, str]]:
    if not file.exists():
        return None, {}
    try:
        return summary_in(parsed_object(read_bytes(file)), checksum_required=checksum_required)
    except ValueError as error:
        raise broken(file, str(error)) from error


def _read_rounds(file: Path, checksums: LineChecksums) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = []
    for complaint in add_rounds(rounds, read_bytes(file), checksums=checksums) if file.exists() else ():
        raise broken(file, complaint)
    return rounds
