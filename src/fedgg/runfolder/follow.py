"""A run folder read again and again while its run goes on: a look reads file dates, and then only what is new."""

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
from fedgg.runfolder.read import PROCESSES, RunRecord
from fedgg.runfolder.records import (
    add_rounds,
    check_partition,
    parsed_config,
    parsed_object,
    read_bytes,
    read_events,
    summary_in,
)

Stamp = tuple[int, int, int] | None  # inode, date, size; None where there is no file

_EVENTS = ("resumes.jsonl", PROCESSES)
_WHOLE = ("config.toml", "partition.json", "summary.json", "versions.json", *_EVENTS)
_WITHOUT = {  # what is not known of a run that lacks this file
    "partition.json": "who holds what, and whether this is the split of the other runs, is not known",
    "versions.json": "the conditions of this run are not known",
}
TRIES = 3  # to read settings and their checksums between two changes of them


def stamp(file: Path) -> Stamp:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class FollowedRun:
    """One run folder. After `look()` there is a `record`, or a `problem` that says which file is wrong and why.

    Without its settings or its history nothing can be shown. What else is wrong, the record says itself.
    """

    def __init__(self, path: Path):
        self.path = path
        self.record: RunRecord | None = None
        self.problem: str | None = None
        self._stamps: dict[str, Stamp] = {}
        self._content: dict[str, Any] = dict.fromkeys(_WHOLE)
        self._wrong: dict[str, str] = {}  # by file: why it cannot be read
        self._complaints: list[str] = []  # of lines of the history
        self._rounds: list[dict[str, Any]] = []
        self._read_to = 0  # bytes of rounds.jsonl that have become rounds
        self._lines = 0
        self._known: Manifest | None = None
        self._digests: dict[str, str | None] = dict.fromkeys(_WHOLE)  # SHA-256 of files as they were read
        self._recorded: dict[str, str] = {}  # and as the summary has them
        self._history = LineChecksums()
        self._events = {name: LineChecksums() for name in _EVENTS}
        self._mismatch = False

    def look(self) -> bool:
        """Read what is new; whether there was anything."""
        for attempt in range(TRIES):
            stamps = {name: stamp(self.path / name) for name in (*_WHOLE, checksums.FILE, "rounds.jsonl")}
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
        checkpoint = newest_checkpoint(self.path)  # before the history, which grows first
        before, self._known = self._known, known_checksums(self.path)
        if (before is None) != (self._known is None):
            changed |= {name for name in stamps if stamps[name]}  # what has to have a checksum
            self._read_to = 0
        for name in _WHOLE:
            if name in changed or self.problem:
                self._wrong.pop(name, None)
                self._digests[name] = None
                self._content[name] = self._file(name) if stamps[name] else None
        # A run that is taken up again cuts its history: that is another file, not the same one grown.
        now, last = stamps["rounds.jsonl"], self._stamps.get("rounds.jsonl")
        grown = now is not None and last is not None and now[0] == last[0] and now[2] >= self._read_to > 0
        # And one with broken lines may have been mended in its place.
        if not grown or self.problem or self._complaints or self._history.complaint or "config.toml" in changed:
            self._rounds, self._complaints, self._read_to, self._lines = [], [], 0, 0
            self._history = LineChecksums(required=self._known is not None)
        if now is not None:
            self._read_rounds()
        config = self._content["config.toml"]
        if config is None:
            raise UserError(
                f"{self.path / 'config.toml'} is not there (yet): without its settings a run cannot be shown"
            )
        summary = self._content["summary.json"]
        if "summary.json" in self._wrong:
            summary = summary_by_history(config, self._rounds)
        self.record = RunRecord(
            path=self.path,
            config=config,
            rounds=self._rounds,
            partition=self._content["partition.json"],
            summary=summary,
            versions=self._content["versions.json"],
            resumes=self._content["resumes.jsonl"] or (),
            processes=self._content[PROCESSES] or (),
            unreadable=tuple(self._faults(summary, stamps, checkpoint)),
        )

    def _faults(self, summary: dict[str, Any] | None, stamps: dict[str, Stamp], checkpoint: int) -> Iterator[Fault]:
        yield from line_faults(self._complaints)
        if not self._complaints:
            yield from history_checksum_faults(self._history, self._rounds, summary, self._recorded, checkpoint)
        resumes = self._content["resumes.jsonl"] or ()
        found = [*checksum_faults(self.path, self._known, self._readable_digests(), self._history, resumes)]
        self._mismatch = bool(found)
        yield from found
        yield from event_faults(self._events)
        for name, why in self._wrong.items():
            if name == "summary.json":
                yield summary_fault(why, summary)
            else:
                yield Fault(f"{name} is broken ({why}): {_WITHOUT[name]}")
        if stamps["partition.json"] is None and self._known is None:  # written before config.toml
            yield Fault(f"partition.json is not there: {_WITHOUT['partition.json']}")

    def _file(self, name: str) -> Any:
        """What is in it; None of a file that a run can be shown without and that cannot be read."""
        file = self.path / name
        if name in _EVENTS:
            self._events[name] = LineChecksums(required=self._known is not None and name == "resumes.jsonl")
            return read_events(file, self._events[name])
        try:
            raw = read_bytes(file, LARGE if name == "partition.json" else None)
            self._digests[name] = sha256(raw)
            if name == "config.toml":
                return parsed_config(file, raw)
            content = parsed_object(raw)
            if name == "summary.json":
                content, self._recorded = summary_in(content, checksum_required=self._known is not None)
            elif name == "partition.json":
                check_partition(content)
        except (UserError, ValueError) as error:
            if name == "config.toml":
                raise
            self._wrong[name] = " ".join(str(error).split())
            return None
        return content

    def _readable_digests(self) -> dict[str, str | None]:
        """Files that cannot be read are named for that."""
        return {name: digest for name, digest in self._digests.items() if name not in self._wrong}

    def _read_rounds(self) -> None:
        file = self.path / "rounds.jsonl"
        if not file.exists():
            return  # gone between two looks
        content = read_bytes(file, start=self._read_to)
        whole = content[: content.rfind(b"\n") + 1]  # a line on its way has no end yet
        if whole:
            # The history so far belongs to an older record: leave it as it was.
            self._rounds = [*self._rounds]
            complaints = add_rounds(self._rounds, whole, self._lines + 1, may_be_torn=False, checksums=self._history)
            self._complaints = [*self._complaints, *complaints]
            self._read_to += len(whole)
            self._lines += whole.count(b"\n")
