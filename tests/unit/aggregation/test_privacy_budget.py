"""Epsilon beside figures computed here: from closed forms, by integration and by convolutions of our own."""

from __future__ import annotations

import math
import sys
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import quad, trapezoid
from scipy.optimize import brentq
from scipy.stats import norm

from fedgg.aggregation import Budget
from fedgg.aggregation.privacy import _losses, _one_round, _one_round_of_renyi, _renyi
from fedgg.errors import UserError

accounting = pytest.importorskip(
    "dp_accounting", reason='the accountant is not installed: pip install "fedgg[privacy]"'
)
Floats = NDArray[np.float64]
EVERYBODY = [(1, 1.0, 1e-5), (20, 1.0, 1e-5), (25, 8.0, 1e-5), (100, 4.0, 1e-6), (500, 50.0, 1e-4)]
SAMPLED = [  # clients, cohort, noise, rounds, delta
    (100, 50, 5.0, 40, 1e-5),
    (1000, 20, 1.5, 100, 1e-6),
    (10, 9, 3.0, 12, 1e-3),
    (4, 1, 8.0, 60, 1e-7),
    (50, 5, 0.7, 3, 1e-5),
]


def without_state(clients: int, cohort: int, noise: float, delta: float, limit: float | None = None) -> Budget:
    return Budget(clients, cohort, noise, delta, client_state=False, limit=limit)


# Everybody in every round ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_state", [False, True])
@pytest.mark.parametrize(("rounds", "noise", "delta"), EVERYBODY)
def test_full_participation_is_the_exact_curve(rounds: int, noise: float, delta: float, client_state: bool) -> None:
    """Rounds compose to one Gaussian mechanism, whose delta is known exactly (Balle and Wang, ICML 2018, Theorem 8)."""
    mu = 2 * math.sqrt(rounds) / noise

    def excess(epsilon: float) -> float:
        far = norm.logcdf(-mu / 2 - epsilon / mu)
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + far)) - delta

    exact = brentq(excess, 0, mu**2 + 20 * mu)
    budget = Budget(10, 10, noise, delta, client_state)
    assert exact <= budget.epsilon(rounds) <= exact * (1 + 1e-6) + 1e-6
    assert budget.accountant(rounds) == "gaussian"


# Convolutions of our own ----------------------------------------------------------------------------------------------


