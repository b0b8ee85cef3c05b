"""What the epsilon reading comes to, tested on digits: a push along the last global update, and no more."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

import fedgg
from fedgg.algorithms import FedAvg, FedGG
from fedgg.core.algorithm import Algorithm


@cache
def trained(algorithm: Algorithm) -> Tensor:
    experiment = fedgg.Experiment(
        rounds=4,
        split={"clients": 5, "beta": 0.3},
        local={"epochs": 3, "batch": 32, "lr": 0.01, "momentum": 0.9},
        engine={"name": "loop", "precision": "fp64"},
    )
    return torch.cat([value.flatten() for value in fedgg.run(experiment, algorithm=algorithm).weights.values()])


def test_the_epsilon_reading_is_a_push_said_plainly() -> None:
    """lambda 5e-8 over the clamp at 1e-8 is a gradient of 5: at lr 0.01 and momentum 0.9, a way of 0.5."""
    plain = trained(FedAvg())
    epsilon = trained(FedGG(weight="fixed", lam=5e-8, first_step="epsilon"))
    push = trained(FedGG(mu=0.0, first_step="push", push=0.5))
    effect = (epsilon - plain).norm()
    assert effect > 0.05 * plain.norm()
    assert (epsilon - push).norm() < 1e-4 * effect  # all that the later steps add


def test_without_the_first_step_the_papers_fixed_weight_does_nothing() -> None:
    plain = trained(FedAvg())
    assert (trained(FedGG(weight="fixed", lam=5e-8, first_step="skip")) - plain).norm() < 1e-4 * plain.norm()
