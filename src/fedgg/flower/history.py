"""What a run folder tells while somebody else writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedgg.lab.config import Experiment


@dataclass
class History:
    """The rounds of a run, each told once, also where a resumed run drops some and plays them again."""

    out: Path
    told: int = field(default=0)  # the last round that was

    def news(self) -> list[dict[str, Any]]:
        """Rounds written since the last look; a line that is not whole yet comes with the next one."""
        try:
            lines = (self.out / "rounds.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        new = []
        for line in lines[self.told :]:
            try:
                new.append(json.loads(line))
            except ValueError:
                break
        self.told += len(new)
        return new

    def summary(self, experiment: Experiment) -> dict[str, Any] | None:
        """How the run ended, once it has; the end of a shorter run that is to be followed further is none."""
        try:
            told: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        over = told["status"] != "finished" or told["rounds_done"] >= experiment.rounds
        return told if over else None
