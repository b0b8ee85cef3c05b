"""Run folders and comparison folders read into records, once or again and again while a run is in progress.

`FollowedRun` reads a folder repeatedly while its run is in progress. `validation` says which values a file may hold;
`read_rounds` reads the lines of rounds.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from fedgg import files
from fedgg.errors import UserError
from fedgg.files import LARGE, parse_json, parse_lines, parse_toml
from fedgg.runfolder import checksums
from fedgg.runfolder.checksums import (
    KEY,
    LineChecksums,
    Manifest,
    known_checksums,
    newest_checkpoint,
    sha256,
    without_checksum,
)
from fedgg.runfolder.damage import (
    Fault,
    checksum_faults,
    event_faults,
    history_checksum_faults,
    line_faults,
    summary_by_history,
    summary_fault,
)
from fedgg.runfolder.read_rounds import RoundsReader
from fedgg.runfolder.record_types import RunRecord, StudyPlan, StudyRecord
from fedgg.runfolder.validation import check_config, check_partition, check_versions, summary_in

PROCESSES = "federation/events.jsonl"
STUDY_FORMAT = 1
_CHECKS = {"partition.json": check_partition, "versions.json": check_versions}


# Runs -----------------------------------------------------------------------------------------------------------------


def read_run(path: str | Path) -> RunRecord:
    """Read one run folder; a last line of rounds.jsonl that a kill has torn is left out."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a run")
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.toml; give a folder that a run has written")
    record = _read_run(folder)
    return _read_run(folder) if record.file_faults else record  # its settings may have been replaced meanwhile


def _read_run(folder: Path) -> RunRecord:
    manifest, checkpoint = known_checksums(folder), newest_checkpoint(folder)
    required = manifest is not None
    reader = RoundsReader(checksums_required=required)
    resumes, processes = LineChecksums(required=required), LineChecksums()
    digests: dict[str, str | None] = {}

    def optional(name: str) -> dict[str, Any] | None:
        content = read_bytes(folder / name, LARGE) if (folder / name).exists() else None
        digests[name] = None if content is None else sha256(content)
        return None if content is None else _object(folder / name, content)

    # The summary before the rounds: a run may end while it is read.
    summary, recorded = _read_summary(folder / "summary.json", required)
    config_bytes = read_bytes(folder / "config.toml")
    digests["config.toml"] = sha256(config_bytes)
    config = parsed_config(folder / "config.toml", config_bytes)
    _read_rounds(folder / "rounds.jsonl", reader)
    record = RunRecord(
        path=folder,
        config=config,
        rounds=reader.rounds,
        partition=optional("partition.json"),
        summary=summary,
        versions=optional("versions.json"),
        resumes=read_events(folder / "resumes.jsonl", resumes),
        processes=read_events(folder / PROCESSES, processes),
    )
    faults = (
        *checksum_faults(folder, manifest, digests, reader.checksums, record.resumes),
        *history_checksum_faults(reader.checksums, record.rounds, summary, recorded, checkpoint),
        *event_faults({"resumes.jsonl": resumes, PROCESSES: processes}),
    )
    return replace(record, file_faults=faults)


def _read_rounds(file: Path, reader: RoundsReader) -> None:
    if file.exists():
        reader.add(read_bytes(file), skip_malformed_end=True)
    if reader.complaints:
        raise broken(file, reader.complaints[0])


def _read_summary(file: Path, checksum_required: bool) -> tuple[dict[str, Any] | None, dict[str, str]]:
    if not file.exists():
        return None, {}
    try:
        return summary_in(parsed_object(read_bytes(file)), checksum_required=checksum_required)
    except ValueError as error:
        raise broken(file, str(error)) from error


def _object(file: Path, content: bytes) -> dict[str, Any]:
    try:
        value = parsed_object(content)
        _CHECKS[file.name](value)
    except ValueError as error:
        raise broken(file, str(error)) from error
    return value


# Comparisons ----------------------------------------------------------------------------------------------------------


def read_study_plan(path: str | Path) -> StudyPlan:
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
    plan = read_study_plan(path)
    runs = {
        # A starting run writes config.toml last, so a folder without one has not started rather than broken.
        label: {seed: read_run(place) for seed, place in by_seed.items() if (place / "config.toml").exists()}
        for label, by_seed in plan.places.items()
    }
    if not any(runs.values()):
        raise UserError(f"{plan.path} holds none of the runs that its study.json names; run the comparison first")
    return StudyRecord(plan.path, plan.labels, plan.seeds, plan.reference, runs, planned=plan.planned)


