"""What a run folder tells while somebody else writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgg.checksums import FILE
from fedgg.errors import UserError
from fedgg.files import parse_lines, read_bytes, read_json
from fedgg.lab.config import Experiment
from fedgg.run_records import summary_in


@dataclass
class Lines:
    """A file that grows by a JSON object a line. Each is told once; what was there before us, not at all."""

    file: Path

    def __post_init__(self) -> None:
        self.told = 0
        self.news()

    def news(self) -> list[dict[str, Any]]:
        """What was written since the last look; a line that is not whole yet comes with the next one."""
        try:
            lines = read_bytes(self.file).split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        new: list[dict[str, Any]] = []
        for _, line in parse_lines(b"\n".join(lines[self.told :])):
            if not isinstance(line, dict):
                break
            new.append(line)
        self.told += len(new)
        return new


class History:
    """A run: its rounds, and the exchanges of messages behind them."""

    def __init__(self, out: Path):
        self.rounds, self.exchanges = Lines(out / "rounds.jsonl"), Lines(out / "exchanges.jsonl")
        self._summary = out / "summary.json"
        self._earlier: tuple[int, int] | None = None

    def resume(self) -> None:
        """The run goes on: the summary that is there is of its earlier end."""
        self._earlier = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._summary.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def silent(self) -> dict[int, int]:
        """Clients that have let a deadline pass since the last look, and in which round."""
        return {
            gone["client"]: exchange["round"]
            for exchange in self.exchanges.news()
            for gone in exchange["lost"]
            if str(gone["why"]).startswith("no answer")
        }

    def summary(self, experiment: Experiment) -> dict[str, Any] | None:
        """How the run ended, once it has; the end of a shorter run that is to be followed further is none."""
        if self._earlier is not None and self._identity() == self._earlier:
            return None
        try:
            content = read_json(self._summary)
            summary, _ = summary_in(content, checksum_required=(self._summary.parent / FILE).exists())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{self._summary} cannot be read ({error}): delete it, and it is written again") from error
        over = summary["status"] != "finished" or summary["rounds_done"] >= experiment.rounds
        return summary if over else None
