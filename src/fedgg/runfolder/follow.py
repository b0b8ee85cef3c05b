"""Read a run folder repeatedly while its run is in progress: compare file dates, then read what is new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedgg.errors import UserError
from fedgg.files import LARGE
from fedgg.runfolder import checksums
from fedgg.runfolder.checksums import LineChecksums, Manifest, known_checksums, newest_checkpoint, sha256
from fedgg.runfolder.faults import (
    Fault,
    checksum_faults,
    event_faults,
    history_checksum_faults,
    line_faults,
    summary_by_history,
    summary_fault,
)
from fedgg.runfolder.read import PROCESSES, parsed_config, parsed_object, read_bytes, read_events
from fedgg.runfolder.records import RunRecord
from fedgg.runfolder.rounds import RoundsReader
from fedgg.runfolder.schema import check_partition, summary_in

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
            elif name == "partition.json":
                check_partition(content)
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