def _inside(folder: Path, relative: object, file: Path) -> Path | None:
    if relative is None:
        return None
    if not isinstance(relative, str) or not _is_a_place(PurePosixPath(relative)):
        raise broken(file, f"{repr(relative)[:80]} is not a path inside the comparison folder")
    return folder / relative


def _is_a_place(path: PurePosixPath) -> bool:
    parts = path.parts
    return not path.is_absolute() and ".." not in parts and not any("\0" in part or len(part) > 255 for part in parts)


# Single files ---------------------------------------------------------------------------------------------------------


def read_bytes(file: Path, limit: int | None = None, start: int = 0) -> bytes:
    """As `fedgg.files.read_bytes`; a file that cannot be read is a UserError."""
    try:
        return files.read_bytes(file, limit, start)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{file} cannot be read: {reason}; check the path and its permissions") from error


def read_object(file: Path) -> dict[str, Any]:
    """One JSON object, which fits its checksum if it has one."""
    try:
        return without_checksum(parsed_object(read_bytes(file)))
    except ValueError as error:
        raise broken(file, str(error)) from error


def read_events(file: Path, checksums: LineChecksums) -> tuple[dict[str, Any], ...]:
    """The lines of resumes.jsonl or of a federation's events.jsonl; a line torn by a kill is left out."""
    content = read_bytes(file) if file.exists() else b""
    checksums.check_all(content)
    lines = [line for _, line in parse_lines(content) if isinstance(line, dict)]
    return tuple({key: value for key, value in line.items() if key != KEY} for line in lines)


def parsed_config(file: Path, content: bytes) -> dict[str, Any]:
    try:
        config = parse_toml(content)
        check_config(config)
    except ValueError as error:
        raise broken(file, str(error)) from error
    return config


def parsed_object(content: bytes) -> dict[str, Any]:
    """One JSON object, or a ValueError that says what else it is."""
    if not content.strip():
        raise ValueError("it is empty")
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError("it does not hold one JSON object")
    return value


def broken(file: Path, why: str) -> UserError:
    return UserError(f"{file} is broken: {' '.join(why.split())}; restore the file or run again into a new folder")


Stamp = tuple[int, int, int] | None  # inode, date, size; None where there is no file

_EVENTS = ("resumes.jsonl", PROCESSES)
_READ_WHOLE = ("config.toml", "partition.json", "summary.json", "versions.json", *_EVENTS)
_WITHOUT = {  # what is not known of a run that lacks this file
    "partition.json": "which client holds which examples, and whether the other runs have the same split, is not known",
    "versions.json": "the conditions of this run are not known",
}
TRIES = 3  # to read settings and their checksums between two changes of them


