"""The accountant's epsilon beside figures computed here, from the definitions."""

from __future__ import annotations

import math
import sys
from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm

from fedgg.errors import UserError
from fedgg.wrappers import Budget
from fedgg.wrappers.budget import _one_round

accounting = pytest.importorskip(
    "dp_accounting", reason='the accountant is not installed: pip install "fedgg[privacy]"'
)
CASES = [(1, 1.0, 1e-5), (20, 1.0, 1e-5), (25, 8.0, 1e-5), (100, 4.0, 1e-6), (500, 50.0, 1e-4)]


@pytest.mark.parametrize(("rounds", "noise", "delta"), CASES)
def test_full_participation_against_the_closed_form(rounds: int, noise: float, delta: float) -> None:
    """Replacing a client moves the sum by 2 clip: Rényi divergence 2 rounds alpha / noise^2 at order alpha."""

    def epsilon(order: float) -> float:
        divergence = rounds * order * (2 / noise) ** 2 / 2
        return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)

    best = minimize_scalar(epsilon, bounds=(1.01, 2000), method="bounded", options={"xatol": 1e-6}).fun
    found = Budget(10, 10, noise, delta).epsilon(rounds)
    assert best - 1e-9 <= found <= 1.01 * best  # it knows some orders, we all of them


@pytest.mark.parametrize(("rounds", "noise", "delta"), CASES)
def test_full_participation_against_the_exact_curve(rounds: int, noise: float, delta: float) -> None:
    """Rounds compose to one Gaussian mechanism, whose delta is known exactly (Balle and Wang, ICML 2018, Theorem 8)."""
    mu = 2 * math.sqrt(rounds) / noise

    def excess(epsilon: float) -> float:
        far = norm.logcdf(-mu / 2 - epsilon / mu)
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + far)) - delta

    exact = brentq(excess, 0, mu**2 + 20 * mu)
    found = Budget(10, 10, noise, delta).epsilon(rounds)
    assert exact <= found <= 1.25 * exact


@pytest.mark.parametrize(("clients", "cohort", "noise"), [(100, 10, 1.0), (10, 5, 2.0), (1000, 20, 1.5)])
def test_sampling_at_order_two_against_the_theorem(clients: int, cohort: int, noise: float) -> None:
    """Wang, Balle and Kasiviswanathan 2019, Theorem 9, whose sum has one term at order 2."""
    orders, rdp = _one_round(clients, cohort, noise)
    whole = 2 * (2 / noise) ** 2 / 2
    expected = math.log(1 + (cohort / clients) ** 2 * min(4 * (math.exp(whole) - 1), 2 * math.exp(whole)))
    assert float(rdp[list(orders).index(2)]) == pytest.approx(expected, rel=1e-9)


def _divergence(order: float, q: float, noise: float) -> float:
    """Of the worst pair we know, by integration: everybody sends 0, one client sends +clip or -clip when drawn."""

    def log_density(x: float, mean: float) -> float:
        return float(np.logaddexp(math.log1p(-q) + norm.logpdf(x, 0, noise), math.log(q) + norm.logpdf(x, mean, noise)))

    def integrand(x: float) -> float:
        return math.exp(order * log_density(x, 1) - (order - 1) * log_density(x, -1))

    return math.log(quad(integrand, -60 * noise, 60 * noise, limit=2000, points=[-1, 0, 1, order])[0]) / (order - 1)


@pytest.mark.parametrize(("clients", "cohort", "noise"), [(100, 10, 1.0), (10, 5, 2.0), (20, 10, 3.0)])
def test_sampling_is_bounded_from_below_by_a_real_pair(clients: int, cohort: int, noise: float) -> None:
    """An accountant told that the noise is `noise` times the sensitivity (it is half of that) would fall below it."""
    orders, rdp = _one_round(clients, cohort, noise)
    naive = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    naive.compose(accounting.GaussianDpEvent(noise))
    for order in (2, 4, 8):
        at = list(orders).index(order)
        assert rdp[at] >= _divergence(order, cohort / clients, noise)
        assert naive.rdp[at] < _divergence(order, 1 - 1e-12, noise)


def test_sampling_helps_and_rounds_cost() -> None:
    everybody, some = Budget(100, 100, 4.0, 1e-5), Budget(100, 10, 4.0, 1e-5)
    assert some.epsilon(50) < 0.5 * everybody.epsilon(50)
    spent = [some.epsilon(rounds) for rounds in range(30)]
    assert spent[0] == 0
    assert all(a < b for a, b in pairwise(spent))


def test_rounds_within_a_limit() -> None:
    budget = Budget(100, 10, 4.0, 1e-5)
    for rounds in (1, 7, 30):
        limited = Budget(100, 10, 4.0, 1e-5, limit=budget.epsilon(rounds))
        assert limited.affordable(100) == rounds
        assert limited.affordable(rounds - 1) == rounds - 1
    assert Budget(100, 10, 4.0, 1e-5, limit=1e-3).affordable(100) == 0
    assert budget.affordable(100) == 100


def test_without_noise_nothing_is_private() -> None:
    assert Budget(10, 10, 0.0, 1e-5).epsilon(1) == math.inf


def test_without_the_library_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r'pip install "fedgg\[privacy\]"'):
        Budget(11, 10, 1.23, 1e-5).epsilon(1)
