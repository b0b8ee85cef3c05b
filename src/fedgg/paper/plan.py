"""Which runs the items of `fedgg reproduce` need. Items share runs of equal settings; a run folder is named by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path, PurePosixPath
from typing import Any

from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.study import Study, load_study
from fedgg.lab.study_folder import slug
from fedgg.paper.catalog import METHODS, QUICK, READINGS, Item, check_readings


@cache
def preset(name: str) -> Study:
    """A study of experiments/ by name."""
    return load_study(_study_file(f"{name}.toml"))


def _study_file(file: str) -> Path:
    """A study file of experiments/, in a checkout or where a wheel has installed it."""
    here = Path(__file__).parents[3] / "experiments" / file
    if here.is_file():
        return here
    try:
        installed = files("fedgg") or []
    except PackageNotFoundError:
        installed = []
    for entry in installed:
        if entry.parts[-2:] == ("experiments", file):
            return Path(str(entry.locate())).resolve()
    raise UserError(f"experiments/{file} is not where fedgg is installed: install it again, or run from its repository")


# Settings that --set cannot change, and what decides them instead.
_FIXED = {
    "seed": "--seeds",
    "name": "the item",
    "rounds": "--rounds",
    "split.beta": "the item (table1, table2, ...)",
    "data.source": "--datasets",
    "algorithm": "--reading",
}
QUICK_MIN_EXAMPLES = 40  # in studies without small clients: a client holds 144 of the digits on average


@dataclass(frozen=True)
class PlannedMethod:
    """A method on a data set and split, to be run with each seed: a row of a table, a curve of a figure."""

    dataset: str
    beta: float
    name: str  # in the paper
    label: str  # in our tables and figures, with the reading
    base: Experiment  # with seed 0

    def experiment(self, seed: int) -> Experiment:
        return self.base.changed({"seed": seed})

    def folder(self, seed: int) -> PurePosixPath:
        """The run folder below the output folder: named by the algorithm's settings and the hash of all settings."""
        algorithm = self.base.algorithm
        words = [algorithm.name, *(f"{key}={value}" for key, value in sorted(algorithm.settings.items()))]
        name = f"{slug(' '.join([*words, f'beta {self.beta:g}']))}-{self.base.hash()[:8]}"
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

    def __post_init__(self) -> None:
        check_readings(self.readings)
        for key in self.changes:
            owner = _FIXED.get(key) or _FIXED.get(key.partition(".")[0])
            if owner is not None and key != "rounds":
                raise UserError(f"--set {key} is not possible here: it is decided by {owner}")

    def base(self, dataset: str) -> Experiment:
        return preset("quick" if dataset == QUICK else dataset).base.changed(dict(self.changes))

    def lengths(self, *items: Item) -> tuple[int, ...]:
        """The numbers of rounds of some items, or of all: one number, or several where studies differ."""
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
            for beta in item.betas:
                if item.study:
                    study = item.study.format(dataset=item.datasets[0] if dataset == QUICK else dataset)
                    methods += self._variants(study, dataset, beta)
                elif item.kind != "split":
                    methods += self.table_methods(dataset, beta)
        return [method for method in methods if method.label in item.rows] if item.rows else methods

    def runs(self, items: Iterable[Item] | None = None) -> list[tuple[PlannedMethod, int]]:
        """Every run once, by data set and then by seed, so that methods can be compared as early as possible."""
        needed = [method for item in items or self.items for method in self.methods_of(item)]
        methods = {(method.dataset, method.folder(0)): method for method in needed}
        return [
            (method, seed)
            for dataset in dict.fromkeys(dataset for dataset, _ in methods)
            for seed in self.seeds
            for method in methods.values()
            if method.dataset == dataset
        ]

    def table_methods(self, dataset: str, beta: float) -> list[PlannedMethod]:
        """The methods of the paper's tables; FedGG once for each reading."""
        variants = preset("quick" if dataset == QUICK else dataset).variants
        methods = []
        for name in METHODS:
            if name == "FedGG":
                for reading in self.readings:
                    settings = {f"algorithm.{key}": value for key, value in READINGS[reading].settings.items()}
                    changes = {"algorithm.name": "fedgg", "split.beta": beta, **settings}
                    methods.append(self._method(dataset, beta, name, f"FedGG, {reading}", changes))
            else:
                methods.append(self._method(dataset, beta, name, name, variants[f"{name}, beta {beta:g}"]))
        return methods

    def _variants(self, study: str, dataset: str, beta: float) -> list[PlannedMethod]:
        """The variants of a study with this beta, with the study's rounds unless --rounds was given."""
        chosen_study, end = preset(study), f", beta {beta:g}"
        rounds = {} if dataset == QUICK or "rounds" in self.changes else {"rounds": chosen_study.base.rounds}
        methods = []
        for label, changes in chosen_study.variants.items():
            if changes.get("split.beta", chosen_study.base.split.beta) == beta:
                chosen = {"split.beta": beta, **rounds, **changes}
                if dataset == QUICK and "split.min_examples" in chosen:
                    chosen["split.min_examples"] = QUICK_MIN_EXAMPLES
                name = label.split()[0].strip(",")
                methods.append(self._method(dataset, beta, name, label.removesuffix(end), chosen))
        return methods

    def _method(self, dataset: str, beta: float, name: str, label: str, changes: dict[str, Any]) -> PlannedMethod:
        experiment_name = f"{label}, beta {beta:g}"
        base = self.base(dataset).changed({**changes, "name": experiment_name, "seed": 0})
        return PlannedMethod(dataset, beta, name, label, base)
