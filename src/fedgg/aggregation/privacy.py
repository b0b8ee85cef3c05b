"""Client-level differential privacy (McMahan et al., ICLR 2018, with a cohort of fixed size) and its budget.

mean = (1 / m) (sum_i  u_i min(1, clip / |u_i|)  +  N(0, (noise clip)^2 I))

u_i is all that client i sends up, as one vector; m is the number of clients asked, whoever was lost. Clients count the
same: an example count is data. `aggregate` is given m clients who all sent this mean, so that whatever it does is
post-processing and costs nothing more.

Cohorts have a fixed size and are drawn without replacement, so the neighbour of a federation is one in which one client
is another: the sum of clipped updates moves by up to 2 clip, and the noise is noise / 2 times that. With q = cohort /
clients and mu = 2 / noise, delta_mu(epsilon) of one Gaussian mechanism is known exactly (Balle and Wang, ICML 2018).

gaussian                 Everybody in every round: T rounds are one Gaussian mechanism with mu sqrt(T).
gaussian, known cohorts  To those who know all cohorts, the K rounds in which a client took part are Gaussian mechanisms
                         and the others nothing: delta(epsilon) = E delta_{mu sqrt(K)}(epsilon), K binomial (T, q).
pld, secret cohorts      One round, for epsilon >= 0: q delta_mu(log(1 + (e^epsilon - 1) / q)), by Balle, Barthe and
                         Gaboardi, NeurIPS 2018, for samples without replacement and replaced clients. It holds for
                         the neighbours in either order, so delta(-epsilon) = 1 - e^-epsilon + e^-epsilon
                         delta(epsilon) completes it to the curve of one dominating pair; such pairs compose (Zhu, Dong
                         and Wang, AISTATS 2022), here as a privacy loss distribution of `dp-accounting`.
rdp, secret cohorts      Rényi differential privacy of `dp-accounting`, amplified as in Wang, Balle and Kasiviswanathan,
                         AISTATS 2019. Smaller than the former only where delta is too small for its arithmetic.

Secret cohorts make a round cheaper only if no later message depends on who was in an earlier cohort. Where clients keep
state it does: a client trains differently once it has been drawn, and in a cohort of fixed size who was drawn says who
was not. There, cohorts count as known. Figures for Poisson samples are smaller; they are not what is drawn here.
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
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom
from torch import Tensor

from fedgg.core.client_rows import Rows
from fedgg.core.sampling import stream
from fedgg.core.server import Collector, Sent, all_sent_the_same
from fedgg.errors import UserError


def lengths(entries: Iterable[Tensor]) -> Tensor:
    """Euclidean length of each client's entries taken as one vector, `[K, 1]` in float64: squares cannot overflow."""
    squares = [torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64).square() for rows in entries]
    return torch.stack(squares).sum(0).sqrt()


def within(bound: float | Tensor, length: Tensor) -> Tensor:
    """What to multiply vectors by so that none is longer than `bound`: exactly 1 where that holds already."""
    return torch.where(length > bound, bound / length.clamp_min(torch.finfo(length.dtype).tiny), 1.0)


