"""FedACG: Kim, Kim and Han, Communication-Efficient Federated Learning with Accelerated Client Gradient, CVPR 2024.

    sent:   w + momentum m                                                what travels, in place of w
    local:  min_{w_i}  L_i(w_i) + (mu / 2) |w_i - (w + momentum m)|^2
    m <- momentum m + sum_i p_i delta_i,    w <- w + m                    delta_i = w_i - what was sent

The server looks ahead: clients start where its momentum is about to carry the model, and train from there. Nothing more
travels than in FedAvg and clients keep nothing. The model that is evaluated is w, the mean of what clients came back
with.

The paper weighs clients the same; here they count by their examples. Its authors' code has no 1/2 before |w_i - ..|^2.
Local momentum is the client's own and dies with the round; it adds to how far a round goes, and leaves the server's
momentum as it is. At rest m is zero, and the fixed point is FedProx's with the same mu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.client_rows import Rows, weighted_sum


@dataclass(frozen=True)
class FedACG(Algorithm):
    """Differs from FedAvg: clients start where the server's momentum leads. Neutral at momentum 0, mu 0."""

    when: ClassVar[str] = "few of many clients a round, and they keep nothing; nothing more travels"

    momentum: Number = setting(0.85, "server momentum, and how far it looks ahead", "Kim et al. 2024: 0.85")
    mu: Number = setting(
        1e-3, "weight of the proximal term around what was sent", "the authors' code, which leaves out the 1/2"
    )

    def neutral(self) -> FedACG:
        return replace(self, momentum=0.0, mu=0.0)

    def server_memory(self, w: Tensor) -> Rows:
        return {"velocity": torch.zeros_like(w)}

    def broadcast(self, w: Tensor, server: Server) -> Tensor:
        return w + self.momentum * server.memory["velocity"]

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": self.mu}

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        delta = weighted_sum(share, up["delta"])
        velocity = self.momentum * server.memory["velocity"] + delta
        return w + velocity, {"velocity": velocity}
