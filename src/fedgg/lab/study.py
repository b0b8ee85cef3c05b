"""Several experiments that belong together: algorithms side by side, or a grid of settings, each with several seeds."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedgg.errors import UserError
from fedgg.lab.config import Experiment, read_toml
from fedgg.lab.federated_data import with_given_clients
from fedgg.lab.name_resolution import check_parts
from fedgg.lab.observer import Observer, Observers
from fedgg.lab.parallel_runs import run_all
from fedgg.lab.run_places import Shard, shards_of
from fedgg.lab.run_processes import Job
from fedgg.lab.study_folder import Index, check_folders, listed, place_of
from fedgg.runfolder.locks import check_locking
from fedgg.runfolder.record_types import flat
from fedgg.runfolder.waiting import WaitingRuns, waiting_runs

SECONDS_BETWEEN_WRITES = 2.0  # of what runs wait for
MANY = 1e6  # larger numbers are shown as they are typed


@dataclass(frozen=True)
class Study:
    """A base experiment, what each variant changes in it, and the seeds each is run with."""

    base: Experiment
    variants: dict[str, dict[str, Any]]  # label -> dotted keys
    seeds: tuple[int, ...]
    reference: str  # the label others are measured against

    def __post_init__(self) -> None:
        check_labels(tuple(self.variants), self.seeds, self.reference)
        for label, changes in self.variants.items():
            if reserved := [key for key in ("seed", "name") if key in changes]:
                instead = "seeds (--seeds)" if reserved == ["seed"] else "labels"
                raise UserError(f"{label}: a variant cannot set {reserved[0]}; a study has {instead} for that")
        for label, seed in itertools.product(self.variants, self.seeds):
            check_parts(self.experiment(label, seed))  # all mistakes before the first run

    def experiment(self, label: str, seed: int) -> Experiment:
        """The experiment of one variant with one seed."""
        return self.base.changed({**self.variants[label], "name": label, "seed": seed})

    def hash(self) -> str:
        """Identity of the whole study, for a folder of its own."""
        parts = [self.experiment(label, seed).hash() for label in self.variants for seed in self.seeds]
        return hashlib.sha256(" ".join([*self.variants, *parts]).encode()).hexdigest()

    def jobs(self, folder: Path, data_folder: Path | None) -> list[Job]:
        """Seed by seed, so that all variants can be compared as early as possible."""
        return [
            Job(f"{label}, seed {seed}", self.experiment(label, seed), folder / place_of(label, seed), data_folder)
            for seed in self.seeds
            for label in self.variants
        ]


def run_study(
    study: Study,
    folder: Path,
    *,
    processes: int = 1,
    observer: Observer,
    data_folder: Path | None = None,
    command: str | None = None,
    shard: Shard | None = None,
    runner: Callable[[list[Job], Observer], None] | None = None,
) -> None:
    """Run what is missing; finished runs are kept, interrupted ones go on. `command` is written down for people.

    What other calls have run in the folder stays a part of it, and other processes may work there at the same time.
    `shard`: run a fixed part of the study alone. `runner` runs the jobs in place of `processes` processes here.
    """
    if shard is not None:
        check_locking(folder)
    jobs = [
        replace(job, experiment=with_given_clients(job.experiment, None, data_folder))
        for job in study.jobs(folder, data_folder)
    ]
    shards = shards_of(jobs, shard.count if shard else 1, lambda job: job.experiment.name)
    chosen = [job for job, one in zip(jobs, shards, strict=True) if shard is None or one == shard]
    index = Index(tuple(study.variants), study.seeds, study.reference)
    others = {job.name: one for job, one in zip(jobs, shards, strict=True) if shard not in (None, one)}
    with listed(index, folder, jobs, command), noting_waits(observer, folder, jobs, others) as noted:
        if runner is None:
            run_all(chosen, processes, noted)
        else:
            runner(chosen, noted)


@contextmanager
def noting_waits(
    observer: Observer, folder: Path, jobs: Sequence[Job], shards: Mapping[str, Shard] | None = None
) -> Iterator[Observer]:
    """The observer, and within the block what runs wait for is written down. `shards`: of runs of other processes."""
    reasons = {}
    for job in jobs:
        shard = (shards or {}).get(job.name)
        reason = "for the runs before it" if shard is None else f"for shard {shard} of this study"
        reasons[job.name] = (place_of(job.experiment.name, job.experiment.seed), reason)
    with waiting_runs(folder) as waiting:
        yield WaitingObserver(observer, waiting, reasons)


class WaitingObserver(Observers):
    """Writes down which runs have not begun and what they wait for, until they start."""

    def __init__(self, observer: Observer, waiting: WaitingRuns, reasons: Mapping[str, tuple[str, str]]):
        """`reasons`: by the name of a run, its place in the study folder and what it waits for."""
        super().__init__([observer])
        self._waiting, self._reasons = waiting, dict(reasons)
        self._written_at = float("-inf")
        self._write()

    def on_phase(self, run: str, phase: str) -> None:
        if run in self._reasons:
            self._reasons[run] = (self._reasons[run][0], phase)
            self._write()
        super().on_phase(run, phase)

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        self._reasons.pop(run, None)
        self._write()
        super().on_start(run, rounds_done, rounds)

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        self._write()
        super().on_round(run, record)

    def _write(self) -> None:
        if time.monotonic() - self._written_at >= SECONDS_BETWEEN_WRITES:
            self._waiting.write({place: f"waits {reason}" for place, reason in self._reasons.values()})
            self._written_at = time.monotonic()


def check_labels(labels: Sequence[str], seeds: Sequence[int], reference: str) -> None:
    if not labels or not seeds:
        raise UserError("a study needs at least one variant and one seed")
    if reference not in labels:
        raise UserError(f"the reference {reference!r} is none of the variants: {', '.join(labels)}")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"seeds {list(seeds)}: name each seed once")
    check_folders(labels)


def grid(axes: Mapping[str, Sequence[Any]], names: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Every combination of values, labelled by what it sets: by the last part of a key, where that says enough.

    `names` are shorter forms of values, for labels only.
    """
    names = names or {}
    last = [key.rpartition(".")[2] for key in axes]
    shown = {key: key if part == "name" or last.count(part) > 1 else part for key, part in zip(axes, last, strict=True)}
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return {
        " ".join(f"{shown[key]}={names.get(str(value), _shown(value))}" for key, value in c.items()): c
        for c in combinations
    }


