"""An experiment in one line, before it begins: what was asked for, and what is there though nobody asked for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from fedgg.cli.screen import counted

if TYPE_CHECKING:
    from fedgg.lab.config import Experiment


def described(experiment: Experiment, swept: Collection[str] = ()) -> str:
    """Without the settings that are swept over, which differ from run to run."""
    split, data = experiment.split, experiment.data
    beta = f" {split.beta:g}" if split.scheme.startswith("dirichlet") and "split.beta" not in swept else ""
    words = {
        "data.source": data.source,
        "data.augment": "" if data.augment == "none" else data.augment,
        "split.clients": counted(split.clients, "client") if experiment.clients_are_known else "clients of the data",
        "split.scheme": f"{split.scheme}{beta}",
        "model.name": experiment.model.name,
        "rounds": counted(experiment.rounds, "round"),
        "local.epochs": f"{counted(experiment.local.epochs, 'epoch')} a round",
    }
    return ", ".join(said for key, said in words.items() if said and key not in swept)
