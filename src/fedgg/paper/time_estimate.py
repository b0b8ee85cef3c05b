"""How long the missing runs would take on this machine, and the table of items that `fedgg reproduce --list` prints."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedgg.analysis.run_environment import shown_seconds
from fedgg.core.sampling import stream
from fedgg.data.catalog import PUBLICATIONS
from fedgg.data.dataset import Dataset
from fedgg.engines import Stacked
from fedgg.lab.build import build, chosen_device
from fedgg.lab.config import Experiment
from fedgg.lab.name_resolution import build_engine
from fedgg.lab.run_state import begin, next_job, synchronise
from fedgg.lab.torch_settings import arithmetic
from fedgg.paper.plan import QUICK, READINGS, Item, PlannedMethod, ReproductionPlan, shown_dataset
from fedgg.paper.results import RunFolders
from fedgg.report.tables import NONE, Table
from fedgg.runfolder.read import read_run
from fedgg.runfolder.run_records import RunRecord

PROBE_STEPS = 3  # of each client in each of two rounds, the first of which is a warm-up
MOST_TOGETHER = 24  # runs that are probed together: more cost memory and change little
_DIGITS = ((1, 8, 8), 10, 1437)  # shape, classes, training examples


def steps_a_round(experiment: Experiment) -> int:
    """Local steps of all clients together, as if no client had an incomplete last batch."""
    _, _, examples = _facts(experiment.data.source)
    return -(-experiment.local.epochs * examples // experiment.local.batch)


def seconds_a_step(experiment: Experiment, runs: int = 1) -> float:
    """The time of one client's local step with this experiment's engine, while so many runs are trained together."""
    shape, classes, _ = _facts(experiment.data.source)
    chosen = experiment.engine
    one_by_one = chosen.device == "cpu" and chosen.name != "stacked"
    clients, engine = (1, "fused") if one_by_one else (experiment.split.clients, chosen.name)
    small = experiment.changed(
        {"split.scheme": "iid", "split.clients": clients, "local.epochs": 1, "rounds": 2, "engine.name": engine}
    )
    with arithmetic(small):
        data = _noise(shape, classes, PROBE_STEPS * clients * small.local.batch).to(chosen_device(small))
        federation = build(small, data=data)
        maker, state = build_engine(federation.engine, federation.experiment.engine), begin(federation)
        together = min(runs, MOST_TOGETHER) if isinstance(maker, Stacked) else 1
        jobs = [next_job(federation, state) for _ in range(together)]
        for _ in range(2):
            started = time.perf_counter()
            if isinstance(maker, Stacked):
                maker.train_together(jobs)
            else:
                dict(maker.train(jobs[0]))
            synchronise(federation.net.start)
            spent = time.perf_counter() - started
    return spent / (PROBE_STEPS * clients * together)


def _facts(source: str) -> tuple[tuple[int, ...], int, int]:
    if source not in PUBLICATIONS:
        return _DIGITS
    published = PUBLICATIONS[source]
    return (3, 32, 32), len(published.classes), sum(published.train_counts)


def _noise(shape: tuple[int, ...], classes: int, examples: int) -> Dataset:
    x = torch.from_numpy(stream(0, "pace").integers(0, 256, (examples, *shape), dtype=np.uint8))
    y = torch.arange(examples) % classes
    few = min(examples, 64)
    names = tuple(map(str, range(classes)))
    return Dataset("noise", x, y, x[:few], y[:few], names, peak=255.0)


@dataclass(frozen=True)
class Pace:
    """The time of a round of one run, and how it was measured."""

    seconds: float
    source: str


@dataclass(frozen=True)
class MissingRuns:
    """The runs of some items, and the time of those that have not ended."""

    runs: int
    ended: int
    seconds: float


class Estimate:
    """The time of the missing runs of a plan. A data set is probed once, and only if one of its runs is missing."""

    def __init__(self, plan: ReproductionPlan, out: Path, processes: int):
        self.plan, self.processes = plan, processes
        self.folders = RunFolders(out)
        self.paces: dict[str, Pace] = {}

    def missing(self, items: Iterable[Item]) -> MissingRuns:
        """Of several items together; runs that they share count once."""
        runs = self.plan.runs(tuple(items))
        missing = [(method, seed) for method, seed in runs if not self.folders.ended(method, seed)]
        return MissingRuns(len(runs), len(runs) - len(missing), sum(self._seconds(method) for method, _ in missing))

    def sources(self) -> list[str]:
        """How the time of each data set was measured."""
        return [f"{shown_dataset(dataset)}: {pace.source}" for dataset, pace in self.paces.items()]

    def _seconds(self, method: PlannedMethod) -> float:
        if method.dataset not in self.paces:
            self.paces[method.dataset] = self._pace(method)
        together = self.processes if method.base.engine.device == "cpu" else 1
        return self.paces[method.dataset].seconds * method.base.rounds / together

    def _pace(self, method: PlannedMethod) -> Pace:
        finished = [record for record in self._records(method.dataset) if _comparable(record, method.base)]
        if finished:
            rounds = sum(len(record.rounds) for record in finished)
            seconds = sum(record.seconds for record in finished) / rounds
            runs = f"{len(finished)} finished run{'s' if len(finished) > 1 else ''}"
            return Pace(seconds, f"{seconds:.3g} s a round in {runs} on this device")
        together = sum(missing.dataset == method.dataset for missing, _ in self.plan.runs())
        step, steps = seconds_a_step(method.base, together), steps_a_round(method.base)
        return Pace(
            step * steps,
            f"a probe of a few local steps on random input, {shown_step(step)} a step, {steps} steps a round; "
            "without evaluation and loading",
        )

    def _records(self, dataset: str) -> list[RunRecord]:
        configs = sorted((self.folders.out / dataset).glob("*/seed-*/config.toml"))
        return [read_run(config.parent) for config in configs if (config.parent / "summary.json").exists()]


def shown_step(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _comparable(record: RunRecord, wanted: Experiment) -> bool:
    engine = record.config.get("engine", {})
    same = engine.get("device") == wanted.engine.device and engine.get("precision") == wanted.engine.precision
    return same and record.status == "finished" and bool(record.rounds)


def items_table(plan: ReproductionPlan, out: Path, processes: int) -> Table:
    """The items with their runs, those finished, and the time left; data sets without a finished run are probed."""
    estimate = Estimate(plan, out, processes)
    rows = []
    for item in plan.items:
        without = "the split alone" if item.kind == "split" else "not of these data sets"
        rows.append((item.name, _what(plan, item), *_cells(estimate.missing([item]), without)))
    rows.append(("together", "shared runs are run once", *_cells(estimate.missing(plan.items), NONE)))
    columns = ("item", "what it is", "runs", "finished", "time left here")
    return Table("The paper's tables and figures", columns, tuple(rows), _notes(plan, out, processes, estimate))


def _what(plan: ReproductionPlan, item: Item) -> str:
    """The item in words; a study of one data set with its name, since there are equal studies on others."""
    what = item.title.partition(": ")[2]
    alone = item.ours and len(item.datasets) == 1
    return f"{what}; {shown_dataset(QUICK if plan.quick else item.datasets[0])}" if alone else what


def readings_table() -> Table:
    rows = tuple((name, reading.description) for name, reading in READINGS.items())
    return Table("Readings of FedGG, for --reading", ("name", "what it is"), rows)


def _cells(missing: MissingRuns, without: str) -> tuple[str, str, str]:
    if not missing.runs:
        return "0", "0", without
    time_left = shown_seconds(missing.seconds) if missing.runs > missing.ended else NONE
    return str(missing.runs), str(missing.ended), time_left


def _notes(plan: ReproductionPlan, out: Path, processes: int, estimate: Estimate) -> tuple[str, ...]:
    seeds = ", ".join(map(str, plan.seeds))
    notes = [f"{', '.join(plan.datasets)}; {plan.rounds()} rounds; seeds {seeds}; finished: in {out}."]
    if estimate.sources():
        device = plan.base(plan.datasets[0]).engine.device
        notes.append(
            f"Time left on {device}{f' with {processes} processes' if device == 'cpu' else ''}, estimated from:"
        )
    return (*notes, *estimate.sources())
