"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.

    min_{w_i}  L_i(w_i) - <g_i, w_i> + (alpha / 2) |w_i - w|^2           the client's objective
    g_i <- g_i - alpha (w_i - w)                                         its gradient at the minimum
    h   <- h - alpha (the mean, over all clients, of w_i - w)            zero for those that did not take part
    w   <- (the mean of this round's w_i) - h / alpha

g_i and h are stored without the factor alpha: with s_i the sum of all a client's updates and s the server's mean of
them, g_i = -alpha s_i and h = -alpha s. So the client state is s_i, the server's s; alpha (s_i + w_i - w) is added to
the gradient, the new model is the mean plus s, and nothing is divided by alpha. alpha must still be above zero: at zero
s would move the server's model and no term would pull the clients back.

At the fixed point no client moves, so g_i is its gradient, and s is zero, so the mean gradient is zero: the optimum,
for any number of local steps. Which mean is taken decides which problem is solved: `share` weights clients by their
examples, as the rest of the library does; `uniform` counts every client the same, in the model's mean and in s, as the
paper prints it. (The authors' code reaches the optimum by examples differently: equal means, and for each client alpha
divided by its share.) No setting makes it FedAvg: already the first round's update counts twice, once through s.

The paper does not treat local momentum. The rule does not use the number of steps, so it needs no change: s_i is
computed from a client's final models. s is a sum over all rounds, so single rounds can overshoot; and alpha adds to the
curvature that local steps must be stable for: lr alpha well below 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, Weighing, setting
from fedgg.core.tensor_rows import Rows, weighted_sum


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """Differs from FedAvg: clients and server sum up past updates, which corrects each client's drift."""

    when: ClassVar[str] = "the same clients take part often: it ends at the optimum, with no extra traffic"

    alpha: Number = setting(
        0.01,
        "weight of the dynamic regulariser",
        "Acar et al. 2021: 0.01; they tried 0.001 to 0.1",
        positive=True,
        search=(1e-3, 1.0),
    )
    mean: Literal["share", "uniform"] = setting(
        "share", "how clients are weighted", "the same weights as in the other algorithms; the paper: uniform"
    )

    def solves(self) -> Weighing:
        return "examples" if self.mean == "share" else "clients"

    def fixes_server_step(self) -> str:
        return "the sums that correct the drift of clients and server cancel for the whole step"

    def server_memory(self, w: Tensor) -> Rows:
        return {"moved": torch.zeros_like(w)}

    def client_memory(self, w: Tensor) -> Rows:
        return {"moved": torch.zeros_like(w)}

    def begin(self, w: Tensor, client: Client) -> Rows:
        return {"anchor": w, "moved": client.memory["moved"]}

    def terms(self, client: Client) -> dict[str, Number]:
        return {"moved": self.alpha, "drift": self.alpha}

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, memory = super().finish(w, client)
        return up, {"moved": memory["moved"] + up["delta"]}

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        clients = len(share)
        weights = share if self.mean == "share" else torch.full_like(share, 1 / clients)
        coverage = server.coverage if self.mean == "share" else clients / server.clients
        delta = weighted_sum(weights, up["delta"])
        moved = server.memory["moved"] + coverage * delta
        return w + delta + moved, {"moved": moved}
