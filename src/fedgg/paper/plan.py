"""The runs that the items of a reproduction need: their methods, settings and folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.run_places import Shard, shards_of
from fedgg.lab.study import Study, load_study
from fedgg.lab.study_folder import slug
from fedgg.paper.items import BETA, QUICK, READINGS, Item, beta_of, check_readings, full_split_name, split_name
from fedgg.registry import nearest

METHODS = ("FedAvg", "FedProx", "SCAFFOLD", "FedGG")  # of the paper's tables


@cache
def preset(name: str) -> Study:
    """A study of experiments/ by name."""
    return load_study(_study_file(f"{name}.toml"))


def _study_file(file: str) -> Path:
    """A study file of experiments/: in a wheel beside this file (setup.py puts it there), else in the checkout."""
    for folder in (Path(__file__).parent / "studies", Path(__file__).parents[3] / "experiments"):
        if (folder / file).is_file():
            return folder / file
    raise UserError(f"experiments/{file} is missing from the installation: reinstall fedgg, or run from its repository")


# Settings that --set cannot change, and what decides them instead.
_FIXED = {
    "seed": "--seeds",
    "name": "the item",
    "rounds": "--rounds",
    "split.beta": "the item (table1, table2, ...)",
    "split.scheme": "the item",
    "split.labels_per_client": "the item",
    "data.source": "--datasets",
    "algorithm": "--reading",
}
QUICK_MIN_EXAMPLES = 40  # in studies without small clients: a client holds 144 of the digits on average


@dataclass(frozen=True)
class PlannedMethod:
    """A method on a data set and split, to be run with each seed: a row of a table, a curve of a figure."""

    dataset: str
    split: str  # as `split_name` names it
    name: str  # in the paper
    label: str  # in our tables and figures, with the reading
    base: Experiment  # with seed 0

    def experiment(self, seed: int) -> Experiment:
        return self.base.changed({"seed": seed})

    def folder(self, seed: int) -> PurePosixPath:
        """The run folder below the output folder: named by the algorithm's settings and the hash of all settings."""
        algorithm = self.base.algorithm
        words = [algorithm.name, *(f"{key}={value}" for key, value in sorted(algorithm.settings.items()))]
        name = f"{slug(' '.join([*words, self.split]))}-{self.base.hash()[:8]}"
        return PurePosixPath(self.dataset, name, f"seed-{seed}")