def composed(masses: Floats, step: float, rounds: int, delta: float) -> float:
    """Epsilon after so many rounds of losses (multiples of `step`, symmetric range) by one Fourier transform."""
    half = len(masses) // 2
    width = 1 << math.ceil(math.log2(len(masses) * 8 * math.sqrt(rounds)))
    spread = np.zeros(width)
    spread[: half + 1], spread[-half:] = masses[half:], masses[:half]
    total = np.fft.irfft(np.fft.rfft(spread) ** rounds, width)
    losses = step * np.concatenate([np.arange(width // 2), np.arange(-width // 2, 0)])

    def excess(epsilon: float) -> float:
        above = losses > epsilon
        return float(np.dot(-np.expm1(epsilon - losses[above]), total[above])) - delta

    return float(brentq(excess, 0, losses.max() - step)) if excess(0) > 0 else 0.0


def loss_of(x: Floats, part: float, mu: float) -> Floats:
    """log of (1 - part) N(0, 1) + part N(mu, 1) over N(0, 1), at x."""
    loss: Floats = np.logaddexp(math.log1p(-part), math.log(part) + mu * x - mu * mu / 2)
    return loss


def masses_above_zero(part: float, mu: float, step: float, points: int) -> Floats:
    """Probabilities, under the mixture, of losses in ((k - 1) step, k step], k = 1, 2, ..., points."""
    bounds = np.arange(points + 1) * step
    x = (bounds + np.log1p(-(1 - part) * np.exp(-bounds)) - math.log(part)) / mu + mu / 2
    beyond = (1 - part) * norm.sf(x) + part * norm.sf(x - mu)
    masses: Floats = -np.diff(beyond)
    return masses


def dominating_pair(part: float, mu: float, step: float, points: int) -> Floats:
    """Losses rounded up: positive ones are the mixture's, a negative one is e^-loss times as likely as its mirror.

    What is left of the probability is where both distributions are the same.
    """
    above = masses_above_zero(part, mu, step, points)
    below = above * np.exp(-step * np.arange(1, points + 1))  # in [-k step, -(k - 1) step), to be rounded up
    zero = 1 - above.sum() - below.sum()
    return np.concatenate([[0.0], below[:0:-1], [zero + below[0]], above])


@pytest.mark.parametrize(("clients", "cohort", "noise", "rounds", "delta"), SAMPLED)
def test_secret_cohorts_against_a_convolution(
    clients: int, cohort: int, noise: float, rounds: int, delta: float
) -> None:
    part, mu = cohort / clients, 2 / noise
    points = 5000
    far = float(loss_of(np.array(mu + 9.5), part, mu))
    ours = composed(dominating_pair(part, mu, far / points, points), far / points, rounds, delta)
    budget = without_state(clients, cohort, noise, delta)
    assert budget.epsilon(rounds) == pytest.approx(ours, rel=5e-3, abs=2 * rounds * far / points)
    assert budget.accountant(rounds) == "pld, secret cohorts"


@pytest.mark.parametrize(("clients", "cohort", "noise", "rounds", "delta"), SAMPLED)
def test_known_cohorts_against_a_convolution(
    clients: int, cohort: int, noise: float, rounds: int, delta: float
) -> None:
    """A round is nothing, or with probability cohort / clients a Gaussian mechanism."""
    part, mu, points = cohort / clients, 2 / noise, 5000
    far = mu * mu / 2 + 9.5 * mu
    bounds = np.arange(-points - 1, points + 1) * (far / points)
    masses = part * np.diff(norm.cdf(bounds / mu - mu / 2))  # of losses N(mu^2 / 2, mu^2), rounded up
    masses[points] += 1 - part
    ours = composed(masses, far / points, rounds, delta)
    budget = Budget(clients, cohort, noise, delta, client_state=True)
    assert budget.epsilon(rounds) == pytest.approx(ours, rel=5e-3, abs=2 * rounds * far / points)
    assert budget.accountant(rounds) == "gaussian, known cohorts"


# Real neighbours ------------------------------------------------------------------------------------------------------


def hockey_stick(alpha: float, part: float, noise: float, others: float, order: int) -> float:
    """Of two real federations by integration: a client sends +1 or -1 when it is drawn, everybody else `others`.

    In units of clip and around the sum of the others: of those that are drawn there are cohort - 1 or cohort.
    """

    x = np.linspace(-12 * noise - 2, 12 * noise + 2, 200_001)
    one, other = ((1 - part) * norm.pdf(x, others, noise) + part * norm.pdf(x, own, noise) for own in (order, -order))
    return float(trapezoid(np.maximum(0.0, one - alpha * other), x))


@pytest.mark.parametrize(("part", "noise"), [(0.5, 5.0), (0.1, 1.0), (0.9, 2.0)])
def test_one_round_bounds_real_neighbours_and_meets_the_worst(part: float, noise: float) -> None:
    for epsilon in (-0.3, 0.0, 0.05, 0.4):
        bound = float(_one_round(np.array([epsilon]), part, 2 / noise)[0])
        seen = {
            (others, order): hockey_stick(math.exp(epsilon), part, noise, others, order)
            for others in (-1.0, 0.0, 0.5, 1.0)
            for order in (1, -1)
        }
        assert max(seen.values()) == pytest.approx(bound, abs=1e-7)  # where everybody else sends -1, or +1
        assert all(value <= bound + 1e-7 for value in seen.values())


@pytest.mark.parametrize(("clients", "cohort", "noise", "rounds", "delta"), SAMPLED)
def test_composition_bounds_real_neighbours_closely(
    clients: int, cohort: int, noise: float, rounds: int, delta: float
) -> None:
    """Everybody else sends -1 in every round: a mixture against a Gaussian, losses rounded down, in either order."""
    part, mu, points = cohort / clients, 2 / noise, 5000
    x = np.linspace(-9.5, mu + 9.5, 200_001)
    loss, step = loss_of(x, part, mu), float(loss_of(np.array(mu + 9.5), part, mu)) / points
    least = []
    for upper, sign in (((1 - part) * norm.pdf(x) + part * norm.pdf(x - mu), 1), (norm.pdf(x), -1)):
        weights = upper * (x[1] - x[0])
        places = np.clip(np.floor(sign * loss / step).astype(int), -points, points) + points
        masses = np.bincount(places, weights, 2 * points + 1).astype(np.float64)
        least.append(composed(masses, step, rounds, delta))
    spent = without_state(clients, cohort, noise, delta).epsilon(rounds)
    assert max(least) <= spent * (1 + 1e-6)
    assert spent <= 1.15 * max(least) + 2 * rounds * step


def test_the_figures_of_a_known_case() -> None:
    """100 clients, 50 a round, noise 5, 40 rounds: proven; of other sampling; by Rényi."""
    rdp = _renyi(without_state(100, 50, 5.0, 1e-5), 40)
    assert rdp == pytest.approx(14.34, abs=0.01)
    assert without_state(100, 50, 5.0, 1e-5).epsilon(40) == pytest.approx(6.42, abs=0.005)
    assert Budget(100, 50, 5.0, 1e-5, client_state=True).epsilon(40) == pytest.approx(9.33, abs=0.005)
    for noise, epsilon in ((2.5, 6.24), (5.0, 2.69)):
        poisson = accounting.pld.PLDAccountant()  # adds or removes a client, of samples of random size
        poisson.compose(accounting.PoissonSampledDpEvent(0.5, accounting.GaussianDpEvent(noise)), 40)
        assert poisson.get_epsilon(1e-5) == pytest.approx(epsilon, abs=0.005)


def test_a_delta_too_small_for_fourier_transforms_is_left_to_renyi() -> None:
    budget = without_state(100, 10, 4.0, 1e-13)
    assert _losses(0.1, 4.0, 1e-13, 30) == math.inf
    assert budget.accountant(30) == "rdp, secret cohorts"
    assert budget.epsilon(30) == _renyi(budget, 30)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("noise", [1e-4, 0.02, 0.05, 1e4, 1e7])
def test_noise_of_any_size_has_an_epsilon(noise: float) -> None:
    secret, known = (Budget(100, 10, noise, 1e-5, client_state).epsilon(50) for client_state in (False, True))
    assert 0 <= secret <= known < math.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("noise", [1e-320, 1e-150])
def test_noise_whose_epsilon_overflows_counts_as_none(noise: float) -> None:
    for clients in (10, 100):
        budget = Budget(clients, 10, noise, 1e-5, False, limit=3.0)
        assert budget.epsilon(50) == math.inf
        assert budget.affordable(50) == 0


def test_no_bound_is_above_renyis() -> None:
    for clients, cohort, noise, rounds, delta in SAMPLED:
        budget = without_state(clients, cohort, noise, delta)
        assert budget.epsilon(rounds) <= _renyi(budget, rounds)


# Rényi differential privacy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "cohort", "noise"), [(100, 10, 1.0), (10, 5, 2.0), (1000, 20, 1.5)])
def test_sampling_at_order_two_against_the_theorem(clients: int, cohort: int, noise: float) -> None:
    """Wang, Balle and Kasiviswanathan 2019, Theorem 9, whose sum has one term at order 2."""
    orders, rdp = _one_round_of_renyi(clients, cohort, noise)
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
    orders, rdp = _one_round_of_renyi(clients, cohort, noise)
    naive = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    naive.compose(accounting.GaussianDpEvent(noise))
    for order in (2, 4, 8):
        at = list(orders).index(order)
        assert rdp[at] >= _divergence(order, cohort / clients, noise)
        assert naive.rdp[at] < _divergence(order, 1 - 1e-12, noise)


# Rounds and limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_state", [False, True])
def test_sampling_helps_and_rounds_cost(client_state: bool) -> None:
    everybody, some = (Budget(100, cohort, 4.0, 1e-5, client_state) for cohort in (100, 10))
    assert some.epsilon(50) < 0.6 * everybody.epsilon(50)
    spent = [some.epsilon(rounds) for rounds in range(30)]
    assert spent[0] == 0
    assert all(a < b for a, b in pairwise(spent))


def test_cohorts_that_are_known_cost_more() -> None:
    for cohort in (1, 10, 50, 99):
        secret, known = (Budget(100, cohort, 4.0, 1e-5, client_state) for client_state in (False, True))
        assert secret.epsilon(20) < known.epsilon(20)


def test_rounds_within_a_limit() -> None:
    budget = without_state(100, 10, 4.0, 1e-5)
    for rounds in (1, 7, 30):
        limited = without_state(100, 10, 4.0, 1e-5, limit=budget.epsilon(rounds))
        assert limited.affordable(100) == rounds
        assert limited.affordable(rounds - 1) == rounds - 1
    assert without_state(100, 10, 4.0, 1e-5, limit=1e-3).affordable(100) == 0
    assert budget.affordable(100) == 100


def test_without_noise_nothing_is_private() -> None:
    budget = without_state(10, 10, 0.0, 1e-5)
    assert budget.epsilon(1) == math.inf
    assert budget.accountant(1) is None


def test_without_the_library_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r'pip install "fedgg\[privacy\]"'):
        without_state(11, 10, 1.23, 1e-5).epsilon(1)
    assert Budget(11, 10, 1.23, 1e-5, client_state=True).epsilon(1) > 0  # a closed form
