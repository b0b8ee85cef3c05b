"""Clients that take unequal numbers of steps: what FedNova and FedProx are for, on logistic regression in float64.

The optimum is scipy's, of the mean loss over all examples with weight decay.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

import fedgg

SIZES, DECAY, FEATURES = (10, 20, 40, 130), 0.1, 3
Vector = NDArray[np.float64]


@cache
def problem() -> tuple[Vector, NDArray[np.int64], NDArray[np.int64]]:
    """Inputs, labels and clients; every client has its own mean and its own labelling."""
    rng = np.random.default_rng(0)
    inputs, labels = [], []
    for size in SIZES:
        x = rng.normal(size=(size, FEATURES)) + 0.6 * rng.normal(size=FEATURES)
        scores = x @ (2 * rng.normal(size=(FEATURES, 2))) + rng.gumbel(size=(size, 2))
        inputs.append(x)
        labels.append(scores.argmax(1))
    return np.concatenate(inputs), np.concatenate(labels), np.repeat(np.arange(len(SIZES)), SIZES)


@cache
def optimum() -> Vector:
    x, y = (torch.from_numpy(array) for array in problem()[:2])

    def objective(values: Vector) -> tuple[float, Vector]:
        w = torch.tensor(values, requires_grad=True)
        outputs = x @ w[: 2 * FEATURES].view(2, FEATURES).T + w[2 * FEATURES :]
        loss = torch.nn.functional.cross_entropy(outputs, y) + DECAY / 2 * w.square().sum()
        loss.backward()
        assert w.grad is not None
        return loss.item(), w.grad.numpy()

    solution = minimize(objective, np.zeros(2 * FEATURES + 2), jac=True, method="L-BFGS-B", tol=1e-14)
    return np.asarray(solution.x)


def trained(algorithm: dict[str, Any], **local: Any) -> fedgg.Run:
    """With all clients, unless `cohort` says otherwise."""
    x, y, clients = problem()
    cohort, rounds = local.pop("cohort", None), local.pop("rounds")
    chosen = fedgg.Experiment(
        rounds=rounds,
        algorithm=algorithm,
        split={"scheme": "given"},
        model={"name": "linear"},
        local={"batch": 10, "momentum": 0.0, "weight_decay": DECAY, **local},
        server={"cohort": cohort},
        engine={"name": "fused", "precision": "fp64"},
    )
    return fedgg.run(chosen, data=(x, y, x, y, clients))


@pytest.mark.parametrize("part", [1.0, 0.2])
def test_fednova_reaches_the_optimum_where_fedavg_is_biased(part: float) -> None:
    """Clients take 1, 2, 4 and 13 steps, or a part of them; rates that decrease make the distance the bias."""
    distance = {}
    for name in ("fedavg", "fednova"):
        run = trained({"name": name}, rounds=60, epochs=1, lr=0.3, lr_decay=0.92, part=part)
        w = np.concatenate([tensor.flatten().numpy() for tensor in run.weights.values()])
        distance[name] = np.linalg.norm(w - optimum()) / np.linalg.norm(optimum())
        steps = np.array([[client["steps"] for client in record["clients"]] for record in run.rounds])
        assert steps.max(0).tolist() == [1, 2, 4, 13]
        assert (steps.min(0).tolist() == [1, 2, 4, 13]) == (part == 1)
    assert distance["fedavg"] > 0.4
    assert distance["fednova"] < 0.1
    assert distance["fednova"] < 0.2 * distance["fedavg"]


def test_partial_work_under_fedprox_is_steadier_than_dropping_clients() -> None:
    """Clients do 10 to 100 % of six epochs and all count, or half of them finish and the others are dropped."""

    def last_losses(mu: float, **local: Any) -> Vector:
        run = trained({"name": "fedprox", "mu": mu}, rounds=18, epochs=6, lr=0.15, **local)
        return np.array([record["test_loss"] for record in run.rounds[-12:]])

    partial, dropped, without_term = last_losses(1.0, part=0.1), last_losses(1.0, cohort=2), last_losses(0.0, part=0.1)
    assert partial.std() < 0.2 * dropped.std()
    assert partial.max() < dropped.mean()
    assert partial.std() < 0.5 * without_term.std(), "the proximal term limits what unequal work changes"
