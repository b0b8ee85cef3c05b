"""What the paper's tables and figures are made of, and studies of ours that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedgg.errors import UserError
from fedgg.registry import nearest

DATASETS = {"svhn": "SVHN", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}  # in the paper's order, under its names
QUICK = "digits"  # what stands in for all of them in the quick version
METHODS = ("FedAvg", "FedProx", "SCAFFOLD", "FedGG")
REFERENCE = "FedAvg"
ROUNDS = 100


@dataclass(frozen=True)
class Item:
    name: str
    title: str
    kind: Literal["accuracy", "rounds", "split", "curves", "weights", "study", "inner"]
    betas: tuple[float, ...]
    datasets: tuple[str, ...] = tuple(DATASETS)
    study: str = ""  # the preset whose variants it is made of, if not the methods of the tables; may name the data set
    rows: tuple[str, ...] = ()  # those of its variants that are shown; all if none is named
    ours: bool = False  # not the paper's
    costs: bool = False  # whether its rows differ in what they send and compute

    @property
    def is_table(self) -> bool:
        return self.kind in ("accuracy", "rounds", "study")


_ITEMS = (
    Item("table1", "Table 1: test accuracy, Dirichlet 0.5", "accuracy", (0.5,)),
    Item("table2", "Table 2: test accuracy, Dirichlet 0.1", "accuracy", (0.1,)),
    Item("table3", "Table 3: rounds to FedAvg's last accuracy, Dirichlet 0.5", "rounds", (0.5,)),
    Item("table4", "Table 4: rounds to FedAvg's last accuracy, Dirichlet 0.1", "rounds", (0.1,)),
    Item("fig1", "Fig. 1: the split of the data over clients", "split", (0.5, 0.1)),
    Item("fig2", "Fig. 2: test accuracy against rounds", "curves", (0.5, 0.1)),
    Item("fig3", "Fig. 3: adaptive against fixed weights", "weights", (0.5,), ("cifar10",), "fig3"),
    Item(
        "readings", "Ours: the readings of FedGG side by side", "study", (0.5, 0.1), ("cifar10",), "readings", ours=True
    ),
    Item(
        "inner",
        "Ours: diagnostics of FedGG over the rounds",
        "inner",
        (0.5, 0.1),
        ("cifar10",),
        "readings",
        ("FedGG mu 0.01", "FedGG mu 0.1", "FedGG mu 1", "FedGG lambda 5e-8 epsilon"),
        ours=True,
    ),
    Item("scaffold", "Ours: SCAFFOLD under momentum", "study", (0.1,), ("cifar10",), "scaffold-modes", ours=True),
    Item(
        "scaffold-small",
        "Ours: SCAFFOLD without very small clients",
        "study",
        (0.1,),
        ("cifar10",),
        "scaffold-small-clients",
        ours=True,
    ),
    Item(
        "comparison",
        "Ours: every algorithm, each with the best setting of a small grid",
        "study",
        (0.5, 0.1),
        ("cifar10",),
        "tuned",
        ours=True,
        costs=True,
    ),
    Item("push", "Ours: how far to push", "study", (0.5, 0.1), ("cifar10",), "push-cifar10", ours=True),
    Item("push-svhn", "Ours: how far to push", "study", (0.5, 0.1), ("svhn",), "push-svhn", ours=True),
    Item("push-cifar100", "Ours: how far to push", "study", (0.5, 0.1), ("cifar100",), "push-cifar100", ours=True),
    Item(
        "pushes",
        "Ours: pushes against rounds",
        "curves",
        (0.5, 0.1),
        study="push-{dataset}",
        rows=("FedAvg", "push 0.5", "relative push 0.3", "relative push 0.6"),
        ours=True,
    ),
)
ITEMS: dict[str, Item] = {item.name: item for item in _ITEMS}


def chosen_items(names: Sequence[str]) -> tuple[Item, ...]:
    """Items by name, each once and in the paper's order; `all` is every one of the paper's, `ours` of ours."""
    for name in names:
        if name not in (*ITEMS, "all", "ours"):
            raise UserError(f"the paper has no {name!r}{nearest(name, [*ITEMS, 'all', 'ours'])}")
    return tuple(item for item in _ITEMS if item.name in names or ("ours" if item.ours else "all") in names)


def chosen_datasets(text: str | None) -> tuple[str, ...]:
    """Data sets named with commas between them, in the paper's order; all three without a word."""
    names = [name.strip() for name in text.split(",")] if text else list(DATASETS)
    for name in names:
        if name not in DATASETS:
            raise UserError(f"the paper has no data set {name!r}{nearest(name.lower().replace('-', ''), DATASETS)}")
    return tuple(name for name in DATASETS if name in names)


def shown_dataset(name: str) -> str:
    return DATASETS.get(name, name)