def _shown(value: Any) -> str:
    """1000.0 as 1000, since 1 beside it is typed as 1."""
    return f"{int(value)}" if isinstance(value, float) and value.is_integer() and abs(value) < MANY else str(value)


def load_study(path: Path) -> Study:
    """A TOML file: `seeds`, `reference`, `[experiment]`, and `[variants.LABEL]` tables of dotted keys."""
    return study_in(read_toml(path), path)


def study_in(content: Mapping[str, Any], path: Path, *others: str) -> Study:
    """The study in the content of a file; `others` are keys that have been read already."""
    known = {"seeds", "reference", "experiment", "variants"}
    if unknown := sorted(content.keys() - known):
        raise UserError(f"{path}: unknown key {unknown[0]!r}; a study has {', '.join(sorted({*known, *others}))}")
    for key in ("experiment", "variants"):
        if not isinstance(content.get(key, {}), dict):
            raise UserError(f"{path}: {key} must be a table, got {content[key]!r}")
    seeds = content.get("seeds", [0])
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
        raise UserError(f"{path}: seeds must be a list of whole numbers, got {seeds!r}")
    try:
        variants = {}
        for label, changes in content.get("variants", {}).items():
            if not isinstance(changes, dict):
                raise UserError(f"variants.{label} must be a table of settings, got {changes!r}")
            variants[label] = flat(changes)
        reference = content.get("reference", next(iter(variants), ""))
        return Study(Experiment(**content.get("experiment", {})), variants, tuple(seeds), reference)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def demo_study() -> Study:
    return load_study(Path(__file__).with_name("demo.toml"))
