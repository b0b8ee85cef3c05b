"""A run folder read again and again while its run goes on: a look reads file dates, and then only what is new."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedgg.errors import UserError
from fedgg.report.folders import PROCESSES, RunRecord, add_rounds, read_object, read_resumes, read_toml

Stamp = tuple[int, int, int] | None  # inode, date, size; None where there is no file

_WHOLE = ("config.toml", "partition.json", "summary.json", "versions.json", "resumes.jsonl", PROCESSES)


def stamp(file: Path) -> Stamp:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class FollowedRun:
    """One run folder. After `look()` there is a `record`, or a `problem` that says which file is wrong and why."""

    def __init__(self, path: Path):
        self.path = path
        self.record: RunRecord | None = None
        self.problem: str | None = None
        self._stamps: dict[str, Stamp] = {}
        self._content: dict[str, Any] = dict.fromkeys(_WHOLE)
        self._rounds: list[dict[str, Any]] = []
        self._read_to = 0  # bytes of rounds.jsonl that have become rounds
        self._lines = 0

    def look(self) -> bool:
        """Read what is new; whether there was anything."""
        stamps = {name: stamp(self.path / name) for name in (*_WHOLE, "rounds.jsonl")}
        if stamps == self._stamps:
            return False
        try:
            self._read(stamps)
            self.problem = None
        except UserError as error:
            self.problem, self.record = str(error), None
        self._stamps = stamps
        return True

    def _read(self, stamps: dict[str, Stamp]) -> None:
        changed = {name for name in stamps if stamps[name] != self._stamps.get(name)}
        for name in _WHOLE:
            if name in changed or self.problem:
                self._content[name] = self._file(name) if stamps[name] else None
        # A run that is taken up again cuts its history: that is another file, not the same one grown.
        now, before = stamps["rounds.jsonl"], self._stamps.get("rounds.jsonl")
        grown = now is not None and before is not None and now[0] == before[0] and now[2] >= self._read_to
        if not grown or self.problem or "config.toml" in changed:
            self._rounds, self._read_to, self._lines = [], 0, 0
        if now is not None:
            self._read_rounds()
        config = self._content["config.toml"]
        if config is None:
            raise UserError(f"{self.path / 'config.toml'} is not there (yet): this is no complete run folder")
        self.record = RunRecord(
            path=self.path,
            config=config,
            rounds=self._rounds,
            partition=self._content["partition.json"],
            summary=self._content["summary.json"],
            versions=self._content["versions.json"],
            resumes=self._content["resumes.jsonl"] or (),
            processes=self._content[PROCESSES] or (),
        )

    def _file(self, name: str) -> Any:
        file = self.path / name
        if name == "config.toml":
            return read_toml(file)
        return read_resumes(file) if name in ("resumes.jsonl", PROCESSES) else read_object(file)

    def _read_rounds(self) -> None:
        file = self.path / "rounds.jsonl"
        with suppress(FileNotFoundError):  # gone between two glances
            try:
                with file.open("rb") as lines:
                    lines.seek(self._read_to)
                    content = lines.read()
            except PermissionError as error:
                raise UserError(f"{file} cannot be read: {os.strerror(error.errno or 0)}; check who may") from error
            whole = content[: content.rfind(b"\n") + 1]  # a line on its way has no end yet
            if whole:
                # The history so far belongs to an older record: leave it as it was.
                self._rounds = [*self._rounds]
                add_rounds(self._rounds, whole, file, self._lines + 1)
                self._read_to += len(whole)
                self._lines += whole.count(b"\n")
