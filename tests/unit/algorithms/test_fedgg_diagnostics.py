"""What FedGG records of itself, beside the same figures taken from the models that were sent and the updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedgg.algorithms import FedGG
from fedgg.core.local import LocalEnd
from fedgg.engines import Loop, Stacked
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin, close, next_job, train

READINGS: list[dict[str, Any]] = [
    {},
    {"scope": "layer"},
    {"scope": "layer", "direction": "sent"},
    {"scope": "layer", "weight": "fixed", "first_step": "epsilon"},
]


@pytest.mark.parametrize("engine", [Loop(), Stacked("fp64")], ids=["loop", "stacked"])
@pytest.mark.parametrize("reading", READINGS, ids=lambda one: " ".join(one.values()) or "model")
def test_the_cosine_is_that_of_drift_and_last_global_update(reading: dict[str, Any], engine: Any) -> None:
    """Of the whole model under every reading."""
    experiment = Experiment(split={"clients": 3}, local={"epochs": 1}, engine={"precision": "fp64"})
    federation = build(experiment, algorithm=FedGG(**reading))
    state, models = begin(federation), []
    for _ in range(2):
        job = next_job(federation, state)
        ends = train(job, engine)
        models.append(job.w[0])
        state, _ = close(state, job, federation.examples, ends)
    update = models[1] - models[0]
    for end in ends.values():
        assert isinstance(end, LocalEnd)
        drift = end.up["delta"][0]
        expected = torch.dot(update, drift) / (update.norm() * drift.norm())
        assert float(end.diagnostics["cosine"]) == pytest.approx(float(expected), rel=1e-9)
        assert float(end.diagnostics["drift"]) == pytest.approx(float(drift.norm()), rel=1e-9)