@dataclass(frozen=True)
class ReproductionPlan:
    """The items, data sets and seeds of a call of `fedgg reproduce`, and the runs that they need."""

    items: tuple[Item, ...]
    datasets: tuple[str, ...]
    seeds: tuple[int, ...]
    readings: tuple[str, ...] = ("text",)
    quick: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)  # dotted keys, the same for every run
    methods: tuple[str, ...] = ()  # those that are run, by `PlannedMethod.name` in any case; empty: all
    splits: tuple[str, ...] = ()  # on which methods are run, `0.6` for `beta 0.6`; empty: all

    def __post_init__(self) -> None:
        check_readings(self.readings)
        for key in self.changes:
            owner = _FIXED.get(key) or _FIXED.get(key.partition(".")[0])
            if owner is not None and key != "rounds":
                raise UserError(f"--set {key} is not possible here: it is decided by {owner}")
        object.__setattr__(self, "splits", tuple(map(full_split_name, self.splits)))
        if self.methods or self.splits:
            self._check_selection()

    def _check_selection(self) -> None:
        planned = [method for item in self.items for method in self.methods_of(item)]
        names = {method.name.lower(): method.name for method in planned}
        for name in self.methods:
            if name.lower() not in names:
                raise UserError(f"no item here has a method {name!r}{nearest(name, sorted(names.values()))}")
        splits = dict.fromkeys(method.split for method in planned)
        for split in self.splits:
            if split not in splits:
                raise UserError(f"no item here is on the split {split!r}: choose from {', '.join(splits)}")

    def base(self, dataset: str) -> Experiment:
        return preset("quick" if dataset == QUICK else dataset).base.changed(dict(self.changes))

    def lengths(self, *items: Item) -> tuple[int, ...]:
        """The numbers of rounds of some items, or of all: one number, or several if studies differ."""
        lengths = {method.base.rounds for item in items or self.items for method in self.methods_of(item)}
        return tuple(sorted(lengths or {self.base(self.datasets[0]).rounds}))

    def rounds(self, *items: Item) -> str:
        """The numbers of rounds as text."""
        return " and ".join(map(str, self.lengths(*items)))

    def datasets_of(self, item: Item) -> tuple[str, ...]:
        """The chosen data sets that the item has in the paper; in the quick version, the digits."""
        return (QUICK,) if self.quick else tuple(name for name in self.datasets if name in item.datasets)

    def methods_of(self, item: Item) -> list[PlannedMethod]:
        methods: list[PlannedMethod] = []
        for dataset in self.datasets_of(item):
            for split in item.splits:
                if item.study:
                    study = item.study.format(dataset=item.datasets[0] if dataset == QUICK else dataset)
                    methods += self._variants(study, dataset, split, own_base=item.literature)
                elif item.kind != "split":
                    methods += self.table_methods(dataset, split)
        return [method for method in methods if method.label in item.rows] if item.rows else methods

    def runs(self, items: Iterable[Item] | None = None, shard: Shard | None = None) -> list[tuple[PlannedMethod, int]]:
        """Every run once, by data set and then by seed, so that methods can be compared as early as possible."""
        needed = [method for item in items or self.items for method in self.methods_of(item)]
        methods = {(method.dataset, method.folder(0)): method for method in needed}
        runs = [
            (method, seed)
            for dataset in dict.fromkeys(dataset for dataset, _ in methods)
            for seed in self.seeds
            for method in methods.values()
            if method.dataset == dataset
        ]
        if shard is None:
            return runs
        shards = shards_of(runs, shard.count, lambda run: run[0].folder(0))
        return [run for run, its_shard in zip(runs, shards, strict=True) if its_shard == shard]

    def runs_to_make(
        self, items: Iterable[Item] | None = None, shard: Shard | None = None
    ) -> list[tuple[PlannedMethod, int]]:
        """The runs of the chosen methods and splits; tables show the others too, where they have been run."""
        names = {name.lower() for name in self.methods}
        return [
            (method, seed)
            for method, seed in self.runs(items, shard)
            if (not names or method.name.lower() in names) and (not self.splits or method.split in self.splits)
        ]

    def table_methods(self, dataset: str, split: str) -> list[PlannedMethod]:
        """The methods of the paper's tables; FedGG once for each reading."""
        variants = preset("quick" if dataset == QUICK else dataset).variants
        methods = []
        for name in METHODS:
            if name == "FedGG":
                for reading in self.readings:
                    settings = {f"algorithm.{key}": value for key, value in READINGS[reading].settings.items()}
                    changes = {"algorithm.name": "fedgg", "split.beta": beta_of(split), **settings}
                    methods.append(self._method(dataset, split, name, f"FedGG, {reading}", changes))
            else:
                methods.append(self._method(dataset, split, name, name, variants[f"{name}, {split}"]))
        return methods

    def _variants(self, study: str, dataset: str, split: str, own_base: bool = False) -> list[PlannedMethod]:
        """The variants of a study on this split, with the study's rounds unless --rounds was given.

        `own_base`: all of its settings are the study's, not only those of the variants and the rounds.
        """
        chosen_study = preset(study)
        base = chosen_study.base.changed(dict(self.changes)) if own_base and dataset != QUICK else None
        rounds = {} if dataset == QUICK or "rounds" in self.changes else {"rounds": chosen_study.base.rounds}
        beta = {"split.beta": beta_of(split)} if split.startswith(BETA) else {}
        methods = []
        for label, changes in chosen_study.variants.items():
            if split_name(chosen_study.base.changed(changes).split) == split:
                chosen = {**beta, **rounds, **changes}
                if dataset == QUICK and "split.min_examples" in chosen:
                    chosen["split.min_examples"] = QUICK_MIN_EXAMPLES
                name = label.split()[0].strip(",")
                methods.append(self._method(dataset, split, name, label.removesuffix(f", {split}"), chosen, base))
        return methods

    def _method(
        self,
        dataset: str,
        split: str,
        name: str,
        label: str,
        changes: dict[str, Any],
        base: Experiment | None = None,
    ) -> PlannedMethod:
        """`base`: the experiment that is changed; by default that of the paper on this data set."""
        chosen = {**changes, "name": f"{label}, {split}", "seed": 0}
        return PlannedMethod(dataset, split, name, label, (base or self.base(dataset)).changed(chosen))
