"""Every algorithm of the library under every wrapper: it trains, or is refused by what it sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedgg.aggregation import RULES
from fedgg.algorithms import ALGORITHMS
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.runner import run

BASE = Experiment(
    rounds=2,
    data={"proxy": 30},
    split={"clients": 5, "beta": 1.0},
    model={"name": "mlp", "hidden": 8},
    local={"epochs": 1, "batch": 32, "lr": 0.05},
    server={"cohort": 4, "evaluate_every": 2},
    attack={"kind": "nan", "clients": 1},
)
SETTINGS: dict[str, dict[str, Any]] = {"trimmed_mean": {"robust.trim": 0.25}}  # of rules, beside their defaults
WRAPPERS: dict[str, dict[str, Any]] = {
    "privacy": {"privacy.noise": 0.0, "privacy.clip": 0.5},
    **{rule: {"robust.rule": rule, **SETTINGS.get(rule, {})} for rule in RULES},
}
NUMBERS = {"fednova": "worth", "fedcm": "reach", "mofedsam": "reach", "fedwmsam": "reach"}  # sent beside vectors


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_trains_or_is_refused_by_name(algorithm: str, wrapper: str) -> None:
    experiment = BASE.changed({"algorithm.name": algorithm, **WRAPPERS[wrapper]})
    if algorithm in NUMBERS and wrapper in ("privacy", "norm_clip"):
        with pytest.raises(UserError, match=f"also sends up '{NUMBERS[algorithm]}' of size 1"):
            run(experiment)
        return
    finished = run(experiment)
    assert finished.status == "finished"
    assert all(bool(torch.isfinite(tensor).all()) for tensor in finished.weights.values())
