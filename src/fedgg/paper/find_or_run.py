"""The runs of the items of `fedgg reproduce`: read from files, run if missing, their time estimated."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedgg.analysis.run_environment import shown_seconds
from fedgg.cluster.runners import Runner
from fedgg.core.random_choices import stream
from fedgg.data.catalog import PUBLICATIONS
from fedgg.data.dataset import Dataset
from fedgg.engines import Stacked
from fedgg.errors import UserError
from fedgg.files import check_folder, writing_to
from fedgg.lab.build import build
from fedgg.lab.config import STORAGE, Experiment
from fedgg.lab.engine_setup import arithmetic, build_engine, chosen_device
from fedgg.lab.federated_data import load_data
from fedgg.lab.name_resolution import build_algorithm
from fedgg.lab.observer import Observer
from fedgg.lab.one_round import begin, next_job, synchronise
from fedgg.lab.run_places import Shard
from fedgg.lab.run_processes import Job
from fedgg.paper.items import QUICK, READINGS, Item, shown_dataset
from fedgg.paper.plan import PlannedMethod, ReproductionPlan
from fedgg.registry import names_code
from fedgg.report.tables import NONE, Table
from fedgg.runfolder.archive_file import read_archive
from fedgg.runfolder.locks import check_locking
from fedgg.runfolder.read import read_run
from fedgg.runfolder.record_types import RunRecord


class Results(Protocol):
    """A source of runs, by method and seed."""

    def record(self, method: PlannedMethod, seed: int) -> RunRecord | None: ...


class RunFolders:
    """Run folders that `fedgg reproduce` wrote; each is read once."""

    def __init__(self, out: Path):
        self.out = out
        self._read: dict[Path, RunRecord | None] = {}

    def record(self, method: PlannedMethod, seed: int) -> RunRecord | None:
        folder = self.out / method.folder(seed)
        if folder not in self._read:
            self._read[folder] = read_run(folder) if (folder / "config.toml").is_file() else None
        return self._read[folder]

    def ended(self, method: PlannedMethod, seed: int) -> bool:
        """Whether the run finished or diverged, with exactly these settings."""
        record = self.record(method, seed)
        if record is None or record.status not in ("finished", "diverged"):
            return False
        begun_as = str((record.versions or {}).get("experiment"))
        return Experiment(**record.config).as_begun(begun_as).hash() == method.experiment(seed).hash()


class ArchivedRuns:
    """The runs in one archive, or in all archives of a folder, found by their settings."""

    def __init__(self, place: Path, precision: str | None = None):
        self.place = place
        self._chosen_precision = precision

    @cached_property
    def precision(self) -> str:
        """The chosen one, or else that of most runs: the rows of a table should not differ in it."""
        counts = Counter(_precision(record) for records in self._records.values() for record in records)
        return self._chosen_precision or max(counts, key=lambda name: counts[name], default="")

    @cached_property
    def _records(self) -> dict[str, list[RunRecord]]:
        if not self.place.exists():
            raise UserError(f"{self.place} does not exist: name archives that `fedgg reproduce --fold` wrote")
        by_settings: dict[str, list[RunRecord]] = {}
        for file in [self.place] if self.place.is_file() else sorted(self.place.glob("*.json")):
            for record in read_archive(file):
                by_settings.setdefault(identity(Experiment(**record.config)), []).append(record)
        return by_settings

    def content(self) -> str:
        """The number of runs, rounds and seeds, for a message that the requested runs are not among them."""
        runs = [Experiment(**record.config) for records in self._records.values() for record in records]
        rounds, seeds = {str(run.rounds) for run in runs}, {str(run.seed) for run in runs}
        count = f"{len(runs)} run{'s' * (len(runs) != 1)}"
        return f"{count} of {', '.join(sorted(rounds, key=int))} rounds, seeds {', '.join(sorted(seeds, key=int))}"

    def record(self, method: PlannedMethod, seed: int) -> RunRecord | None:
        """Of a run in several precisions, the one in the precision of the others."""
        records = self._records.get(identity(method.experiment(seed)), [])
        preferred = [record for record in records if _precision(record) == self.precision]
        return next(iter([*preferred, *records]), None)


class NoRuns:
    """Without any run: every cell is missing."""

    def record(self, method: PlannedMethod, seed: int) -> RunRecord | None:
        return None


def identity(experiment: Experiment) -> str:
    """The settings that decide what is trained, as text: without name, engine and storage, with default values."""
    content = experiment.model_dump(mode="json", exclude={"name": True, "engine": True, "server": STORAGE})
    if not names_code(experiment.algorithm.name):  # code named in an archive is not loaded; no planned method names any
        algorithm = build_algorithm(experiment.algorithm.name, experiment.algorithm.settings)
        content["algorithm"] = {"name": experiment.algorithm.name, **vars(algorithm)}
    return json.dumps(_floats(content), sort_keys=True)


def _precision(record: RunRecord) -> str:
    return Experiment(**record.config).engine.precision


def all_records(plan: ReproductionPlan, results: Results) -> list[RunRecord]:
    records = [results.record(method, seed) for method, seed in plan.runs()]
    return [record for record in records if record is not None]


def _floats(value: Any) -> Any:
    """Integers as floats, so that 1 and 1.0 are the same setting."""
    if isinstance(value, dict):
        return {key: _floats(inner) for key, inner in value.items()}
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def missing_jobs(plan: ReproductionPlan, out: Path, data_folder: Path | None, shard: Shard | None = None) -> list[Job]:
    """The runs, or those of a shard, that have not ended, in the order in which they are run."""
    if shard is not None:
        check_locking(out)
    folders = RunFolders(out)
    jobs = [
        Job(
            f"{shown_dataset(method.dataset)}, {method.base.name}, seed {seed}",
            method.experiment(seed),
            out / method.folder(seed),
            data_folder,
        )
        for method, seed in plan.runs_to_make(shard=shard)
        if not folders.ended(method, seed)
    ]
    with writing_to(out):
        for job in jobs:
            check_folder(job.folder, out)
    return jobs


def run_missing(jobs: list[Job], runner: Runner, observer: Observer, *, on_ray: bool = False) -> None:
    """Run one data set after another, so that a GPU holds one of them and trains all its runs together.

    On Ray all at once: nodes need not wait for each other.
    """
    data_sets = dict.fromkeys(job.experiment.data.data_set for job in jobs)
    for data in list(data_sets)[1:]:
        load_data(data, jobs[0].data_folder)  # a data set that is not there is reported now, not hours later
    if on_ray:
        runner(jobs, observer)
        return
    for data in data_sets:
        runner([job for job in jobs if job.experiment.data.data_set == data], observer)


PROBE_STEPS = 3  # of each client in each of two rounds, the first of which is a warm-up
MOST_TOGETHER = 24  # runs that are probed together: more cost memory and change little
_DIGITS = ((1, 8, 8), 10, 1437)  # shape, classes, training examples


def steps_a_round(experiment: Experiment) -> int:
    """Local steps of all clients of a round together, as if no client had an incomplete last batch."""
    _, _, examples = _facts(experiment.data.source)
    clients = experiment.split.clients
    examples = examples * experiment.cohort_of(clients) // clients
    return -(-experiment.local.epochs * examples // experiment.local.batch)


def seconds_a_step(experiment: Experiment, runs: int = 1) -> float:
    """The time of one client's local step with this experiment's engine, with `runs` runs trained together."""
    shape, classes, _ = _facts(experiment.data.source)
    chosen = experiment.engine
    one_by_one = chosen.devices[0] == "cpu" and chosen.name != "stacked"  # clients are trained one after another
    cohort = experiment.cohort_of(experiment.split.clients)
    clients, engine = (1, "fused") if one_by_one else (cohort, chosen.name)
    split = {"split.scheme": "iid", "split.clients": clients, "server.cohort": None}
    on_one = {"engine.device": chosen.devices[0], "engine.name": "auto" if engine == "devices" else engine}
    small = experiment.changed({**split, **on_one, "local.epochs": 1, "rounds": 2})
    with arithmetic(small):
        data = _noise(shape, classes, PROBE_STEPS * clients * small.local.batch).to(chosen_device(small))
        federation = build(small, data=data)
        trainer, state = build_engine(federation.choice, federation.experiment.engine), begin(federation)
        together = min(runs, MOST_TOGETHER) if isinstance(trainer, Stacked) else 1
        jobs = [next_job(federation, state) for _ in range(together)]
        for _ in range(2):
            started = time.perf_counter()
            if isinstance(trainer, Stacked):
                trainer.train_together(jobs)
            else:
                dict(trainer.train(jobs[0]))
            synchronise(federation.net.start)
            spent = time.perf_counter() - started
    return spent / (PROBE_STEPS * clients * together)


def _facts(source: str) -> tuple[tuple[int, ...], int, int]:
    if source not in PUBLICATIONS:
        return _DIGITS
    published = PUBLICATIONS[source]
    return published.shape, len(published.classes), sum(published.train_counts)


def _noise(shape: tuple[int, ...], classes: int, examples: int) -> Dataset:
    x = torch.from_numpy(stream(0, "pace").integers(0, 256, (examples, *shape), dtype=np.uint8))
    y = torch.arange(examples) % classes
    few = min(examples, 64)
    names = tuple(map(str, range(classes)))
    return Dataset("noise", x, y, x[:few], y[:few], names, peak=255.0)


@dataclass(frozen=True)
class Pace:
    """The time of a client's local step, and how it was measured."""

    seconds: float
    source: str


