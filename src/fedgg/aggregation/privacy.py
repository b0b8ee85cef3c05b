"""Client-level differential privacy (McMahan et al., ICLR 2018, with a cohort of fixed size) and its budget.

mean = (1 / m) (sum_i  u_i min(1, clip / |u_i|)  +  N(0, (noise clip)^2 I))

u_i is all that client i sends up, as one vector; m is the size of the cohort, dropped clients included. Clients are
weighted equally, since an example count is private data. `aggregate` receives m clients that all sent this mean, so
that it is post-processing, which has no privacy cost.

Cohorts have a fixed size and are drawn without replacement, so neighbouring federations differ by the replacement of
one client: the sum of clipped updates changes by up to 2 clip, and the noise is noise / 2 times that. With q = cohort /
clients and mu = 2 / noise, delta_mu(epsilon) of one Gaussian mechanism is known exactly (Balle and Wang, ICML 2018).

gaussian                 All clients in every round: T rounds are one Gaussian mechanism with mu sqrt(T).
gaussian, known cohorts  For an observer who knows all cohorts, the K rounds in which a client took part are Gaussian
                         mechanisms and the others reveal nothing about it: delta(epsilon) = E delta_{mu
                         sqrt(K)}(epsilon), K binomial (T, q).
pld, secret cohorts      One round, for epsilon >= 0: q delta_mu(log(1 + (e^epsilon - 1) / q)), by Balle, Barthe and
                         Gaboardi, NeurIPS 2018, for samples without replacement and replaced clients. It holds for
                         the neighbours in either order, so delta(-epsilon) = 1 - e^-epsilon + e^-epsilon
                         delta(epsilon) completes it to the curve of one dominating pair; such pairs compose (Zhu, Dong
                         and Wang, AISTATS 2022), here as a privacy loss distribution of `dp-accounting`.
rdp, secret cohorts      Rényi differential privacy of `dp-accounting`, amplified as in Wang, Balle and Kasiviswanathan,
                         AISTATS 2019. Used if delta is too small for the arithmetic of the former.

Secret cohorts reduce the cost of a round only if no later message depends on the members of an earlier cohort. With
client state it does: a client trains differently once it has been drawn, and in a cohort of fixed size the presence of
one client reveals the absence of another. Cohorts then count as known. Bounds for Poisson sampling are smaller, but do
not apply to cohorts of fixed size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.core.random_choices import stream
from fedgg.core.server import Collector, Sent, all_sent_the_same
from fedgg.core.tensor_rows import Rows
from fedgg.errors import UserError


def lengths(entries: Iterable[Tensor]) -> Tensor:
    """Euclidean length of each client's entries taken as one vector, `[K, 1]` in float64: squares cannot overflow."""
    squares = [torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64).square() for rows in entries]
    return torch.stack(squares).sum(0).sqrt()


def clip_factors(bound: float | Tensor, length: Tensor) -> Tensor:
    """Factors that clip vectors of these lengths to `bound`; exactly 1 for shorter ones."""
    return torch.where(length > bound, bound / length.clamp_min(torch.finfo(length.dtype).tiny), 1.0)


def require_model_vectors(setting: str, up: Rows, parameters: int, way_out: str) -> None:
    """Only vectors as long as the model can be clipped: a scalar has other units than the update."""
    for name, rows in up.items():
        if rows.shape[1:] != (parameters,):
            shape = " x ".join(map(str, rows.shape[1:]))
            raise UserError(
                f"{setting} bounds vectors as long as the model ({parameters}), but this algorithm also sends up "
                f"{name!r} of size {shape}: {way_out}"
            )


@dataclass(frozen=True)
class ClientPrivacy(Collector):
    """The Gaussian mechanism on the sum of clipped updates."""

    counts_equally: ClassVar[bool] = True

    clip: float
    noise: float  # standard deviation of the noise on the sum, in units of clip
    seed: int

    def check(self, up: Rows, parameters: int) -> None:
        require_model_vectors("privacy", up, parameters, "take another algorithm, or run without [privacy]")

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        weights = clip_factors(self.clip, lengths(sent.up.values())) / sent.asked
        means = {name: torch.sum(weights.to(rows.dtype) * rows, 0, keepdim=True) for name, rows in sent.up.items()}
        return all_sent_the_same(self._noisy(means, sent), sent.asked)

    def _noisy(self, means: Rows, sent: Sent) -> Rows:
        """One random stream for all entries, in the order of their names: the same numbers on every device."""
        if self.noise == 0:
            return means
        numbers = stream(self.seed, "privacy", sent.round)
        deviation = self.noise * self.clip / sent.asked
        noisy = {}
        for name in sorted(means):
            mean = means[name]
            noise = torch.from_numpy(deviation * numbers.standard_normal(tuple(mean.shape)))
            noisy[name] = mean + noise.to(dtype=mean.dtype, device=mean.device)
        return noisy


Floats = NDArray[np.float64]
OLD_ACCOUNTANT = "rdp"  # of records that name no accountant: Rényi differential privacy, also with client state
POINTS = 2000  # grid points of a round's privacy losses, on each side of zero
FAR = 9.5  # standard deviations; values beyond have a probability of 1e-21
MIN_NOISE = 0.02  # below it e^epsilon overflows; epsilon is in the thousands there
NO_NOISE = 1e-12  # below it epsilon is beyond 1e24, and its computation overflows: as if there were no noise
ROUNDING = 1e-13  # of delta, per round: rounding error of the Fourier transforms


