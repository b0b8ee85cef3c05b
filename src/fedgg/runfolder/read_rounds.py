"""The reader of rounds.jsonl: of a whole file, of a file that is still growing, or of the part that a run resumes from.

Lines are appended one at a time, so a kill can tear the last line and no other. A line counts once it ends with a
newline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedgg.files import parse_json
from fedgg.runfolder.checksums import KEY, LineChecksums, sha256
from fedgg.runfolder.validation import check_round


class RoundsReader:
    """Collects the rounds of one rounds.jsonl; `add` each new piece of the file.

    A line that does not hold a round becomes one of the `complaints`, and reading continues after it, so that the rest
    can be shown. With `stop_at_damage` it ends there, and also where a round is missing or a checksum does not fit.
    """

    def __init__(self, *, checksums_required: bool = False, stop_at_damage: bool = False):
        self.rounds: list[dict[str, Any]] = []
        self.ends: list[int] = []  # by round: the bytes of the file up to the end of its line
        self.complaints: list[str] = []
        self.checksums = LineChecksums(required=checksums_required)
        self.bytes_read = 0
        self._lines = 0
        self._stop_at_damage = stop_at_damage

    def add(self, content: bytes, *, skip_malformed_end: bool = False) -> None:
        """Read what follows the `bytes_read` so far; a last line without its newline is left for the next call.

        `skip_malformed_end`: a last line that is not JSON is skipped without a complaint.
        """
        lines = content.split(b"\n")[:-1]
        last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
        for number, line in enumerate(lines):
            if self._stop_at_damage and self.complaints:
                return
            self._lines += 1
            self.bytes_read += len(line) + 1
            self.checksums.check(line + b"\n")
            if self._stop_at_damage and self.checksums.complaint is not None:
                self.complaints.append(self.checksums.complaint)
            elif line.strip():
                self._add_line(line, may_be_malformed=skip_malformed_end and number == last)

    def _add_line(self, line: bytes, may_be_malformed: bool) -> None:
        try:
            record = parse_json(line)
        except ValueError as error:
            if not may_be_malformed:
                self.complaints.append(f"line {self._lines}: {' '.join(str(error).split())}")
            return
        try:
            check_round(record)
            self._check_order(record["round"])
        except ValueError as error:
            self.complaints.append(f"line {self._lines} {' '.join(str(error).split())}")
            return
        record.pop(KEY, None)
        self.rounds.append(record)
        self.ends.append(self.bytes_read)

    def _check_order(self, number: int) -> None:
        last = self.rounds[-1]["round"] if self.rounds else 0
        if number <= last:
            raise ValueError(f"has round {number} after round {last}")
        if self._stop_at_damage and number != last + 1:
            raise ValueError(f"has round {number}, where round {last + 1} belongs")


@dataclass(frozen=True)
class IntactRounds:
    """The rounds of a rounds.jsonl up to the first damaged line: those that a resumed run can build on."""

    content: bytes
    rounds: list[dict[str, Any]]
    ends: list[int]  # by round: the bytes of the file up to the end of its line
    damage: str | None  # what is wrong with the line after them
    has_checksums: bool

    def up_to(self, rounds: int) -> bytes:
        """The content of the file that holds the first `rounds` rounds."""
        return self.content[: self.ends[rounds - 1]] if rounds else b""

    def sha256(self, rounds: int) -> str:
        return sha256(self.up_to(rounds))


def read_intact_rounds(content: bytes, *, checksums_required: bool = False) -> IntactRounds:
    """A last line torn by a kill is left out, and is not damage."""
    reader = RoundsReader(checksums_required=checksums_required, stop_at_damage=True)
    reader.add(content)
    damage = reader.complaints[0] if reader.complaints else None
    return IntactRounds(content, reader.rounds, reader.ends, damage, reader.checksums.present)