def stamp(file: Path) -> Stamp:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class FollowedRun:
    """One run folder. After `refresh()` it has a `record`, or a `problem` that says which file is wrong and why.

    Without its settings or its rounds a run cannot be shown; other faults are in the record.
    """

    def __init__(self, path: Path):
        self.path = path
        self.record: RunRecord | None = None
        self.problem: str | None = None
        self._stamps: dict[str, Stamp] = {}
        self._manifest: Manifest | None = None
        self._content: dict[str, Any] = dict.fromkeys(_READ_WHOLE)
        self._digests: dict[str, str | None] = dict.fromkeys(_READ_WHOLE)  # SHA-256 of files as they were read
        self._recorded: dict[str, str] = {}  # and as the summary has them
        self._broken: dict[str, str] = {}  # by file: why it cannot be read
        self._rounds = RoundsReader()
        self._events = {name: LineChecksums() for name in _EVENTS}
        self._mismatch = False

    def refresh(self) -> bool:
        """Read what is new; whether there was anything."""
        for attempt in range(TRIES):
            stamps = {name: stamp(self.path / name) for name in (*_READ_WHOLE, checksums.FILE, "rounds.jsonl")}
            if stamps == self._stamps:
                return attempt > 0
            try:
                self._read(stamps)
                self.problem = None
            except UserError as error:
                self.problem, self.record = str(error), None
            self._stamps = stamps
            if not self._mismatch:
                break
        return True

    def _read(self, stamps: dict[str, Stamp]) -> None:
        changed = {name for name in stamps if stamps[name] != self._stamps.get(name)}
        self._mismatch = False
        checkpoint = newest_checkpoint(self.path)  # before the rounds, which are written first
        before, self._manifest = self._manifest, known_checksums(self.path)
        all_again = (before is None) != (self._manifest is None)  # whether files must have checksums has changed
        if all_again:
            changed |= {name for name in stamps if stamps[name]}
        for name in _READ_WHOLE:
            if name in changed or self.problem:
                self._broken.pop(name, None)
                self._digests[name] = None
                self._content[name] = self._read_file(name) if stamps[name] else None
        self._read_rounds(stamps["rounds.jsonl"], from_start=all_again or "config.toml" in changed)
        config = self._content["config.toml"]
        if config is None:
            raise UserError(
                f"{self.path / 'config.toml'} is not there (yet): without its settings a run cannot be shown"
            )
        summary = self._content["summary.json"]
        if "summary.json" in self._broken:
            summary = summary_by_history(config, self._rounds.rounds)
        self.record = RunRecord(
            path=self.path,
            config=config,
            rounds=[*self._rounds.rounds],  # a copy: the reader's list grows
            partition=self._content["partition.json"],
            summary=summary,
            versions=self._content["versions.json"],
            resumes=self._content["resumes.jsonl"] or (),
            processes=self._content[PROCESSES] or (),
            file_faults=tuple(self._faults(summary, stamps, checkpoint)),
        )

    def _read_file(self, name: str) -> Any:
        """The content of a file; None where it cannot be read and a run can be shown without it."""
        file = self.path / name
        if name in _EVENTS:
            self._events[name] = LineChecksums(required=self._manifest is not None and name == "resumes.jsonl")
            return read_events(file, self._events[name])
        try:
            raw = read_bytes(file, LARGE if name == "partition.json" else None)
            self._digests[name] = sha256(raw)
            if name == "config.toml":
                return parsed_config(file, raw)
            content = parsed_object(raw)
            if name == "summary.json":
                content, self._recorded = summary_in(content, checksum_required=self._manifest is not None)
            else:
                _CHECKS[name](content)
        except (UserError, ValueError) as error:
            if name == "config.toml":
                raise
            self._broken[name] = " ".join(str(error).split())
            return None
        return content

    def _read_rounds(self, now: Stamp, from_start: bool) -> None:
        """Add the new lines of rounds.jsonl, or read it from its start where it is not the same file grown."""
        reader, last = self._rounds, self._stamps.get("rounds.jsonl")
        # A resumed run replaces the file by its first rounds; damaged lines may have been repaired in place.
        grown = now is not None and last is not None and now[0] == last[0] and now[2] >= reader.bytes_read > 0
        if from_start or not grown or self.problem or reader.complaints or reader.checksums.complaint:
            reader = self._rounds = RoundsReader(checksums_required=self._manifest is not None)
        file = self.path / "rounds.jsonl"
        if now is not None and file.exists():
            reader.add(read_bytes(file, start=reader.bytes_read))

    def _faults(self, summary: dict[str, Any] | None, stamps: dict[str, Stamp], checkpoint: int) -> Iterator[Fault]:
        reader = self._rounds
        yield from line_faults(reader.complaints)
        if not reader.complaints:
            yield from history_checksum_faults(reader.checksums, reader.rounds, summary, self._recorded, checkpoint)
        resumes = self._content["resumes.jsonl"] or ()
        digests = {name: digest for name, digest in self._digests.items() if name not in self._broken}
        mismatches = [*checksum_faults(self.path, self._manifest, digests, reader.checksums, resumes)]
        self._mismatch = bool(mismatches)
        yield from mismatches
        yield from event_faults(self._events)
        for name, why in self._broken.items():
            if name == "summary.json":
                yield summary_fault(why, summary)
            else:
                yield Fault(f"{name} is broken ({why}): {_WITHOUT[name]}")
        if stamps["partition.json"] is None and self._manifest is None:  # written before config.toml
            yield Fault(f"partition.json is not there: {_WITHOUT['partition.json']}")
