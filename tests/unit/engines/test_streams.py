"""The streams engine has the reference loop's numbers: statistics, dropout, ragged batches, every algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rules import cases, played, proxy_for
from torch import nn

from fedgg.engines import Loop, Streams
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.state import begin, play_round

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")),
]


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 10))


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
@pytest.mark.parametrize(
    ("rule", "model", "cohort"),
    cases((with_statistics, 3), (with_statistics, None), (with_dropout, 3), (with_dropout, None)),
)
def test_the_loop_and_the_streams_agree(
    rule: dict[str, Any], model: Callable[[], nn.Module], cohort: int | None, device: str
) -> None:
    chosen = experiment(rule, device, cohort)
    loop, streams = (played(build(chosen, model=model), engine) for engine in (Loop(), Streams(lanes=3)))
    torch.testing.assert_close(streams.server.w, loop.server.w, rtol=0, atol=1e-10)
    for name, rows in loop.server.buffers.items():
        torch.testing.assert_close(streams.server.buffers[name], rows, rtol=0, atol=1e-10)


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
