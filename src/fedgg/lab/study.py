"""Several experiments that belong together: algorithms side by side, or a grid of settings, each with several seeds."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgg.errors import UserError
from fedgg.files import check_folder, read_json
from fedgg.lab.config import Experiment, flat, read_toml
from fedgg.lab.files import write_json, writing_to
from fedgg.lab.jobs import Job, Tell
from fedgg.lab.parts import build_algorithm, check_model_name, check_needs
from fedgg.lab.run_all import run_all
from fedgg.lab.store import Store
from fedgg.lab.trial_builds import build_on_trial

FORMAT = 1
LONGEST = 80  # name of a folder
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
            experiment = self.experiment(label, seed)
            algorithm = build_algorithm(experiment.algorithm.name, experiment.algorithm.settings)
            check_needs(algorithm, experiment)  # all mistakes before the first run
            check_model_name(experiment.model.name)

    def experiment(self, label: str, seed: int) -> Experiment:
        return self.base.changed({**self.variants[label], "name": label, "seed": seed})

    def hash(self) -> str:
        """Identity of the whole study, for a folder of its own."""
        parts = [self.experiment(label, seed).hash() for label in self.variants for seed in self.seeds]
        return hashlib.sha256(" ".join([*self.variants, *parts]).encode()).hexdigest()

    def jobs(self, folder: Path, data_folder: Path | None) -> list[Job]:
        """Seed by seed, so that all variants can be compared as early as possible."""
        return [
            Job(f"{label}, seed {seed}", self.experiment(label, seed), folder / place(label, seed), data_folder)
            for seed in self.seeds
            for label in self.variants
        ]


def run_study(
    study: Study,
    folder: Path,
    *,
    processes: int,
    tell: Tell,
    data_folder: Path | None = None,
    command: str | None = None,
) -> None:
    """Run what is missing; finished runs are kept, interrupted ones go on. `command` is written down for people."""
    jobs = study.jobs(folder, data_folder)
    open_index(Index(tuple(study.variants), study.seeds, study.reference), folder, jobs, command)
    run_all(jobs, processes, tell)


@dataclass(frozen=True)
class Index:
    """What a study's folder says of itself."""

    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str


def check_labels(labels: Sequence[str], seeds: Sequence[int], reference: str) -> None:
    if not labels or not seeds:
        raise UserError("a study needs at least one variant and one seed")
    if reference not in labels:
        raise UserError(f"the reference {reference!r} is none of the variants: {', '.join(labels)}")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"seeds {list(seeds)}: name each seed once")
    folder, count = Counter(map(slug, labels)).most_common(1)[0]
    if count > 1:
        raise UserError(f"two variants would share the folder {folder!r}: give them different labels")


def open_index(index: Index, folder: Path, jobs: Sequence[Job], command: str | None = None) -> None:
    """Write the index, once it is sure that all runs can be built and nothing of an earlier study is overwritten."""
    if Store(folder).holds_a_run():
        raise UserError(f"{folder} holds a single run: choose another folder (--out, or out= in Python)")
    for job in jobs:
        Store(job.folder).refuse_another(job.experiment)  # before anything of an earlier study is overwritten
    _refuse_another_study(index, folder)
    build_on_trial(jobs)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            check_folder(job.folder, folder)
        content = {
            "format": FORMAT,
            "labels": list(index.labels),
            "seeds": list(index.seeds),
            "reference": index.reference,
            "runs": {label: {str(s): place(label, s) for s in index.seeds} for label in index.labels},
            **({} if command is None else {"command": command}),
        }
        write_json(folder / "study.json", content)


def _refuse_another_study(index: Index, folder: Path) -> None:
    """A folder's index may grow; it does not lose rows or seeds of which rounds were played."""
    try:
        there = read_json(folder / "study.json")
        begun = {
            (label, int(seed))
            for label, by_seed in there["runs"].items()
            for seed, where in by_seed.items()
            if Store(folder / where).rounds()
        }
        lost = [str(label) for label in there["labels"] if label not in index.labels and label in {a for a, _ in begun}]
        seeds = [seed for seed in there["seeds"] if seed not in index.seeds and seed in {b for _, b in begun}]
    except (OSError, ValueError, KeyError, TypeError):
        return  # there is none, or none that could be read
    if lost or seeds:
        what = f"the row {lost[0]!r}" if lost else f"seed {seeds[0]}"
        raise UserError(
            f"{folder} holds a study with {what}, which is not in this one: add it, or choose another folder "
            f"(--out, or out= in Python)"
        )


def grid(axes: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Every combination of values, labelled by what it sets: by the last part of a key, where that says enough."""
    last = [key.rpartition(".")[2] for key in axes]
    shown = {key: key if own == "name" or last.count(own) > 1 else own for key, own in zip(axes, last, strict=True)}
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return {" ".join(f"{shown[key]}={_shown(value)}" for key, value in c.items()): c for c in combinations}


def _shown(value: Any) -> str:
    """1000.0 as 1000, since 1 beside it is typed as 1."""
    return f"{int(value)}" if isinstance(value, float) and value.is_integer() and abs(value) < MANY else str(value)


def load_study(path: Path) -> Study:
    """A TOML file: `seeds`, `reference`, `[experiment]`, and `[variants.LABEL]` tables of dotted keys."""
    content = read_toml(path)
    known = {"seeds", "reference", "experiment", "variants"}
    if unknown := sorted(content.keys() - known):
        raise UserError(f"{path}: unknown key {unknown[0]!r}; a study has {', '.join(sorted(known))}")
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


def slug(label: str) -> str:
    """A folder name for any label; what a folder's name cannot say, or is too long to, tells a few digits apart."""
    plain = re.sub(r"[^a-z0-9.=]+", "-", label.lower()).strip("-.")
    says_it = label.isascii() and "+" not in label and len(plain) <= LONGEST
    digits = "" if says_it else hashlib.sha256(label.encode()).hexdigest()[:6]
    return "-".join(filter(None, (plain[:LONGEST].strip("-."), digits))) or "variant"


def place(label: str, seed: int) -> str:
    return f"{slug(label)}/seed-{seed}"
