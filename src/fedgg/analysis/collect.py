"""Find the runs in the folders and archives named on the command line, and arrange them in groups to be compared.

A comparison or sweep is one group, or one for each data set and split if algorithms are compared on several. Single
runs are grouped with comparable ones: those named one by one by their data set, those found below a folder (such
as `fedgg reproduce` writes) by data set and split. A folder that cannot be read, or not completely, becomes a
`Problem`; the others are shown.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedgg.analysis.chart_data import run_columns
from fedgg.analysis.labels import labelled
from fedgg.errors import UserError
from fedgg.runfolder.archive_file import is_archive, read_archive
from fedgg.runfolder.measure import Measure
from fedgg.runfolder.read import FollowedRun, Stamp, read_study_plan, stamp
from fedgg.runfolder.record_types import (
    PER_RUN,
    RunRecord,
    StudyPlan,
    StudyRecord,
    differing,
    flat,
    unknown_measure,
)
from fedgg.runfolder.waiting import read_waiting

DATA_SETTINGS = ("data.", "split.")  # settings of the data, not of training
MOST_DEPTH = 5  # folders below the one named that are searched; those of `fedgg reproduce` are three deep
CONTENT_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class Problem:
    """A folder that is missing, incomplete or damaged: what follows from it, and why."""

    path: str
    why: str
    what: str = "cannot be read"
    shown: bool = False  # whether its run is shown nevertheless


@dataclass(frozen=True, eq=False)
class Group:
    """Runs to be compared with each other. A single run is a group of one label and one seed."""

    study: StudyRecord
    grouped_by: str | None = None  # the values of the settings by which single runs were grouped; None for a study

    def measure(self, name: str | None = None) -> Measure:
        """The measure of this name where the runs have recorded it, otherwise their primary metric."""
        return self.study.measures.get(name or "", self.study.primary)


class RunCollection:
    """The groups and problems of some paths, as of the last `refresh`."""

    def __init__(self, paths: Sequence[Path]):
        if not paths:
            raise UserError("name at least one folder: of a run, a comparison, a sweep or a reproduction")
        self.paths = tuple(dict.fromkeys(paths))
        self.groups: list[Group] = []
        self.problems: list[Problem] = []
        self._runs: dict[Path, FollowedRun] = {}
        self._plans: dict[Path, tuple[Stamp, StudyPlan]] = {}
        self._archives: dict[Path, tuple[Stamp, list[RunRecord]]] = {}
        self._changed = False

    def check_metric(self, name: str | None) -> None:
        """UserError if no run of any group has recorded the measure of this name."""
        known = dict.fromkeys(key for group in self.groups for key in group.study.measures)
        if name is not None and known and name not in known:
            raise UserError(unknown_measure(name, known))

    def refresh(self) -> bool:
        """Read the files that have changed since the last call; whether anything is different now."""
        shape_before = self._shape()
        self._changed = False
        self.groups, self.problems, seen = [], [], set[Path]()
        named: list[RunRecord] = []
        for path in self.paths:
            seen |= self._add(path, named)
        parent = os.path.commonpath([record.path.absolute() for record in named]) if named else "."
        self.groups[:0] = _grouped(named, ("data.source",), Path(parent))
        for vanished in self._runs.keys() - seen:
            del self._runs[vanished]
        return self._changed or self._shape() != shape_before

    def _shape(self) -> tuple[Any, ...]:
        """What changes when a run or a folder is added or vanishes."""
        studies = [group.study for group in self.groups]
        shapes = tuple(
            (study.path, study.labels, study.seeds, study.size, tuple(study.waiting.items())) for study in studies
        )
        return shapes, len(self._runs), tuple(self.problems)

    def _add(self, path: Path, named: list[RunRecord]) -> set[Path]:
        """Add the runs of one path, a single run to `named`; the run folders that were read."""
        if path.is_file():
            self._add_archive(path)
            return set()
        if (path / "study.json").is_file():
            return self._add_study(path)
        if _has_started(path):
            named += filter(None, [self._read(path)])
            return {path}
        if not path.is_dir():
            self._add_problem(path, "it does not exist (yet)")
            return set()
        return self._add_folder(path)

    def _add_folder(self, path: Path) -> set[Path]:
        """Add the runs and comparisons below a folder, or the archives in it; the run folders that were read."""
        folders = list(_folders_below(path))
        archives = [] if folders else [file for file in sorted(path.glob("*.json")) if is_archive(file)]
        for file in archives:
            self._add_archive(file)
        if not folders and not archives:
            why = "it holds no run (yet): neither it nor a folder below has a config.toml or a study.json"
            self._add_problem(path, why)
        seen, single_runs = set[Path](), list[RunRecord]()
        for folder in folders:
            if (folder / "study.json").is_file():
                seen |= self._add_study(folder)
            else:
                seen.add(folder)
                single_runs += filter(None, [self._read(folder)])
        self.groups += _grouped(single_runs, ("data.source", "split"), path)
        return seen

    def _add_archive(self, file: Path) -> None:
        now = stamp(file)
        try:
            if file not in self._archives or self._archives[file][0] != now:
                self._archives[file] = (now, read_archive(file))
                self._changed = True
            if not self._archives[file][1]:
                self._add_problem(file, "it holds no run")
            self.groups += _grouped(self._archives[file][1], ("data.source", "split"), file)
        except UserError as error:
            self._add_problem(file, str(error))

    def _add_study(self, path: Path) -> set[Path]:
        """Add a comparison; the run folders that were read."""
        now = stamp(path / "study.json")
        try:
            if path not in self._plans or self._plans[path][0] != now:
                self._plans[path] = (now, read_study_plan(path))
                self._changed = True
        except UserError as error:
            self._add_problem(path, str(error))
            return set()
        plan = self._plans[path][1]
        runs: dict[str, dict[int, RunRecord]] = {label: {} for label in plan.labels}
        seen, unreadable = set(), []
        for label, by_seed in plan.places.items():
            for seed, folder in by_seed.items():
                if _has_started(folder):
                    seen.add(folder)
                    record = self._read(folder)
                    if record is not None:
                        runs[label][seed] = record
                    else:
                        unreadable.append((label, seed))
        reasons = read_waiting(path)
        waiting = {
            (label, seed): reason
            for label, by_seed in plan.places.items()
            for seed, folder in by_seed.items()
            if (reason := reasons.get(folder.relative_to(path).as_posix())) and seed not in runs[label]
        }
        study = StudyRecord(
            plan.path, plan.labels, plan.seeds, plan.reference, runs, tuple(unreadable), plan.planned, waiting
        )
        self.groups += [Group(part.study, part.title or None) for part in study_parts(study)]
        return seen

    def _read(self, path: Path) -> RunRecord | None:
        """One run, and a problem if it cannot be read, or not completely."""
        followed = self._runs.setdefault(path, FollowedRun(path))
        if followed.refresh():
            self._changed = True
            followed.problem = followed.problem or _impossible_content(followed.record)
        if followed.problem is not None:
            self._add_problem(path, followed.problem)
            return None
        record = followed.record
        if record is not None and record.faults:
            what = "is damaged and excluded from the averages" if record.status == "damaged" else "is incomplete"
            why = "; ".join(fault.why for fault in record.faults)
            self.problems.append(Problem(str(path), why, what, shown=True))
        return record

    def _add_problem(self, path: Path, why: str) -> None:
        self.problems.append(Problem(str(path), why))


def _impossible_content(record: RunRecord | None) -> str | None:
    """Why a run cannot be shown whose files are well-formed but hold something that no run writes; None if it can."""
    try:
        if record is not None:
            run_columns(record)
            flat(record.config.get("data", {}))
            float(record.seconds)
    except CONTENT_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        return f"{record.path if record else ''} holds something no run writes ({reason}); restore it or run again"
    return None


def _has_started(folder: Path) -> bool:
    """A starting run writes config.toml last; a folder without it that has rounds or a summary has lost the file."""
    return any((folder / name).is_file() for name in ("config.toml", "rounds.jsonl", "summary.json"))


def _folders_below(folder: Path, depth: int = MOST_DEPTH, seen: set[tuple[int, int]] | None = None) -> Iterator[Path]:
    """Run folders and comparison folders below this one; a comparison's own run folders are not listed.

    Links are followed; a folder that several links lead to is searched once.
    """
    seen = set() if seen is None else seen
    try:
        here = folder.stat()
        if (here.st_dev, here.st_ino) in seen:
            return
        seen.add((here.st_dev, here.st_ino))
        inner = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return
    for name in inner:
        place = folder / name
        if (place / "study.json").is_file() or _has_started(place):
            yield place
        elif depth > 1:
            yield from _folders_below(place, depth - 1, seen)


def _grouped(records: Sequence[RunRecord], keys: tuple[str, ...], path: Path) -> list[Group]:
    """Single runs as studies, one for each combination of values of these settings."""
    by_values: dict[str, list[RunRecord]] = {}
    for record in records:
        by_values.setdefault(repr([_setting(record.config, key) for key in keys]), []).append(record)
    return [Group(labelled(some, path), grouped_by=values) for values, some in by_values.items()]


def _setting(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


# Comparisons on several splits ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StudyPart:
    """The rows of a study on one data set and split; `title` names these if the study has several."""

    title: str
    study: StudyRecord


def study_parts(study: StudyRecord) -> list[StudyPart]:
    """One part, unless algorithms are compared on several data sets or splits, each of them with several rows.

    The reference of each part is the row with the settings of the study's reference, data and split aside. If a part
    has no such row, its rows could not be compared, and the study stays one part.
    """
    whole = [StudyPart("", study)]
    if any(not runs for runs in study.runs.values()):
        return whole  # the settings of a row that has not started are not known
    settings = {label: flat(next(iter(by_seed.values())).config) for label, by_seed in study.runs.items()}
    keys = differing(settings.values())
    data_keys = [key for key in keys if key.startswith(DATA_SETTINGS)]
    if not data_keys or "algorithm.name" not in keys:
        return whole
    labels: dict[str, list[str]] = {}
    for label, row_settings in settings.items():
        labels.setdefault(", ".join(f"{key} = {row_settings.get(key)}" for key in data_keys), []).append(label)
    references = {title: _reference(study.reference, some, settings) for title, some in labels.items()}
    if min(map(len, labels.values())) < 2 or None in references.values():
        return whole
    return [StudyPart(title, _restricted(study, some, str(references[title]))) for title, some in labels.items()]


def _reference(reference: str, labels: list[str], settings: Mapping[str, Mapping[str, Any]]) -> str | None:
    same = (label for label in labels if _training_settings(settings[label]) == _training_settings(settings[reference]))
    return reference if reference in labels else next(same, None)


def _training_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in PER_RUN and not key.startswith(DATA_SETTINGS)}


def _restricted(study: StudyRecord, labels: list[str], reference: str) -> StudyRecord:
    """The study with these rows alone."""
    runs = {label: study.runs[label] for label in labels}
    unreadable = tuple((label, seed) for label, seed in study.unreadable if label in labels)
    seeds = tuple(seed for seed in study.seeds if any(seed in study.seeds_of(label) for label in labels))
    return replace(study, labels=tuple(labels), seeds=seeds, reference=reference, runs=runs, unreadable=unreadable)
