"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

Clients train on their own data, the server averages by number of examples:

    w^{r+1} = w^r + sum_i (n_i / n) (w_i^r - w^r)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedgg.core.algorithm import Algorithm


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Differs from FedAvg: nowhere. It is the interface as it stands."""

    when: ClassVar[str] = "first, always: whatever is more must be worth it"

    def neutral(self) -> FedAvg:
        return self
