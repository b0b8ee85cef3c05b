"""FedACG: Kim, Kim and Han, Communication-Efficient Federated Learning with Accelerated Client Gradient, CVPR 2024.

    sent:   w + momentum m                                                in place of w
    local:  min_{w_i}  L_i(w_i) + (mu / 2) |w_i - (w + momentum m)|^2
    m <- momentum m + sum_i p_i delta_i,    w <- w + m                    delta_i = w_i - what was sent

Clients start from a look-ahead point, the model moved along the server's momentum. Messages are as large as FedAvg's
and there is no client state. The evaluated model is w, the mean of the clients' local models.

The paper weights clients equally; here they count by their examples. Its authors' code has no 1/2 before |w_i - ..|^2.
Local momentum starts from zero in every round: it lengthens updates and leaves the server's rule unchanged. At the
fixed point m is zero, and the point is FedProx's with the same mu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.tensor_rows import Rows, weighted_sum


@dataclass(frozen=True)
class FedACG(Algorithm):
    """Differs from FedAvg: clients start ahead of the model by the server's momentum. Neutral at momentum 0, mu 0."""

    when: ClassVar[str] = "few of many clients take part in a round; no client state, no extra traffic"

    momentum: Number = setting(
        0.85, "server momentum, also of the look-ahead", "Kim et al. 2024: 0.85", search=(0.5, 0.95)
    )
    mu: Number = setting(
        1e-3,
        "weight of the proximal term around the sent model",
        "the authors' code, which leaves out the 1/2",
        search=(1e-4, 0.1),
    )

    def neutral(self) -> FedACG:
        return replace(self, momentum=0.0, mu=0.0)

    def server_memory(self, w: Tensor) -> Rows:
        return {"velocity": torch.zeros_like(w)}

    def broadcast(self, w: Tensor, server: Server) -> Tensor:
        return w + self.momentum * server.memory["velocity"]

    def fixes_server_step(self) -> str:
        return "clients start ahead of the model by the momentum of the whole step"

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": self.mu}

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        delta = weighted_sum(share, up["delta"])
        velocity = self.momentum * server.memory["velocity"] + delta
        return w + velocity, {"velocity": velocity}
