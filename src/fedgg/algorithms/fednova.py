"""FedNova: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Optimization, NeurIPS 2020.

Clients that take more local steps move further, so that in FedAvg they count for more than their examples. FedNova
divides each update by its effective number of steps, a_i, and multiplies the mean by their average:

    w^{r+1} = w^r + tau sum_i p_i delta_i / a_i,    tau = sum_i p_i a_i,    p_i = n_i / n            (Eq. 7 and 9)

Clients are weighted by their examples, as in the paper. Local momentum is in the paper too: with momentum b, a_i is the
1-norm of the weights with which gradients enter the update, which is `client.effective_steps` (K for b = 0). If all
clients take the same number of steps, it is FedAvg up to rounding. It does not correct for unequal curvature over
several local steps, so on quadratics its fixed point is near the optimum, not at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Server
from fedgg.core.tensor_rows import Rows, weighted_sum


@dataclass(frozen=True)
class FedNova(Algorithm):
    """Differs from FedAvg: an update counts by the client's examples, not also by its number of steps."""

    when: ClassVar[str] = "clients hold very different amounts of data and so take very different numbers of steps"

    def needs_sgd(self) -> str:
        return "updates are divided by SGD's effective steps"

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, memory = super().finish(w, client)
        return up | {"worth": client.effective_steps}, memory

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        reach = weighted_sum(share, up["worth"])
        return w + reach * weighted_sum(share, up["delta"] / up["worth"]), server.memory
