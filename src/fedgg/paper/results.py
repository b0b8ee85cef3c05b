"""The records of the runs behind the items: read from folders or archives; missing ones are run."""

from __future__ import annotations

import json
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from fedgg.errors import UserError
from fedgg.files import check_folder
from fedgg.lab.build import check_data
from fedgg.lab.config import Experiment
from fedgg.lab.observer import Observer
from fedgg.lab.parallel_runs import run_all
from fedgg.lab.registry import build_algorithm
from fedgg.lab.run_processes import Job
from fedgg.output_files import writing_to
from fedgg.paper.items import shown_dataset
from fedgg.paper.plan import Line, Plan
from fedgg.registry import names_code
from fedgg.runfolder.archive import read_folded
from fedgg.runfolder.read import RunRecord, read_run


class Results(Protocol):
    def record(self, line: Line, seed: int) -> RunRecord | None: ...


class RunFolders:
    """Runs that lie where this library's own `reproduce` put them; each is read once."""

    def __init__(self, out: Path):
        self.out = out
        self._read: dict[Path, RunRecord | None] = {}

    def record(self, line: Line, seed: int) -> RunRecord | None:
        folder = self.out / line.place(seed)
        if folder not in self._read:
            self._read[folder] = read_run(folder) if (folder / "config.toml").is_file() else None
        return self._read[folder]

    def ended(self, line: Line, seed: int) -> bool:
        """Finished or diverged, under exactly these settings."""
        record = self.record(line, seed)
        if record is None or record.status not in ("finished", "diverged"):
            return False
        begun_as = str((record.versions or {}).get("experiment"))
        return Experiment(**record.config).as_begun(begun_as).hash() == line.experiment(seed).hash()


class FoldedRuns:
    """Runs of all folded files of a folder (or of one file), found by what they are, not by where they ran."""

    def __init__(self, place: Path, precision: str | None = None):
        self.place = place
        self._asked = precision

    @cached_property
    def precision(self) -> str:
        """The one asked for, or else the one most runs have: rows of one table should not differ in it."""
        counts = Counter(_precision(record) for records in self._records.values() for record in records)
        return self._asked or max(counts, key=lambda name: counts[name], default="")

    @cached_property
    def _records(self) -> dict[str, list[RunRecord]]:
        if not self.place.exists():
            raise UserError(f"there is no {self.place}: give a folder of files that `fedgg reproduce --fold` wrote")
        found: dict[str, list[RunRecord]] = {}
        for file in [self.place] if self.place.is_file() else sorted(self.place.glob("*.json")):
            for record in read_folded(file):
                found.setdefault(identity(Experiment(**record.config)), []).append(record)
        return found

    def lying_there(self) -> str:
        """What there is, in a few words, for whoever asked for something else."""
        runs = [Experiment(**record.config) for records in self._records.values() for record in records]
        rounds, seeds = {str(run.rounds) for run in runs}, {str(run.seed) for run in runs}
        count = f"{len(runs)} run{'s' * (len(runs) != 1)}"
        return f"{count} of {', '.join(sorted(rounds, key=int))} rounds, seeds {', '.join(sorted(seeds, key=int))}"

    def record(self, line: Line, seed: int) -> RunRecord | None:
        """Where a run is there in several precisions, the one of the others."""
        found = self._records.get(identity(line.experiment(seed)), [])
        alike = [record for record in found if _precision(record) == self.precision]
        return next(iter([*alike, *found]), None)


class NoRuns:
    """Nothing has been run yet: every cell is missing."""

    def record(self, line: Line, seed: int) -> RunRecord | None:
        return None


def identity(experiment: Experiment) -> str:
    """What was trained: every setting but the name, the engine and the keeping, the algorithm's defaults included."""
    keeping = {"checkpoint_every", "memory_limit_mb"}
    content = experiment.plain({"name": True, "engine": True, "server": keeping})
    if not names_code(experiment.algorithm.name):  # code in a file of results is not loaded; no line of a plan has it
        algorithm = build_algorithm(experiment.algorithm.name, experiment.algorithm.settings)
        content["algorithm"] = {"name": experiment.algorithm.name, **vars(algorithm)}
    return json.dumps(_floats(content), sort_keys=True)


def _precision(record: RunRecord) -> str:
    return Experiment(**record.config).engine.precision


def all_records(plan: Plan, results: Results) -> list[RunRecord]:
    found = [results.record(line, seed) for line, seed in plan.runs()]
    return [record for record in found if record is not None]


def _floats(value: Any) -> Any:
    """1 and 1.0 are one setting."""
    if isinstance(value, dict):
        return {key: _floats(inner) for key, inner in value.items()}
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def missing_jobs(plan: Plan, out: Path, data_folder: Path | None) -> list[Job]:
    """The runs that have not ended yet, in the order they are to be run."""
    folders = RunFolders(out)
    jobs = [
        Job(
            f"{shown_dataset(line.dataset)}, {line.base.name}, seed {seed}",
            line.experiment(seed),
            out / line.place(seed),
            data_folder,
        )
        for line, seed in plan.runs()
        if not folders.ended(line, seed)
    ]
    with writing_to(out):
        for job in jobs:
            check_folder(job.folder, out)
    return jobs


def run_missing(jobs: list[Job], processes: int, observer: Observer) -> None:
    """One data set after another, so that a GPU holds one of them and trains all its runs together."""
    sources = dict.fromkeys(job.experiment.data.source for job in jobs)
    for source in list(sources)[1:]:
        check_data(source, jobs[0].data_folder)
    for source in sources:
        run_all([job for job in jobs if job.experiment.data.source == source], processes, observer)
