"""FedSGD: McMahan et al. 2017, the baseline with one full-batch gradient step a round.

w^{r+1} = w^r - lr sum_i (n_i / n) grad L_i(w^r)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedgg.core.algorithm import Algorithm
from fedgg.core.sampling import Work


@dataclass(frozen=True)
class FedSGD(Algorithm):
    """Differs from FedAvg: one local step on all of a client's examples. Its learning rate is then the server's."""

    when: ClassVar[str] = "as the yardstick without drift: it needs far more rounds"

    def work(self, work: Work) -> Work:
        return Work(epochs=1, batch=None)
