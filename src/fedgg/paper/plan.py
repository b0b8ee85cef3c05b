"""Which runs the items need. Items that need the same run share it: it has one folder, named by its settings."""

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
from fedgg.paper.items import METHODS, QUICK, Item
from fedgg.paper.readings import READINGS, check_readings


@cache
def preset(name: str) -> Study:
    return load_study(find(f"{name}.toml"))


def find(file: str) -> Path:
    """In a checkout the folder is known; where a wheel put it, the list of installed files says."""
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


# What an item decides itself, and the option that says it instead.
_FIXED = {
    "seed": "--seeds",
    "name": "the item",
    "rounds": "--rounds",
    "split.beta": "the item (table1, table2, ...)",
    "data.source": "--datasets",
    "algorithm": "--reading",
}
QUICK_LEAST = 40  # where a study wants no small clients: a client holds 144 of the digits on average


@dataclass(frozen=True)
class Line:
    """One method under one reading on one data set and split: a row of a table, a curve of a figure."""

    dataset: str
    beta: float
    method: str  # as the paper has it
    label: str  # as it is shown
    base: Experiment  # with seed 0

    def experiment(self, seed: int) -> Experiment:
        return self.base.changed({"seed": seed})

    def place(self, seed: int) -> PurePosixPath:
        """Under the output folder: the algorithm's settings for people, the hash of all settings for certainty."""
        algorithm = self.base.algorithm
        words = [algorithm.name, *(f"{key}={value}" for key, value in sorted(algorithm.settings.items()))]
        name = f"{slug(' '.join([*words, f'beta {self.beta:g}']))}-{self.base.hash()[:8]}"
        return PurePosixPath(self.dataset, name, f"seed-{seed}")


@dataclass(frozen=True)
class Plan:
    """What was asked for, and the runs it takes."""

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
                raise UserError(f"--set {key}: that is said by {owner}")

    def base(self, dataset: str) -> Experiment:
        return preset("quick" if dataset == QUICK else dataset).base.changed(dict(self.changes))

    def lengths(self, *items: Item) -> tuple[int, ...]:
        """How many rounds the runs of some items have, or of all: one number, or several where studies differ."""
        found = {line.base.rounds for item in items or self.items for line in self.lines(item)}
        return tuple(sorted(found or {self.base(self.datasets[0]).rounds}))

    def rounds(self, *items: Item) -> str:
        """The same in words."""
        return " and ".join(map(str, self.lengths(*items)))

    def datasets_of(self, item: Item) -> tuple[str, ...]:
        """Those asked for that the item has in the paper; in the quick version, the one that stands in for them."""
        return (QUICK,) if self.quick else tuple(name for name in self.datasets if name in item.datasets)

    def lines(self, item: Item) -> list[Line]:
        found: list[Line] = []
        for dataset in self.datasets_of(item):
            for beta in item.betas:
                if item.study:
                    study = item.study.format(dataset=item.datasets[0] if dataset == QUICK else dataset)
                    found += self._variants(study, dataset, beta)
                elif item.kind != "split":
                    found += self.methods(dataset, beta)
        return [line for line in found if line.label in item.rows] if item.rows else found

    def runs(self, items: Iterable[Item] | None = None) -> list[tuple[Line, int]]:
        """Every run once, data set by data set, seed by seed: all methods can be compared as early as possible."""
        lines = {(line.dataset, line.place(0)): line for item in items or self.items for line in self.lines(item)}
        return [
            (line, seed)
            for dataset in dict.fromkeys(dataset for dataset, _ in lines)
            for seed in self.seeds
            for line in lines.values()
            if line.dataset == dataset
        ]

    def methods(self, dataset: str, beta: float) -> list[Line]:
        """A row of the tables for each method, and for each reading of FedGG."""
        variants = preset("quick" if dataset == QUICK else dataset).variants
        lines = []
        for method in METHODS:
            if method == "FedGG":
                for reading in self.readings:
                    settings = {f"algorithm.{key}": value for key, value in READINGS[reading].settings.items()}
                    changes = {"algorithm.name": "fedgg", "split.beta": beta, **settings}
                    lines.append(self._line(dataset, beta, method, f"FedGG, {reading}", changes))
            else:
                lines.append(self._line(dataset, beta, method, method, variants[f"{method}, beta {beta:g}"]))
        return lines

    def _variants(self, study: str, dataset: str, beta: float) -> list[Line]:
        """Those of a study's variants that are of this beta, over its own rounds unless others are asked for."""
        own, end = preset(study), f", beta {beta:g}"
        length = {} if dataset == QUICK or "rounds" in self.changes else {"rounds": own.base.rounds}
        lines = []
        for label, changes in own.variants.items():
            if changes.get("split.beta", own.base.split.beta) == beta:
                chosen = {"split.beta": beta, **length, **changes}
                if dataset == QUICK and "split.min_examples" in chosen:
                    chosen["split.min_examples"] = QUICK_LEAST
                lines.append(self._line(dataset, beta, label.split()[0].strip(","), label.removesuffix(end), chosen))
        return lines

    def _line(self, dataset: str, beta: float, method: str, label: str, changes: dict[str, Any]) -> Line:
        name = f"{label}, beta {beta:g}"
        return Line(dataset, beta, method, label, self.base(dataset).changed({**changes, "name": name, "seed": 0}))
