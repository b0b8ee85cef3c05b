"""The items of a reproduction: tables and figures of the paper, studies of ours, and the readings of FedGG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedgg.errors import UserError
from fedgg.lab.config_sections import SplitConfig
from fedgg.registry import nearest

DATASETS = {"svhn": "SVHN", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}  # in the paper's order, under its names
QUICK = "digits"  # the data set of the quick version
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
            "Ours: current methods, in the protocol of recent papers",
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
    *(
        Item(
            name,
            "Ours: current methods, in a protocol for a CPU",
            "study",
            splits,
            (dataset,),
            name,
            ours=True,
            costs=True,
            literature=True,
        )
        for name, dataset, splits in (
            ("literature-cpu", "cifar10", ("beta 0.6", BETA_01)),
            ("literature-cpu-cifar100", "cifar100", (BETA_01,)),
        )
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


def beta_of(split: str) -> float:
    return float(split.removeprefix(BETA))


def full_split_name(split: str) -> str:
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
        _fixed("epsilon"),
        "fixed weight 5e-8, the first step as PyTorch's clamped cosine has it: a gradient of length 5, which at the "
        "paper's learning rate and momentum moves each client 0.5 along the last global update",
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
