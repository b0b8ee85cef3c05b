"""How long what is missing will take here: by runs that have finished here, or else by a few local steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedgg.lab.config import Experiment
from fedgg.lab.pace import seconds_a_step, steps_a_round
from fedgg.paper.items import Item, shown_dataset
from fedgg.paper.plan import Line, Plan
from fedgg.paper.results import RunFolders
from fedgg.report.folders import RunRecord, read_run


@dataclass(frozen=True)
class Pace:
    """Seconds of one run's round, and how that is known."""

    seconds: float
    source: str


@dataclass(frozen=True)
class Need:
    """What an item still takes."""

    item: Item
    runs: int
    ended: int
    seconds: float


class Estimate:
    """Of one plan in one folder; data sets are probed once, and only where something is missing."""

    def __init__(self, plan: Plan, out: Path, processes: int):
        self.plan, self.processes = plan, processes
        self.folders = RunFolders(out)
        self.paces: dict[str, Pace] = {}

    def need(self, items: Iterable[Item]) -> Need:
        """Of several items together: runs that they share count once."""
        items = tuple(items)
        runs = self.plan.runs(items)
        missing = [(line, seed) for line, seed in runs if not self.folders.ended(line, seed)]
        return Need(items[0], len(runs), len(runs) - len(missing), sum(self._seconds(line) for line, _ in missing))

    def sources(self) -> list[str]:
        """How each estimate was made."""
        return [f"{shown_dataset(dataset)}: {pace.source}" for dataset, pace in self.paces.items()]

    def _seconds(self, line: Line) -> float:
        if line.dataset not in self.paces:
            self.paces[line.dataset] = self._pace(line)
        together = self.processes if line.base.engine.device == "cpu" else 1
        return self.paces[line.dataset].seconds * line.base.rounds / together

    def _pace(self, line: Line) -> Pace:
        finished = [record for record in self._records(line.dataset) if _alike(record, line.base)]
        if finished:
            rounds = sum(len(record.rounds) for record in finished)
            seconds = sum(record.seconds for record in finished) / rounds
            runs = f"{len(finished)} finished run{'s' if len(finished) > 1 else ''}"
            return Pace(seconds, f"{seconds:.3g} s a round in {runs} on this device")
        together = sum(missing.dataset == line.dataset for missing, _ in self.plan.runs())
        step, steps = seconds_a_step(line.base, together), steps_a_round(line.base)
        return Pace(
            step * steps,
            f"a probe of a few local steps on random input, {shown_step(step)} a step, {steps} steps a round; "
            "evaluation and loading are not in it",
        )

    def _records(self, dataset: str) -> list[RunRecord]:
        configs = sorted((self.folders.out / dataset).glob("*/seed-*/config.toml"))
        return [read_run(config.parent) for config in configs if (config.parent / "summary.json").exists()]


def shown_step(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _alike(record: RunRecord, wanted: Experiment) -> bool:
    engine = record.config.get("engine", {})
    same = engine.get("device") == wanted.engine.device and engine.get("precision") == wanted.engine.precision
    return same and record.status == "finished" and bool(record.rounds)
