"""FedAvg, FedSGD: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

FedAvg: clients train on their own data, the server averages by number of examples:

    w^{r+1} = w^r + sum_i (n_i / n) (w_i^r - w^r)

FedSGD, its baseline, takes one full-batch gradient step a round:

    w^{r+1} = w^r - lr sum_i (n_i / n) grad L_i(w^r)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedgg.core.algorithm import Algorithm
from fedgg.core.random_choices import Work


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Differs from FedAvg: not at all; the defaults of the interface are FedAvg."""

    when: ClassVar[str] = "always, as the baseline of every comparison"

    def neutral(self) -> FedAvg:
        return self


@dataclass(frozen=True)
class FedSGD(Algorithm):
    """Differs from FedAvg: one local step on all of a client's examples. Its learning rate is then the server's."""

    when: ClassVar[str] = "as a baseline without client drift; it needs far more rounds"

    def work(self, work: Work) -> Work:
        return Work(epochs=1, batch=None)
