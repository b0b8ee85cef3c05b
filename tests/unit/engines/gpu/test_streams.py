"""The streams engine repeats its bits; that they are the reference step's is in test_every_engine.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_cases import proxy_for, with_statistics

from fedgg.engines import Streams
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin
from fedgg.lab.runner import play_round

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")),
]


def experiment(rule: dict[str, Any], device: str, cohort: int | None, **more: Any) -> Experiment:
    settings: dict[str, Any] = {
        "data": {"proxy": proxy_for(rule)},
        "split": {"clients": 6, "beta": 0.3, "min_examples": 5},
        "local": {"epochs": 2, "batch": 13, "lr": 0.05, "weight_decay": 0.001},
        "server": {"cohort": cohort},
        "engine": {"precision": "fp64", "device": device},
    }
    return Experiment(rounds=3, algorithm=rule, **(settings | more))


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_again_and_from_a_fresh_engine(device: str) -> None:
    federation = build(
        experiment({"name": "fedgg", "mu": 0.5}, device, 3).changed({"engine.precision": "fp32"}), model=with_statistics
    )
    used, state = Streams(), begin(federation)
    for _ in range(4):
        fresh, _ = play_round(federation, state, Streams(lanes=2))
        state, _ = play_round(federation, state, used)
        assert torch.equal(fresh.server.w, state.server.w)
