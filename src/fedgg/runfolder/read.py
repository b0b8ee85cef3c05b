"""Read a run folder or a comparison folder into the records of `fedgg.runfolder.records`, once.

`fedgg.runfolder.follow` reads a folder repeatedly while its run is in progress. `schema` says which values a file may
hold; `rounds` reads the lines of rounds.jsonl.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from fedgg import files
from fedgg.errors import UserError
from fedgg.files import LARGE, parse_json, parse_lines, parse_toml
from fedgg.runfolder.checksums import KEY, LineChecksums, known_checksums, newest_checkpoint, sha256, without_checksum
from fedgg.runfolder.faults import checksum_faults, event_faults, history_checksum_faults
from fedgg.runfolder.records import RunRecord, StudyPlan, StudyRecord
from fedgg.runfolder.rounds import RoundsReader
from fedgg.runfolder.schema import check_config, check_partition, summary_in

PROCESSES = "federation/events.jsonl"
STUDY_FORMAT = 1


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
        if file.name == "partition.json":
            check_partition(value)
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