def refuse_what_is_no_vector(wrapper: str, up: Rows, parameters: int, way_out: str) -> None:
    """A number beside the update has no length that could be bounded in the update's units."""
    for name, rows in up.items():
        if rows.shape[1:] != (parameters,):
            shape = " x ".join(map(str, rows.shape[1:]))
            raise UserError(
                f"{wrapper} bounds vectors as long as the model ({parameters}), but this algorithm also sends up "
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
        refuse_what_is_no_vector("privacy", up, parameters, "take another algorithm, or run without [privacy]")

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        weights = within(self.clip, lengths(sent.up.values())) / sent.asked
        means = {name: torch.sum(weights.to(rows.dtype) * rows, 0, keepdim=True) for name, rows in sent.up.items()}
        return all_sent_the_same(self._noisy(means, sent), sent.asked)

    def _noisy(self, means: Rows, sent: Sent) -> Rows:
        """One draw for all entries in the order of their names: the same numbers on every device."""
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
OLD_ACCOUNTANT = "rdp"  # of histories whose lines name none: Rényi differential privacy, whatever clients keep
POINTS = 2000  # of a round's privacy losses, on either side of zero
FAR = 9.5  # standard deviations; what lies beyond has a probability of 1e-21
LOUD_ENOUGH = 0.02  # noise below which a loss of e^epsilon overflows; epsilon is in the thousands there
ROUNDING = 1e-13  # of a delta in each round: what Fourier transforms may lose


@dataclass(frozen=True)
class Budget:
    clients: int  # those that can be drawn
    cohort: int
    noise: float
    delta: float
    client_state: bool  # whether clients keep anything between rounds
    limit: float | None = None  # the epsilon that must not be exceeded

    def epsilon(self, rounds: int) -> float:
        """Spent after so many rounds; infinite where there is no noise."""
        return self._spent(rounds)[0]

    def accountant(self, rounds: int) -> str | None:
        """Which bound that is; None without noise."""
        return self._spent(rounds)[1]

    def _spent(self, rounds: int) -> tuple[float, str | None]:
        return (math.inf, None) if self.noise == 0 else _spent(replace(self, limit=None), rounds)

    def affordable(self, rounds: int) -> int:
        """How many of so many rounds stay within the limit."""
        if self.limit is None:
            return rounds
        return bisect_right(range(1, rounds + 1), self.limit, key=self.epsilon)


@cache
def _spent(budget: Budget, rounds: int) -> tuple[float, str]:
    """The smallest of the bounds that hold, and its name."""
    part = budget.cohort / budget.clients
    known = _known_cohorts(part, budget.noise, budget.delta, rounds)
    if part == 1:
        return known, "gaussian"
    bounds = [(known, "gaussian, known cohorts")]
    if not budget.client_state:
        bounds = [(_losses(part, budget.noise, budget.delta, rounds), "pld, secret cohorts"), *bounds]
        bounds += [(_renyi(budget, rounds), "rdp, secret cohorts")]
    return min(bounds, key=lambda bound: bound[0])


def _known_cohorts(part: float, noise: float, delta: float, rounds: int) -> float:
    taken = np.arange(1, rounds + 1)
    likely, mu = binom.pmf(taken, rounds, part), 2 * np.sqrt(taken) / noise

    def excess(epsilon: float) -> float:
        return float(np.dot(likely, _gaussian(np.full(rounds, epsilon), mu))) - delta

    if rounds == 0 or excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-12, rtol=1e-12)) * (1 + 1e-9) + 1e-9  # on the safe side of the root


def _gaussian(epsilon: Floats, mu: Floats | float) -> Floats:
    """delta of the Gaussian mechanism whose two means are mu standard deviations apart, for epsilon >= 0."""
    curve: Floats = ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return np.maximum(curve, 0.0)


def _losses(part: float, noise: float, delta: float, rounds: int) -> float:
    """By the privacy loss distribution of a round; infinite where delta or noise is too small for floating point."""
    left = delta - ROUNDING * rounds
    if left < 0.9 * delta or noise < LOUD_ENOUGH:
        return math.inf
    if rounds == 0:
        return 0.0
    return float(_one_round_of_losses(part, noise).self_compose(rounds).get_epsilon_for_delta(left))


@cache
def _one_round_of_losses(part: float, noise: float) -> Any:
    """Probabilities on a grid whose curve touches the round's at every point of it, and is nowhere below."""
    mu = 2 / noise
    far = float(np.logaddexp(math.log1p(-part), math.log(part) + mu * mu / 2 + FAR * mu))
    step, places = far / POINTS, np.arange(-POINTS, POINTS + 1, dtype=np.int64)
    deltas = _one_round(places.astype(np.float64) * step, part, mu)
    # A curve that is straight in e^epsilon between the points, as of losses that are multiples of the step only.
    rise = np.diff(deltas) / math.expm1(step)
    masses = np.zeros(len(places))
    masses[:-1] += rise
    masses[1:] -= math.exp(step) * rise
    masses[0] += 1 - deltas[0]
    accounting = _accounting()
    distribution = accounting.pld.privacy_loss_distribution.PrivacyLossDistribution
    return distribution.create_from_rounded_probability(
        dict(zip(places.tolist(), np.maximum(masses, 0.0).tolist(), strict=True)), float(deltas[-1]), step
    )


def _one_round(epsilon: Floats, part: float, mu: float) -> Floats:
    """delta of a round with a secret cohort, at epsilons of either sign."""
    size = np.abs(epsilon)
    before_sampling = size + np.log1p(-(1 - part) * np.exp(-size)) - math.log(part)
    curve = part * _gaussian(np.maximum(before_sampling, 0.0), mu)
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
