"""Which problem each algorithm solves: clients weighted by examples, or each the same.

With one full-batch local step a round there is no drift, and what is left is how clients are weighted: the two optima
of this world are 5 % apart. What several local steps do to where each algorithm ends is looked at in its own file.
"""

from __future__ import annotations

import pytest
from test_quadratics import away, world

from fedgg import algorithms as kind
from fedgg.check.multi_round_properties import on_quadratics
from fedgg.core.algorithm import Algorithm, Weighing

EXACT = 1e-6
CASES: list[tuple[Algorithm, Weighing, float]] = [
    (kind.FedSGD(), "examples", EXACT),
    (kind.FedAvg(), "examples", EXACT),
    (kind.FedAvgM(momentum=0.5), "examples", EXACT),
    (kind.FedProx(mu=1.0), "examples", EXACT),
    (kind.FedNova(), "examples", EXACT),
    (kind.FedAdagrad(server_lr=0.5), "examples", EXACT),
    (kind.FedAdam(server_lr=0.2, beta1=0.5, tau=0.1), "examples", EXACT),
    (kind.FedYogi(server_lr=0.2, beta1=0.5, tau=0.1), "examples", 5e-3),  # its squares fall slowly, and so do its steps
    (kind.FedCM(alpha=0.3), "examples", EXACT),
    (kind.FedExP(10.0), "examples", EXACT),
    (kind.FedACG(), "examples", EXACT),
    (kind.FedDyn(alpha=2.0), "examples", EXACT),
    (kind.FedDyn(alpha=2.0, mean="uniform"), "clients", EXACT),
    (kind.SCAFFOLD(), "examples", EXACT),
    (kind.SCAFFOLD(variate_mean="uniform"), "clients", EXACT),
    (kind.FedCL(), "examples", EXACT),
    (kind.FedCurv(lam=0.0015), "examples", 5e-3),  # the others' models are a step away: a bias of the order of lam lr
    (kind.MOON(), "examples", 5e-3),  # the client's previous model is a step away: a bias of the order of mu lr
    (kind.FedSAM(rho=1e-4), "examples", 1e-3),  # gradients a distance of rho away: a bias of the order of rho
    (kind.MoFedSAM(rho=1e-4, alpha=0.3), "examples", 1e-3),
    (kind.FedLESAM(rho=1e-4), "examples", 1e-3),
    (kind.FedWMSAM(rho=1e-4, alpha=0.3), "examples", 1e-3),
    (kind.FedSpeed(rho=1e-4, alpha=2.0), "examples", 1e-3),
    (kind.GHBM(beta=0.5, tau=2), "examples", EXACT),
    (kind.FedHBM(tau=2.0), "examples", EXACT),
    (kind.FedGG(), "examples", EXACT),
]


@pytest.mark.parametrize(("algorithm", "weighing", "near"), CASES, ids=str)
def test_without_drift_it_lands_on_the_optimum_it_claims(algorithm: Algorithm, weighing: Weighing, near: float) -> None:
    assert algorithm.solves() == weighing
    w = on_quadratics(algorithm, world(), steps=90, momentum=0.0, lr=0.25, epochs=1)
    other: Weighing = "clients" if weighing == "examples" else "examples"
    assert away(w, world().optimum(weighing)) < near
    assert away(w, world().optimum(other)) > 0.04


def test_every_algorithm_is_asked() -> None:
    classifiers = {one for one in kind.ALGORITHMS.values() if one.needs_classes}  # not defined on quadratics
    assert {type(algorithm) for algorithm, _, _ in CASES} == set(kind.ALGORITHMS.values()) - classifiers
