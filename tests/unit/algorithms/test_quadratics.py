"""Where algorithms end on quadratics, against closed forms.

With full batches a client's K local steps are linear: w_i - w_i* = M_i (w - w_i*), without momentum
M_i = (I - lr A_i)^K. FedAvg therefore ends where sum p_i (I - M_i)(w - w_i*) = 0, not the optimum unless K = 1.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from fedgg.algorithms import SCAFFOLD, FedAvg, FedAvgM, FedGG, FedProx, FedSGD
from fedgg.check.multi_round_properties import on_quadratics
from fedgg.check.toy_problems import Quadratics
from fedgg.core.algorithm import Algorithm
from fedgg.core.optimisers import SGD

LR, LOCAL_STEPS = 0.08, 5
EVERYBODY, HALF = 4, 2
EVERYBODY_SLOWLY = pytest.param(EVERYBODY, marks=pytest.mark.slow)
ZERO_SLOWLY = pytest.param(0.0, marks=pytest.mark.slow)


@cache
def world() -> Quadratics:
    return Quadratics.draw()


def end(algorithm: Algorithm, momentum: float = 0.0, cohort: int = EVERYBODY, steps: int = 250) -> Tensor:
    return on_quadratics(algorithm, world(), steps=steps, momentum=momentum, cohort=cohort, lr=LR)


def away(w: Tensor, goal: Tensor) -> float:
    return float((w - goal).norm() / goal.norm())


def step_size(momentum: float) -> float:
    """on_quadratics lets a round go as far with momentum as without."""
    worth = SGD.of(LR, momentum, 0.0, torch.zeros(1, 1).double()).effective_steps(torch.full((1, 1), 5.0).double())
    return LR * LOCAL_STEPS / float(worth)


def fixed_point(momentum: float = 0.0, mu: float = 0.0, slower: float = 1.0) -> Tensor:
    """Where FedAvg (or FedProx with `mu`) ends: sum p_i (w_i(w) - w) = 0, w_i(w) by running the linear recursion."""
    n = sum(len(x) for x in world().x)
    size = world().x[0].shape[1]
    left, right = torch.zeros(size, size).double(), torch.zeros(size, 1).double()
    lr, eye = slower * step_size(momentum), torch.eye(size).double()
    for x, y in zip(world().x, world().y, strict=True):
        a, b = x.T @ x / len(x), (x.T @ y / len(x))[:, None]
        # w_i(w) = M w + c: start from w = columns of I with no target (M), and from 0 with the target (c)
        results = []
        for start, target in ((eye, torch.zeros(size, size).double()), (torch.zeros(size, 1).double(), b)):
            w, velocity = start, torch.zeros_like(start)
            for _ in range(LOCAL_STEPS):
                velocity = momentum * velocity + a @ w - target + mu * (w - start)
                w = w - lr * velocity
            results.append(w)
        share = len(x) / n
        left, right = left + share * (eye - results[0]), right + share * results[1]
    solution: Tensor = torch.linalg.solve(left, right)
    return solution.T


def test_the_fixed_point_is_the_one_in_the_docstring() -> None:
    n, size = sum(len(x) for x in world().x), 5
    left, right = torch.zeros(size, size).double(), torch.zeros(size).double()
    for x, y in zip(world().x, world().y, strict=True):
        a = x.T @ x / len(x)
        gone = torch.eye(size).double() - torch.linalg.matrix_power(torch.eye(size).double() - LR * a, LOCAL_STEPS)
        left, right = left + len(x) / n * gone, right + len(x) / n * gone @ torch.linalg.solve(a, x.T @ y / len(x))
    assert torch.allclose(fixed_point()[0], torch.linalg.solve(left, right), rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", [ZERO_SLOWLY, 0.9])
def test_fedavg_ends_at_its_fixed_point_and_not_at_the_optimum(momentum: float) -> None:
    w = end(FedAvg(), momentum, steps=200)
    assert away(w, fixed_point(momentum)) < 1e-5
    assert away(w, world().optimum()) > 0.01


@pytest.mark.parametrize("momentum", [ZERO_SLOWLY, 0.9])
def test_fedprox_ends_at_its_own_fixed_point(momentum: float) -> None:
    w = end(FedProx(mu=1.0), momentum, steps=250)
    assert away(w, fixed_point(momentum, mu=1.0)) < 1e-5
    if momentum == 0:  # the pull lessens the bias
        assert away(w, world().optimum()) < away(fixed_point(), world().optimum())


def test_fedavgm_ends_where_fedavg_does() -> None:
    assert away(end(FedAvgM(momentum=0.5), steps=200), fixed_point()) < 1e-5


@pytest.mark.parametrize("momentum", [ZERO_SLOWLY, 0.9])
def test_one_step_a_round_has_no_bias(momentum: float) -> None:
    assert away(end(FedSGD(), momentum, steps=110), world().optimum()) < 1e-3


@pytest.mark.parametrize("cohort", [EVERYBODY_SLOWLY, HALF])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffold_exact_share_reaches_the_optimum_by_examples(momentum: float, cohort: int) -> None:
    w = end(SCAFFOLD("exact", "share"), momentum, cohort)
    assert away(w, world().optimum("examples")) < 1e-6


@pytest.mark.parametrize("cohort", [EVERYBODY_SLOWLY, HALF])
@pytest.mark.parametrize("momentum", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_scaffold_exact_uniform_reaches_the_optimum_by_clients(momentum: float, cohort: int) -> None:
    """The variates decide: models may be averaged by examples, what is solved is the sum with equal clients."""
    w = end(SCAFFOLD("exact", "uniform"), momentum, cohort)
    assert away(w, world().optimum("clients")) < 1e-6
    assert away(w, world().optimum("examples")) > 0.01


@pytest.mark.slow
def test_scaffold_after_is_exact_without_momentum_and_biased_with_it() -> None:
    assert away(end(SCAFFOLD("after"), 0.0, HALF), world().optimum()) < 1e-6
    biased = away(end(SCAFFOLD("after"), 0.9, HALF), world().optimum())
    assert 0.001 < biased < 0.05


@pytest.mark.parametrize("cohort", [EVERYBODY_SLOWLY, HALF])
def test_the_three_scaffolds_are_one_without_momentum(cohort: int) -> None:
    exact = end(SCAFFOLD("exact"), 0.0, cohort, steps=50)
    assert away(end(SCAFFOLD("plain"), 0.0, cohort, steps=50), exact) < 1e-12
    assert away(end(SCAFFOLD("after"), 0.0, cohort, steps=50), exact) < 1e-12


def test_scaffold_plain_diverges_under_momentum() -> None:
    near, far = (away(end(SCAFFOLD("plain"), 0.9, steps=steps), world().optimum()) for steps in (100, 150))
    assert far > 10 * near > 1


@pytest.mark.parametrize("cohort", [EVERYBODY_SLOWLY, HALF])
@pytest.mark.parametrize("momentum", [ZERO_SLOWLY, 0.9])
def test_neutral_settings_are_fedavg_bit_for_bit(momentum: float, cohort: int) -> None:
    fedavg = end(FedAvg(), momentum, cohort, steps=30)
    for algorithm in (
        FedGG().neutral(),
        FedGG(weight="fixed", first_step="epsilon", gradient="printed").neutral(),
        FedGG(direction="sent", scope="layer", first_step="relative_push").neutral(),
        FedProx().neutral(),
        FedAvgM().neutral(),
    ):
        assert torch.equal(end(algorithm, momentum, cohort, steps=30), fedavg), algorithm


@pytest.mark.slow
def test_fedgg_ends_near_fedavg() -> None:
    """At rest the last global update is zero, and so is the term: the fixed point is FedAvg's own."""
    assert away(end(FedGG(mu=0.01), steps=200), fixed_point()) < 1e-3


def test_optima_are_where_the_gradient_is_zero() -> None:
    for weighing in ("examples", "clients"):
        goal = world().optimum(weighing)
        gradients = [x.T @ (x @ goal[0] - y) / len(x) for x, y in zip(world().x, world().y, strict=True)]
        weights = [float(len(x)) if weighing == "examples" else 1.0 for x in world().x]
        total = torch.stack([weight * gradient for weight, gradient in zip(weights, gradients, strict=True)]).sum(0)
        assert total.abs().max() < 1e-10
