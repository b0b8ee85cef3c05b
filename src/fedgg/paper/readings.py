"""The readings of FedGG by name: which settings each is, and a line on what it means. docs/readings.md says why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedgg.errors import UserError
from fedgg.registry import nearest


@dataclass(frozen=True)
class Reading:
    settings: dict[str, Any]
    says: str


def _fixed(first_step: str, **more: Any) -> dict[str, Any]:
    """The paper's best fixed weight."""
    return {"weight": "fixed", "lam": 5e-8, "first_step": first_step, **more}


# At the paper's mu 0.01 the term is too small for a sign or a scope to show, so those readings stand at mu 0.1.
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
        "what `epsilon` comes to, said plainly: carry each client 0.5 along the last global update",
    ),
    "relative-push": Reading(
        {"mu": 0.0, "first_step": "relative_push", "push": 0.3},
        "carry each client 0.3 of the last global update: ours, not the paper's",
    ),
}


def check_readings(names: Iterable[str]) -> None:
    for name in names:
        if name not in READINGS:
            raise UserError(f"unknown reading {name!r}{nearest(name, READINGS)}")