@dataclass(frozen=True)
class MissingRuns:
    """The runs of some items, and the time of those that have not ended."""

    runs: int
    ended: int
    seconds: float


class Estimate:
    """The time of the missing runs of a plan: a local step is timed once for each kind that a missing run has."""

    def __init__(self, plan: ReproductionPlan, out: Path, processes: int):
        self.plan, self.processes = plan, processes
        self.folders = RunFolders(out)
        self.paces: dict[tuple[str, str, int], Pace] = {}  # by data set, model and batch size

    def missing(self, items: Iterable[Item]) -> MissingRuns:
        """Of several items together; runs that they share count once."""
        runs = self.plan.runs_to_make(tuple(items))
        missing = [(method, seed) for method, seed in runs if not self.folders.ended(method, seed)]
        return MissingRuns(len(runs), len(runs) - len(missing), sum(self._seconds(method) for method, _ in missing))

    def sources(self) -> list[str]:
        """How the time of each kind of step was measured."""
        return [
            f"{shown_dataset(dataset)}, {model}, batches of {batch}: {pace.source}"
            for (dataset, model, batch), pace in self.paces.items()
        ]

    def _seconds(self, method: PlannedMethod) -> float:
        kind = method.dataset, method.base.model.name, method.base.local.batch
        if kind not in self.paces:
            self.paces[kind] = self._pace(method)
        together = self.processes if method.base.engine.devices[0] == "cpu" else 1
        return self.paces[kind].seconds * steps_a_round(method.base) * method.base.rounds / together

    def _pace(self, method: PlannedMethod) -> Pace:
        finished = [record for record in self._records(method.dataset) if _comparable(record, method.base)]
        if finished:
            steps = sum(client["steps"] for record in finished for line in record.rounds for client in line["clients"])
            seconds = sum(record.seconds for record in finished) / steps
            runs = f"{len(finished)} finished run{'s' if len(finished) > 1 else ''}"
            return Pace(seconds, f"{shown_step(seconds)} a step in {runs} on this device")
        together = sum(missing.dataset == method.dataset for missing, _ in self.plan.runs())
        seconds = seconds_a_step(method.base, together)
        return Pace(
            seconds,
            f"a probe of a few local steps on random input, {shown_step(seconds)} a step; without evaluation and "
            "loading",
        )

    def _records(self, dataset: str) -> list[RunRecord]:
        configs = sorted((self.folders.out / dataset).glob("*/seed-*/config.toml"))
        return [read_run(config.parent) for config in configs if (config.parent / "summary.json").exists()]


def shown_step(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _comparable(record: RunRecord, wanted: Experiment) -> bool:
    engine = record.config.get("engine", {})
    same = engine.get("device") == wanted.engine.device and engine.get("precision") == wanted.engine.precision
    same = same and record.config.get("model", {}).get("name") == wanted.model.name
    same = same and record.config.get("local", {}).get("batch") == wanted.local.batch
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
    datasets = dict.fromkeys(name for item in plan.items for name in plan.datasets_of(item))
    notes = [f"{', '.join(datasets)}; {plan.rounds()} rounds; seeds {seeds}; finished: in {out}."]
    if estimate.sources():
        device = plan.base(plan.datasets[0]).engine.device
        notes.append(
            f"Time left on {device}{f' with {processes} processes' if device == 'cpu' else ''}, estimated from:"
        )
    return (*notes, *estimate.sources())