@dataclass(frozen=True)
class Budget:
    clients: int  # those that can be drawn
    cohort: int
    noise: float
    delta: float
    client_state: bool  # whether clients have state between rounds
    limit: float | None = None  # the epsilon that must not be exceeded

    def epsilon(self, rounds: int) -> float:
        """Epsilon spent after `rounds` rounds; infinite without noise."""
        return self._spent(rounds)[0]

    def accountant(self, rounds: int) -> str | None:
        """The name of the bound that `epsilon` is; None without noise."""
        return self._spent(rounds)[1]

    def _spent(self, rounds: int) -> tuple[float, str | None]:
        return (math.inf, None) if self.noise == 0 else _spent(replace(self, limit=None), rounds)

    def affordable(self, rounds: int) -> int:
        """How many of `rounds` rounds stay within the limit."""
        if self.limit is None:
            return rounds
        return bisect_right(range(1, rounds + 1), self.limit, key=self.epsilon)


@cache
def _spent(budget: Budget, rounds: int) -> tuple[float, str]:
    """The smallest of the bounds that hold, and its name."""
    if budget.noise < NO_NOISE:
        return math.inf, "gaussian"
    rate = budget.cohort / budget.clients
    known = _known_cohorts(rate, budget.noise, budget.delta, rounds)
    if rate == 1:
        return known, "gaussian"
    bounds = [(known, "gaussian, known cohorts")]
    if not budget.client_state:
        bounds = [(_losses(rate, budget.noise, budget.delta, rounds), "pld, secret cohorts"), *bounds]
        bounds += [(_renyi(budget, rounds), "rdp, secret cohorts")]
    return min(bounds, key=lambda bound: bound[0])


def _known_cohorts(rate: float, noise: float, delta: float, rounds: int) -> float:
    from scipy.optimize import brentq  # in the functions that need it: scipy takes half a second to import
    from scipy.stats import binom

    participations = np.arange(1, rounds + 1)
    probability, mu = binom.pmf(participations, rounds, rate), 2 * np.sqrt(participations) / noise

    def excess(epsilon: float) -> float:
        return float(np.dot(probability, _gaussian(np.full(rounds, epsilon), mu))) - delta

    if rounds == 0 or excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-12, rtol=1e-12)) * (1 + 1e-9) + 1e-9  # on the safe side of the root


def _gaussian(epsilon: Floats, mu: Floats | float) -> Floats:
    """delta of the Gaussian mechanism whose two means are mu standard deviations apart, for epsilon >= 0."""
    from scipy.special import log_ndtr, ndtr

    curve: Floats = ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return np.maximum(curve, 0.0)


def _losses(rate: float, noise: float, delta: float, rounds: int) -> float:
    """By the privacy loss distribution of a round; infinite if delta or noise is too small for floating point."""
    usable_delta = delta - ROUNDING * rounds
    if usable_delta < 0.9 * delta or noise < MIN_NOISE:
        return math.inf
    if rounds == 0:
        return 0.0
    return float(_one_round_of_losses(rate, noise).self_compose(rounds).get_epsilon_for_delta(usable_delta))


@cache
def _one_round_of_losses(rate: float, noise: float) -> Any:
    """A distribution on a grid whose curve equals the round's at every grid point and is nowhere below it."""
    mu = 2 / noise
    largest = float(np.logaddexp(math.log1p(-rate), math.log(rate) + mu * mu / 2 + FAR * mu))
    step, places = largest / POINTS, np.arange(-POINTS, POINTS + 1, dtype=np.int64)
    deltas = _one_round(places.astype(np.float64) * step, rate, mu)
    # Between grid points the curve of a distribution on the grid is linear in e^epsilon.
    slopes = np.diff(deltas) / math.expm1(step)
    masses = np.zeros(len(places))
    masses[:-1] += slopes
    masses[1:] -= math.exp(step) * slopes
    masses[0] += 1 - deltas[0]
    accounting = _accounting()
    distribution = accounting.pld.privacy_loss_distribution.PrivacyLossDistribution
    return distribution.create_from_rounded_probability(
        dict(zip(places.tolist(), np.maximum(masses, 0.0).tolist(), strict=True)), float(deltas[-1]), step
    )


def _one_round(epsilon: Floats, rate: float, mu: float) -> Floats:
    """delta of a round with a secret cohort, at epsilons of either sign."""
    size = np.abs(epsilon)
    before_sampling = size + np.log1p(-(1 - rate) * np.exp(-size)) - math.log(rate)
    curve = rate * _gaussian(np.maximum(before_sampling, 0.0), mu)
    return np.where(epsilon >= 0, curve, -np.expm1(-size) + np.exp(-size) * curve)


def _renyi(budget: Budget, rounds: int) -> float:
    if rounds == 0:
        return 0.0
    orders, rdp = _one_round_of_renyi(budget.clients, budget.cohort, budget.noise)
    return float(_accounting().rdp.compute_epsilon(orders, rounds * rdp, budget.delta)[0])


@cache
def _one_round_of_renyi(clients: int, cohort: int, noise: float) -> tuple[Any, Any]:
    """Orders and the Rényi divergence of one round at each; rounds add up."""
    accounting = _accounting()
    event = accounting.SampledWithoutReplacementDpEvent(clients, cohort, accounting.GaussianDpEvent(noise / 2))
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(event)
    return accountant.orders, accountant.rdp


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld.privacy_loss_distribution
        import dp_accounting.rdp
    except ImportError:
        raise UserError('privacy needs an accountant, which is not installed: pip install "fedgg[privacy]"') from None
    return dp_accounting
