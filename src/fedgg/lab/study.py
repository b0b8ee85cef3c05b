"""Several experiments that belong together: algorithms side by side, or a grid of settings, each with several seeds."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedgg.errors import UserError
from fedgg.lab.config import Experiment, read_toml
from fedgg.lab.federated_data import with_given_clients
from fedgg.lab.name_resolution import check_parts
from fedgg.lab.observer import Observer
from fedgg.lab.parallel_runs import run_all
from fedgg.lab.run_processes import Job
from fedgg.lab.study_folder import Index, check_folders, listed, place_of
from fedgg.runfolder.record_types import flat

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
            if own := [key for key in ("seed", "name") if key in changes]:
                said = "seeds (--seeds)" if own == ["seed"] else "labels"
                raise UserError(f"{label}: a variant cannot set {own[0]}; a study has {said} for that")
        for label, seed in itertools.product(self.variants, self.seeds):
            check_parts(self.experiment(label, seed))  # all mistakes before the first run

    def experiment(self, label: str, seed: int) -> Experiment:
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
    processes: int,
    observer: Observer,
    data_folder: Path | None = None,
    command: str | None = None,
) -> None:
    """Run what is missing; finished runs are kept, interrupted ones go on. `command` is written down for people.

    What other calls have run in the folder stays a part of it, and other processes may work there at the same time.
    """
    jobs = [
        replace(job, experiment=with_given_clients(job.experiment, None, data_folder))
        for job in study.jobs(folder, data_folder)
    ]
    with listed(Index(tuple(study.variants), study.seeds, study.reference), folder, jobs, command):
        run_all(jobs, processes, observer)


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
    shown = {key: key if own == "name" or last.count(own) > 1 else own for key, own in zip(axes, last, strict=True)}
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
