"""The runs behind the items of `fedgg reproduce`: read from run folders or from archives, and missing ones run."""

from __future__ import annotations

import json
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from fedgg.errors import UserError
from fedgg.files import check_folder, writing_to
from fedgg.lab.build import check_data
from fedgg.lab.config import Experiment
from fedgg.lab.name_resolution import build_algorithm
from fedgg.lab.observer import Observer
from fedgg.lab.parallel_runs import run_all
from fedgg.lab.run_processes import Job
from fedgg.paper.plan import PlannedMethod, ReproductionPlan, shown_dataset
from fedgg.registry import names_code
from fedgg.runfolder.json_archive import read_archive
from fedgg.runfolder.read import read_run
from fedgg.runfolder.run_records import RunRecord


class Results(Protocol):
    """Where the run of a method and seed is read from."""

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
            raise UserError(f"there is no {self.place}: give a folder of archives that `fedgg reproduce --fold` wrote")
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
    storage = {"checkpoint_every", "memory_limit_mb"}
    content = experiment.plain({"name": True, "engine": True, "server": storage})
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
    """1 and 1.0 are one setting."""
    if isinstance(value, dict):
        return {key: _floats(inner) for key, inner in value.items()}
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def missing_jobs(plan: ReproductionPlan, out: Path, data_folder: Path | None) -> list[Job]:
    """The runs that have not ended, in the order in which they are run."""
    folders = RunFolders(out)
    jobs = [
        Job(
            f"{shown_dataset(method.dataset)}, {method.base.name}, seed {seed}",
            method.experiment(seed),
            out / method.folder(seed),
            data_folder,
        )
        for method, seed in plan.runs()
        if not folders.ended(method, seed)
    ]
    with writing_to(out):
        for job in jobs:
            check_folder(job.folder, out)
    return jobs


def run_missing(jobs: list[Job], processes: int, observer: Observer) -> None:
    """Run one data set after another, so that a GPU holds one of them and trains all its runs together."""
    sources = dict.fromkeys(job.experiment.data.source for job in jobs)
    for source in list(sources)[1:]:
        check_data(source, jobs[0].data_folder)
    for source in sources:
        run_all([job for job in jobs if job.experiment.data.source == source], processes, observer)
