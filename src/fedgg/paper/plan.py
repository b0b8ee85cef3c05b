"""The items of a reproduction (tables, figures, studies of ours), their readings, and the runs they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import SplitConfig
from fedgg.lab.run_places import Shard, shards_of
from fedgg.lab.study import Study, load_study
from fedgg.lab.study_folder import slug
from fedgg.registry import nearest

DATASETS = {"svhn": "SVHN", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}  # in the paper's order, under its names
QUICK = "digits"  # the data set of the quick version
METHODS = ("FedAvg", "FedProx", "SCAFFOLD", "FedGG")
REFERENCE = "FedAvg"
BETA = "beta "
BETA_05, BETA_01 = f"{BETA}0.5", f"{BETA}0.1"  # the paper's splits
ROUNDS = 100


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper, or a study of ours."""

    name: str
    title: str
    kind: Literal["accuracy", "rounds", "split", "curves", "weights", "study", "inner"]
    splits: tuple[str, ...]  # named as `split_name` names them
    datasets: tuple[str, ...] = tuple(DATASETS)
    study: str = ""  # the study file with its variants (may contain {dataset}); without one, the methods of the tables
    rows: tuple[str, ...] = ()  # the variants that are shown; empty: all
    ours: bool = False  # a study of ours, not in the paper
    costs: bool = False  # whether the table has columns for traffic and computation
    literature: bool = False  # a protocol of other papers: all settings are the study's, and their values are shown

    @property
    def is_table(self) -> bool:
        return self.kind in ("accuracy", "rounds", "study")

    @property
    def split_column(self) -> str:
        """`beta` where all splits are Dirichlet's, whose cells are numbers; else `split`."""
        return "beta" if all(split.startswith(BETA) for split in self.splits) else "split"

    def split_cell(self, split: str) -> str:
        return split.removeprefix(BETA) if self.split_column == "beta" else split


_ITEMS = (
    Item("table1", "Table 1: test accuracy, Dirichlet 0.5", "accuracy", (BETA_05,)),
    Item("table2", "Table 2: test accuracy, Dirichlet 0.1", "accuracy", (BETA_01,)),
    Item("table3", "Table 3: rounds to FedAvg's last accuracy, Dirichlet 0.5", "rounds", (BETA_05,)),
    Item("table4", "Table 4: rounds to FedAvg's last accuracy, Dirichlet 0.1", "rounds", (BETA_01,)),
    Item("fig1", "Fig. 1: the split of the data over clients", "split", (BETA_05, BETA_01)),
    Item("fig2", "Fig. 2: test accuracy against rounds", "curves", (BETA_05, BETA_01)),
    Item("fig3", "Fig. 3: adaptive against fixed weights", "weights", (BETA_05,), ("cifar10",), "fig3"),
    Item(
        "readings",
        "Ours: the readings of FedGG side by side",
        "study",
        (BETA_05, BETA_01),
        ("cifar10",),
        "readings",
        ours=True,
    ),
    Item(
        "inner",
        "Ours: diagnostics of FedGG over the rounds",
        "inner",
        (BETA_05, BETA_01),
        ("cifar10",),
        "readings",
        ("FedGG mu 0.01", "FedGG mu 0.1", "FedGG mu 1", "FedGG lambda 5e-8 epsilon"),
        ours=True,
    ),
    Item("scaffold", "Ours: SCAFFOLD under momentum", "study", (BETA_01,), ("cifar10",), "scaffold-modes", ours=True),
    Item(
        "scaffold-small",
        "Ours: SCAFFOLD without very small clients",
        "study",
        (BETA_01,),
        ("cifar10",),
        "scaffold-small-clients",
        ours=True,
    ),
    Item(
        "comparison",
        "Ours: sixteen algorithms, each with the best setting of a small grid",
        "study",
        (BETA_05, BETA_01),
        ("cifar10",),
        "tuned",
        ours=True,
        costs=True,
    ),
    Item("push", "Ours: how far to push", "study", (BETA_05, BETA_01), ("cifar10",), "push-cifar10", ours=True),
    Item("push-svhn", "Ours: how far to push", "study", (BETA_05, BETA_01), ("svhn",), "push-svhn", ours=True),
    Item(
        "push-cifar100", "Ours: how far to push", "study", (BETA_05, BETA_01), ("cifar100",), "push-cifar100", ours=True
    ),
    Item(
        "pushes",
        "Ours: pushes against rounds",
        "curves",
        (BETA_05, BETA_01),
        study="push-{dataset}",
        rows=("FedAvg", "push 0.5", "relative push 0.3", "relative push 0.6"),
        ours=True,
    ),
    *(
        Item(
            f"literature-{name}",
            "Ours: the methods papers compare today, in their protocol",
            "study",
            ("beta 0.6", BETA_01),
            (name,),
            f"literature-{name}",
            ours=True,
            costs=True,
            literature=True,
        )
        for name in ("cifar10", "cifar100")
    ),
    Item(
        "literature-cpu",
        "Ours: the methods papers compare today, in a protocol for a CPU",
        "study",
        (BETA_01,),
        ("cifar10",),
        "literature-cpu",
        ours=True,
        costs=True,
        literature=True,
    ),
    Item(
        "niid-bench",
        "Ours: the table of Flower's NIID-Bench baseline",
        "study",
        ("iid", BETA_05, "1 label", "2 labels", "3 labels"),
        ("cifar10",),
        "niid-bench",
        ours=True,
        costs=True,
        literature=True,
    ),
)
ITEMS: dict[str, Item] = {item.name: item for item in _ITEMS}
GROUPS = ("all", "ours", "literature")


