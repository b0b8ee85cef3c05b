"""FedLESAM: Fan et al., Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
Sharpness-aware Minimization, ICML 2024.

    d_i = rho (w_old - w) / |w_old - w|             w_old the model the client received in its previous round
    w_i <- w_i - lr grad L_i(w_i + d_i)             K local steps

Sharpness-aware minimisation takes the gradient at a point uphill of the model, so that training prefers flat minima. A
second gradient usually finds that point; here it is the direction in which the global model came, backwards, which is
the same for all steps of a round. A step costs one backward pass, messages are FedAvg's, and a client stores a model.

FedLESAM and FedGG use the same vector. FedGG adds a term along it to the gradient, which turns the client's drift;
FedLESAM changes the point at which the gradient is taken and leaves the gradient as it is.

Choices of ours: there is no displacement in a client's first round, which the paper leaves open, nor if the model has
not moved. With `direction = "sent"` the server sends its last update, as the authors' code does; clients then have no
state. That code divides by the sum of the parameters' norms and reads single entries of the flat update where it means
the update of a parameter; here the direction is a unit vector over the whole model, as the authors describe it. Weight
decay acts at w_i. Local momentum needs no correction. The paper combines the rule with SCAFFOLD and FedDyn (FedLESAM-S,
FedLESAM-D), which are not implemented. The fixed point differs from FedAvg's by the order of rho only while the model
moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.tensor_rows import Rows, length


@dataclass(frozen=True)
class FedLESAM(Algorithm):
    """Differs from FedAvg: gradients are taken uphill along the last global update. Neutral at rho 0."""

    when: ClassVar[str] = "flat minima at FedAvg's cost in arithmetic and bytes: clients store a model"

    rho: Number = setting(
        0.1,
        "how far from the model gradients are taken",
        "the authors' code: 0.1; 0.5 in its example",
        search=(1e-3, 1.0),
    )
    direction: Literal["received", "sent"] = setting(
        "received",
        "received: a client subtracts the last model it received (no bytes); sent: the server sends its last update",
        "Fan et al. 2024; their code: sent",
    )

    def neutral(self) -> FedLESAM:
        return replace(self, rho=0.0)

    def server_memory(self, w: Tensor) -> Rows:
        return {"update": torch.zeros_like(w)} if self.direction == "sent" else {}

    def client_memory(self, w: Tensor) -> Rows:
        return {} if self.direction == "sent" else {"received": w}  # no displacement in a client's first round

    def send_down(self, w: Tensor, server: Server) -> Rows:
        return {"update": server.memory["update"]} if self.direction == "sent" else {}

    def begin(self, w: Tensor, client: Client) -> Rows:
        back = -client.down["update"] if self.direction == "sent" else client.memory["received"] - w
        size = length(back)
        return {"anchor": w, "uphill": torch.where(size > 0, back / torch.where(size > 0, size, 1), 0)}

    def displacement(self, client: Client) -> dict[str, Number]:
        return {"uphill": self.rho}

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, _ = super().finish(w, client)
        return up, {} if self.direction == "sent" else {"received": client.notes["anchor"]}

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        new, memory = super().aggregate(w, up, share, server)
        return new, {"update": server.lr * (new - w)} if self.direction == "sent" else memory
