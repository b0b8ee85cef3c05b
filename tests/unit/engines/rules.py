"""What every engine is asked to train: each algorithm of the library, some in several settings; and a few rounds."""

from __future__ import annotations

from typing import Any

import pytest

from fedgg.algorithms import ALGORITHMS
from fedgg.engines import Engine
from fedgg.lab.build import Federation
from fedgg.lab.state import State, begin, play_round

Rule = dict[str, Any]

RULES: list[Rule] = [
    {"name": "fedavg"},
    {"name": "fedsgd"},
    {"name": "fedavgm"},
    {"name": "fedprox", "mu": 0.1},
    {"name": "fednova"},
    {"name": "fedadagrad"},
    {"name": "fedadam"},
    {"name": "fedyogi"},
    {"name": "fedcm"},
    {"name": "fedexp"},
    {"name": "fedacg", "mu": 0.1},
    {"name": "feddyn", "alpha": 0.1},
    {"name": "scaffold", "correction": "exact"},
    {"name": "scaffold", "correction": "after", "variate_mean": "uniform"},
    {"name": "fedcl", "lam": 5.0},
    {"name": "fedcurv", "lam": 2.0},
    {"name": "moon", "mu": 2.0},
    {"name": "fedgg", "mu": 0.5},
    {"name": "fedgg", "weight": "fixed", "first_step": "epsilon"},
    {"name": "fedgg", "first_step": "relative_push", "scope": "layer", "direction": "sent"},
]
assert {rule["name"] for rule in RULES} == set(ALGORITHMS)


IN_ALL = ("fedavg", "scaffold-exact", "moon-2.0", "fedgg-0.5")  # rules that the fast suite tries in every combination


def named(rule: Rule) -> str:
    return "-".join(map(str, rule.values()))


def cases(*combinations: tuple[Any, ...]) -> list[Any]:
    """Every rule in every combination; of most rules the fast suite has the first one, the slow suite the others."""
    return [
        pytest.param(
            rule,
            *combination,
            id="-".join([named(rule), *(getattr(part, "__name__", str(part)) for part in combination)]),
            marks=() if at == 0 or named(rule) in IN_ALL else pytest.mark.slow,
        )
        for rule in RULES
        for at, combination in enumerate(combinations)
    ]


def proxy_for(rule: Rule) -> int:
    """How many examples the server keeps: some where the algorithm measures on them."""
    return 20 if ALGORITHMS[rule["name"]].needs_proxy else 0


def played(federation: Federation, engine: Engine, rounds: int = 3) -> State:
    state = begin(federation)
    for _ in range(rounds):
        state, _ = play_round(federation, state, engine)
    return state
