"""How much privacy has been spent: an (epsilon, delta) after so many rounds, by Google's `dp-accounting`.

Cohorts have a fixed size and are drawn without replacement, so the neighbour of a federation is one in which one client
is another: the sum of clipped updates moves by up to 2 clip, and the noise is noise / 2 times that. Rounds compose in
Rényi differential privacy (amplified by sampling as in Wang, Balle and Kasiviswanathan, AISTATS 2019); epsilon is an
upper bound. It is a function of the number of rounds alone, so there is nothing to save.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from typing import Any

from fedgg.errors import UserError


@dataclass(frozen=True)
class Budget:
    clients: int  # those that can be drawn
    cohort: int
    noise: float
    delta: float
    limit: float | None = None  # the epsilon that must not be exceeded

    def epsilon(self, rounds: int) -> float:
        """Spent after so many rounds; infinite where there is no noise."""
        if rounds == 0:
            return 0.0
        if self.noise == 0:
            return math.inf
        orders, rdp = _one_round(self.clients, self.cohort, self.noise)
        return float(_accounting().rdp.compute_epsilon(orders, rounds * rdp, self.delta)[0])

    def affordable(self, rounds: int) -> int:
        """How many of so many rounds stay within the limit."""
        if self.limit is None:
            return rounds
        return bisect_right(range(1, rounds + 1), self.limit, key=self.epsilon)


@cache
def _one_round(clients: int, cohort: int, noise: float) -> tuple[Any, Any]:
    """Orders and the Rényi divergence of one round at each; rounds add up."""
    accounting = _accounting()
    event = accounting.GaussianDpEvent(noise / 2)
    if cohort < clients:
        event = accounting.SampledWithoutReplacementDpEvent(clients, cohort, event)
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(event)
    return accountant.orders, accountant.rdp


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise UserError('privacy needs an accountant, which is not installed: pip install "fedgg[privacy]"') from None
    return dp_accounting
