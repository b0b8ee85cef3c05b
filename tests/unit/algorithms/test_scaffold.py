"""SCAFFOLD's warning of clients that are much smaller than the others."""

from __future__ import annotations

import math

import pytest

import fedgg
from fedgg.lab.build import build


@pytest.mark.parametrize(("beta", "warned"), [(0.05, True), (100.0, False)])
def test_small_clients_are_warned_of_before_the_first_round(beta: float, warned: bool) -> None:
    experiment = fedgg.Experiment(split={"beta": beta, "min_examples": 1}, algorithm={"name": "scaffold"})
    federation = build(experiment)
    smallest, mean = min(federation.examples), sum(federation.examples) / 10
    assert (smallest < 0.06 * mean) == warned
    sentence = f"SCAFFOLD: the smallest client holds {smallest} examples, less than 6% of the mean"
    assert any(notice.startswith(sentence) for notice in federation.notices) == warned
    assert not any(
        "smallest client" in text for text in build(experiment.changed({"algorithm.name": "fedavg"})).notices
    )
    if warned:
        remedy = {"split.min_examples": math.ceil(0.1 * mean)}
        assert not any("smallest client" in notice for notice in build(experiment.changed(remedy)).notices)
