"""Runs named on the command line, collected into groups that can be compared, and split by data set where needed.

A comparison or sweep is a group; one of algorithms on several splits is a group for each of them. Runs that lie loose
(named one by one, or below a folder such as `fedgg reproduce` writes) are put together where they can be compared:
those named one by one by their data, those found below a folder by their data and split. What cannot be read, or not
wholly, is a problem with a name; the rest stands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedgg.analysis.labels import labelled
from fedgg.analysis.run_columns import run_data
from fedgg.errors import UserError
from fedgg.runfolder.archive import is_archive, read_archive
from fedgg.runfolder.dotted_settings import PER_RUN, differing, flat
from fedgg.runfolder.follow import FollowedRun, Stamp, stamp
from fedgg.runfolder.read import read_study_plan
from fedgg.runfolder.records import RunRecord, StudyPlan, StudyRecord

WHERE = ("data.", "split.")  # settings that say what is learned from, rather than how


@dataclass(frozen=True, eq=False)
class Part:
    """Rows that learn from the same; `title` says from what, where there are several parts."""

    title: str
    study: StudyRecord


def parts_of(study: StudyRecord) -> list[Part]:
    """One part, unless algorithms are compared on several splits, each of them with several rows.

    The reference of another part is the row that differs from the study's in nothing but where it learns; without one,
    rows cannot be measured there, and the study stays whole.
    """
    whole = [Part("", study)]
    if any(not runs for runs in study.runs.values()):
        return whole  # a row that has not begun says nothing of its settings
    settings = {label: flat(next(iter(by_seed.values())).config) for label, by_seed in study.runs.items()}
    keys = differing(settings.values())
    where = [key for key in keys if key.startswith(WHERE)]
    if not where or "algorithm.name" not in keys:
        return whole
    labels: dict[str, list[str]] = {}
    for label, own in settings.items():
        labels.setdefault(", ".join(f"{key} = {own.get(key)}" for key in where), []).append(label)
    references = {title: _reference(study.reference, some, settings) for title, some in labels.items()}
    if min(map(len, labels.values())) < 2 or None in references.values():
        return whole
    return [Part(title, _only(study, some, str(references[title]))) for title, some in labels.items()]


def _reference(whole: str, labels: list[str], settings: Mapping[str, Mapping[str, Any]]) -> str | None:
    same = (label for label in labels if _how(settings[label]) == _how(settings[whole]))
    return whole if whole in labels else next(same, None)


def _how(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in PER_RUN and not key.startswith(WHERE)}


def _only(study: StudyRecord, labels: list[str], reference: str) -> StudyRecord:
    runs = {label: study.runs[label] for label in labels}
    unreadable = tuple((label, seed) for label, seed in study.unreadable if label in labels)
    seeds = tuple(seed for seed in study.seeds if any(seed in study.seeds_of(label) for label in labels))
    return replace(study, labels=tuple(labels), seeds=seeds, reference=reference, runs=runs, unreadable=unreadable)


ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)  # of odd content
DEPTH = 5  # folders below the one named: reproductions lie three down


@dataclass(frozen=True)
class Problem:
    """A folder that is missing or incomplete, what that means for it here, and why."""

    path: str
    why: str
    what: str = "cannot be read"
    shown: bool = False  # all the same, as far as it could be read


@dataclass(frozen=True, eq=False)
class Group:
    """Runs side by side. A single run is a group of one label and one seed."""

    study: StudyRecord
    loose: str | None = None  # put together or taken apart here, rather than by whoever ran them: because of this


class Gathering:
    """Look again as often as you like: what has not changed is not read again."""

    def __init__(self, paths: Sequence[Path]):
        if not paths:
            raise UserError("name at least one folder: of a run, a comparison, a sweep or a reproduction")
        self.paths = tuple(dict.fromkeys(paths))
        self.groups: list[Group] = []
        self.problems: list[Problem] = []
        self._runs: dict[Path, FollowedRun] = {}
        self._plans: dict[Path, tuple[Stamp, StudyPlan]] = {}
        self._folded: dict[Path, tuple[Stamp, list[RunRecord]]] = {}
        self._changed = False

    def look(self) -> bool:
        """Read what is new; whether anything was, or something came or went."""
        before = self._said()
        self._changed = False
        self.groups, self.problems, seen = [], [], set[Path]()
        named: list[RunRecord] = []
        for path in self.paths:
            seen |= self._look_at(path, named)
        above = os.path.commonpath([record.path.absolute() for record in named]) if named else "."
        self.groups[:0] = _grouped(named, ("data.source",), Path(above))
        for gone in self._runs.keys() - seen:
            del self._runs[gone]
        return self._changed or self._said() != before

    def _said(self) -> tuple[Any, ...]:
        studies = [group.study for group in self.groups]
        shape = tuple((study.path, study.labels, study.seeds, study.size) for study in studies)
        return shape, len(self._runs), tuple(self.problems)

    def _look_at(self, path: Path, named: list[RunRecord]) -> set[Path]:
        """Add what lies there; the run folders it looked into."""
        if path.is_file():
            self._add_folded(path)
            return set()
        if (path / "study.json").is_file():
            return self._add_study(path)
        if _has_begun(path):
            named += filter(None, [self._followed(path)])
            return {path}
        if not path.is_dir():
            self._trouble(path, "there is no such folder (yet)")
            return set()
        found = list(_below(path))
        folded = [] if found else [file for file in sorted(path.glob("*.json")) if is_archive(file)]
        for file in folded:
            self._add_folded(file)
        if not found and not folded:
            self._trouble(path, "it holds no run (yet): there is neither a config.toml nor a study.json in it or below")
        seen, loose = set[Path](), list[RunRecord]()
        for place in found:
            if (place / "study.json").is_file():
                seen |= self._add_study(place)
            else:
                seen.add(place)
                loose += filter(None, [self._followed(place)])
        self.groups += _grouped(loose, ("data.source", "split"), path)
        return seen

    def _add_folded(self, file: Path) -> None:
        now = stamp(file)
        try:
            if file not in self._folded or self._folded[file][0] != now:
                self._folded[file] = (now, read_archive(file))
                self._changed = True
            if not self._folded[file][1]:
                self._trouble(file, "it holds no run")
            self.groups += _grouped(self._folded[file][1], ("data.source", "split"), file)
        except UserError as error:
            self._trouble(file, str(error))

    def _add_study(self, path: Path) -> set[Path]:
        now = stamp(path / "study.json")
        try:
            if path not in self._plans or self._plans[path][0] != now:
                self._plans[path] = (now, read_study_plan(path))
                self._changed = True
        except UserError as error:
            self._trouble(path, str(error))
            return set()
        plan = self._plans[path][1]
        runs: dict[str, dict[int, RunRecord]] = {label: {} for label in plan.labels}
        seen, unreadable = set(), []
        for label, by_seed in plan.places.items():
            for seed, place in by_seed.items():
                if _has_begun(place):
                    seen.add(place)
                    record = self._followed(place)
                    if record is not None:
                        runs[label][seed] = record
                    else:
                        unreadable.append((label, seed))
        study = StudyRecord(plan.path, plan.labels, plan.seeds, plan.reference, runs, tuple(unreadable), plan.planned)
        self.groups += [Group(part.study, part.title or None) for part in parts_of(study)]
        return seen

    def _followed(self, path: Path) -> RunRecord | None:
        followed = self._runs.setdefault(path, FollowedRun(path))
        if followed.look():
            self._changed = True
            followed.problem = followed.problem or _unsound(followed.record)
        if followed.problem is not None:
            self._trouble(path, followed.problem)
            return None
        record = followed.record
        if record is not None and record.faults:
            what = "is damaged and excluded from the averages" if record.status == "damaged" else "is incomplete"
            why = "; ".join(fault.why for fault in record.faults)
            self.problems.append(Problem(str(path), why, what, shown=True))
        return record

    def _trouble(self, path: Path, why: str) -> None:
        self.problems.append(Problem(str(path), why))


def _unsound(record: RunRecord | None) -> str | None:
    """Well-formed files can still tell what no run tells: then that is said, and everything else is shown."""
    try:
        if record is not None:
            run_data(record, "", 0)
            flat(record.config.get("data", {}))
            float(record.seconds)
    except ODD as error:
        said = f"{type(error).__name__}: {error}"
        return f"{record.path if record else ''} holds something no run writes ({said}); restore it or run again"
    return None


def _has_begun(folder: Path) -> bool:
    """A starting run writes config.toml last: a folder without one has not begun, unless it has a history or an end."""
    return any((folder / name).is_file() for name in ("config.toml", "rounds.jsonl", "summary.json"))


def _below(folder: Path, depth: int = DEPTH, seen: set[tuple[int, int]] | None = None) -> Iterator[Path]:
    """Run folders and comparison folders below this one; what lies in them is theirs.

    Links are followed, and a folder that links lead to again and again is looked into once.
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
        if (place / "study.json").is_file() or _has_begun(place):
            yield place
        elif depth > 1:
            yield from _below(place, depth - 1, seen)


def _grouped(records: Sequence[RunRecord], by: tuple[str, ...], path: Path) -> list[Group]:
    """Loose runs as studies, those together that agree in the settings named."""
    alike: dict[str, list[RunRecord]] = {}
    for record in records:
        alike.setdefault(repr([_setting(record.config, key) for key in by]), []).append(record)
    return [Group(labelled(some, path), loose=why) for why, some in alike.items()]


def _setting(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
