"""Numbers never move silently: fingerprints in float64 after three rounds on digits.

To take new ones, after saying in CHANGELOG that numbers changed and why:

    FEDGG_GOLDEN=write python -m pytest tests/golden
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgg.lab.config import Experiment
from fedgg.lab.runner import run

FILE = Path(__file__).with_name("golden.json")
BASE = Experiment(
    rounds=3,
    seed=11,
    split={"clients": 4, "beta": 0.3},
    model={"name": "mlp", "hidden": 8},
    local={"epochs": 2, "batch": 64, "lr": 0.05, "lr_decay": 0.9, "weight_decay": 0.001},
    engine={"precision": "fp64"},
)
CASES: dict[str, dict[str, Any]] = {
    "fedsgd": {"algorithm.name": "fedsgd"},
    "fedavg": {"algorithm.name": "fedavg"},
    "fedavg without momentum": {"algorithm.name": "fedavg", "local.momentum": 0.0},
    "fedavg partial": {"algorithm.name": "fedavg", "server.cohort": 2},
    "fedavg iid": {"algorithm.name": "fedavg", "split.scheme": "iid"},
    "fedavg shards": {"algorithm.name": "fedavg", "split.scheme": "shards"},
    "fedavg dirichlet_client": {"algorithm.name": "fedavg", "split.scheme": "dirichlet_client"},
    "fedavg dirichlet_unbalanced": {"algorithm.name": "fedavg", "split.scheme": "dirichlet_unbalanced"},
    "fedavg crop_flip": {"algorithm.name": "fedavg", "data.augment": "crop_flip"},
    "fedavg unit": {"algorithm.name": "fedavg", "data.normalise": "unit"},
    "fedavg holdout": {"algorithm.name": "fedavg", "data.holdout": 0.2},
    "fedavgm": {"algorithm.name": "fedavgm"},
    "fedprox": {"algorithm.name": "fedprox", "algorithm.mu": 0.5},
    "fednova": {"algorithm.name": "fednova"},
    "fedadagrad": {"algorithm.name": "fedadagrad"},
    "fedadam": {"algorithm.name": "fedadam"},
    "fedcm": {"algorithm.name": "fedcm"},
    "fedcm partial": {"algorithm.name": "fedcm", "algorithm.alpha": 0.5, "server.cohort": 2},
    "fedexp": {"algorithm.name": "fedexp"},
    "fedacg": {"algorithm.name": "fedacg"},
    "fedacg partial": {"algorithm.name": "fedacg", "algorithm.mu": 0.5, "server.cohort": 2},
    "feddyn": {"algorithm.name": "feddyn"},
    "feddyn uniform partial": {"algorithm.name": "feddyn", "algorithm.mean": "uniform", "server.cohort": 2},
    "fedyogi partial": {"algorithm.name": "fedyogi", "server.cohort": 2},
    "scaffold plain": {"algorithm.name": "scaffold", "algorithm.correction": "plain", "local.momentum": 0.3},
    "scaffold exact": {"algorithm.name": "scaffold", "algorithm.correction": "exact"},
    "scaffold after": {"algorithm.name": "scaffold", "algorithm.correction": "after"},
    "scaffold after uniform partial": {
        "algorithm.name": "scaffold",
        "algorithm.variate_mean": "uniform",
        "server.cohort": 2,
    },
    "fedcl": {"algorithm.name": "fedcl", "data.proxy": 60},
    "fedcl holdout partial": {
        "algorithm.name": "fedcl",
        "algorithm.lam": 20.0,
        "data.proxy": 60,
        "data.holdout": 0.2,
        "server.cohort": 2,
    },
    "fedcurv": {"algorithm.name": "fedcurv"},
    "fedcurv partial": {"algorithm.name": "fedcurv", "algorithm.lam": 5.0, "server.cohort": 2},
    "moon": {"algorithm.name": "moon", "algorithm.mu": 5.0},
    "moon projection partial": {"algorithm.name": "moon", "model.projection": 6, "server.cohort": 2},
    "fedsam": {"algorithm.name": "fedsam", "algorithm.rho": 0.3},
    "mofedsam partial": {"algorithm.name": "mofedsam", "algorithm.alpha": 0.4, "server.cohort": 2},
    "fedlesam": {"algorithm.name": "fedlesam", "algorithm.rho": 0.3},
    "fedlesam sent partial": {
        "algorithm.name": "fedlesam",
        "algorithm.rho": 0.3,
        "algorithm.direction": "sent",
        "server.cohort": 2,
    },
    "fedwmsam": {"algorithm.name": "fedwmsam", "algorithm.alpha": 0.4},
    "fedwmsam partial": {"algorithm.name": "fedwmsam", "algorithm.adapt": 0.3, "server.cohort": 2},
    "fedspeed": {"algorithm.name": "fedspeed"},
    "ghbm": {"algorithm.name": "ghbm", "algorithm.tau": 1},
    "fedhbm partial": {"algorithm.name": "fedhbm", "algorithm.tau": 2.0, "server.cohort": 2},
    "fedntd": {"algorithm.name": "fedntd", "algorithm.beta": 2.0},
    "fedlc": {"algorithm.name": "fedlc", "algorithm.tau": 0.5},
    "fedgg": {"algorithm.mu": 1.0},
    "fedgg partial": {"algorithm.mu": 1.0, "server.cohort": 2},
    "fedgg fixed": {"algorithm.weight": "fixed", "algorithm.lam": 0.01},
    "fedgg fixed epsilon": {"algorithm.weight": "fixed", "algorithm.first_step": "epsilon"},
    "fedgg printed": {"algorithm.mu": 1.0, "algorithm.gradient": "printed"},
    "fedgg push": {"algorithm.first_step": "push"},
    "fedgg relative_push": {"algorithm.first_step": "relative_push"},
    "fedgg layer": {"algorithm.mu": 1.0, "algorithm.scope": "layer"},
    "fedgg sent partial": {"algorithm.mu": 1.0, "algorithm.direction": "sent", "server.cohort": 2},
}


def fingerprint(changes: dict[str, Any]) -> dict[str, float]:
    finished = run(BASE.changed(changes))
    row = torch.cat([tensor.reshape(-1) for tensor in finished.weights.values()])
    return {
        "sum": float(row.sum()),
        "length": float(row.norm()),
        "wave": float((row * torch.arange(len(row), dtype=torch.float64).sin()).sum()),
        "test_loss": finished.rounds[-1]["test_loss"],
        "train_loss": finished.rounds[-1]["train_loss"],
        "bytes": float(finished.summary["bytes"]),
    }


@pytest.mark.parametrize("case", CASES)
def test_numbers_have_not_changed(case: str) -> None:
    found = fingerprint(CASES[case])
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    if os.environ.get("FEDGG_GOLDEN") == "write":
        FILE.write_text(json.dumps({**known, case: found}, indent=1, sort_keys=True) + "\n")
        return
    assert case in known, f"no golden numbers for {case!r}: FEDGG_GOLDEN=write python -m pytest tests/golden"
    for name, value in known[case].items():
        assert found[name] == pytest.approx(value, rel=1e-10, abs=1e-10), (
            f"numbers changed: say so in CHANGELOG, then FEDGG_GOLDEN=write python -m pytest tests/golden "
            f"({case}, {name}: {found[name]!r} was {value!r})"
        )


def test_no_golden_numbers_without_a_case() -> None:
    assert set(json.loads(FILE.read_text())) == set(CASES)