def chosen_items(names: Sequence[str]) -> tuple[Item, ...]:
    """Items by name or group, each once and in the paper's order.

    `all` are those of the paper, `ours` our studies of it, `literature` the protocols of other papers.
    """
    for name in names:
        if name not in (*ITEMS, *GROUPS):
            raise UserError(f"the paper has no {name!r}{nearest(name, [*ITEMS, *GROUPS])}")
    return tuple(item for item in _ITEMS if item.name in names or _group(item) in names)


def _group(item: Item) -> str:
    return "literature" if item.literature else "ours" if item.ours else "all"


def chosen_datasets(text: str | None) -> tuple[str, ...]:
    """Data sets from a comma-separated list, in the paper's order; all three without one."""
    names = [name.strip() for name in text.split(",")] if text else list(DATASETS)
    for name in names:
        if name not in DATASETS:
            raise UserError(f"the paper has no data set {name!r}{nearest(name.lower().replace('-', ''), DATASETS)}")
    return tuple(name for name in DATASETS if name in names)


def split_name(split: SplitConfig) -> str:
    """`beta 0.5`, `iid`, or `2 labels` for two labels a client."""
    if split.scheme.startswith("dirichlet"):
        return f"{BETA}{split.beta:g}"
    labels = split.settings.get("labels_per_client", 2)
    return f"{labels} label{'s' * (labels != 1)}" if split.scheme == "k_labels" else split.scheme


def _beta(split: str) -> float:
    return float(split.removeprefix(BETA))


def _full_name(split: str) -> str:
    """The name of a split as typed for --splits: 0.6 is `beta 0.6`."""
    try:
        return f"{BETA}{float(split):g}"
    except ValueError:
        return split


def shown_dataset(name: str) -> str:
    return DATASETS.get(name, name)


@dataclass(frozen=True)
class Reading:
    """An interpretation of the paper: settings of FedGG, and what they mean. docs/readings.md explains them."""

    settings: dict[str, Any]
    description: str


def _fixed(first_step: str, **more: Any) -> dict[str, Any]:
    """The paper's best fixed weight."""
    return {"weight": "fixed", "lam": 5e-8, "first_step": first_step, **more}


# At the paper's mu of 0.01 the term is too small for sign or scope to make a difference: those readings have mu 0.1.
READINGS: dict[str, Reading] = {
    "text": Reading(
        {"mu": 0.01}, "the paper's text: adaptive weight, mu 0.01, exact gradient, from the second step on"
    ),
    "mu-0.1": Reading({"mu": 0.1}, "the text with ten times the paper's best mu"),
    "mu-1": Reading({"mu": 1.0}, "the text with a hundred times the paper's best mu"),
    "skip": Reading(
        _fixed("skip"), "fixed weight 5e-8 from the second step on, as Algorithm 1 has it: too small to act"
    ),
    "epsilon": Reading(
        _fixed("epsilon"), "fixed weight 5e-8, the first step as PyTorch's clamped cosine has it: a push of 5"
    ),
    "printed": Reading({"mu": 0.1, "gradient": "printed"}, "mu 0.1 with the sign that Eq. 9 and 11 print"),
    "layer": Reading({"mu": 0.1, "scope": "layer"}, "mu 0.1 with one cosine for each layer"),
    "layer-epsilon": Reading(_fixed("epsilon", scope="layer"), "`epsilon` with one cosine for each layer"),
    "push": Reading(
        {"mu": 0.0, "first_step": "push", "push": 0.5},
        "the effect of `epsilon` as its own setting: move each client 0.5 along the last global update",
    ),
    "relative-push": Reading(
        {"mu": 0.0, "first_step": "relative_push", "push": 0.3},
        "move each client by 0.3 of the last global update: ours, not the paper's",
    ),
}


def check_readings(names: Iterable[str]) -> None:
    for name in names:
        if name not in READINGS:
            raise UserError(f"unknown reading {name!r}{nearest(name, READINGS)}")


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
        object.__setattr__(self, "splits", tuple(map(_full_name, self.splits)))
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
                    changes = {"algorithm.name": "fedgg", "split.beta": _beta(split), **settings}
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
        beta = {"split.beta": _beta(split)} if split.startswith(BETA) else {}
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
