"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Eq. 2.

    min_w  L_i(w) + (mu / 2) |w - w^r|^2

Clients count by their examples. (The paper draws them in proportion to their examples and averages equally, which is
the same on average.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedgg.core.algorithm import Algorithm, Client, Number, setting


@dataclass(frozen=True)
class FedProx(Algorithm):
    """Differs from FedAvg: the gradient is pulled back to the global model. Neutral at mu 0."""

    when: ClassVar[str] = "clients drift far in long local training; a large mu slows all clients down"

    mu: Number = setting(
        0.01, "weight of the proximal term", "the FedGG paper's setting; Li et al. tried 0.001 to 1", search=(1e-3, 1.0)
    )

    def neutral(self) -> FedProx:
        return replace(self, mu=0.0)

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": self.mu}
