"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.

    min_{w_i}  L_i(w_i) - <g_i, w_i> + (alpha / 2) |w_i - w|^2           the client's objective
    g_i <- g_i - alpha (w_i - w)                                         its gradient at the minimum
    h   <- h - alpha (the mean, over all clients, of w_i - w)            zero for those that did not take part
    w   <- (the mean of this round's w_i) - h / alpha

Neither g_i nor h needs alpha to be kept: with s_i the sum of all a client's updates and s the server's mean of them,
g_i = -alpha s_i and h = -alpha s. So a client keeps s_i, the server s; the gradient has alpha (s_i + w_i - w) added,
the new model is the mean plus s, and nothing is divided by alpha. Still alpha must not be zero: s would then push the
server on while nothing pulled the clients back.

At rest no client moves, so g_i is its gradient, and s is zero, so their mean is: the optimum, after however few local
steps. Which mean decides which problem is solved: `share` weighs clients by their examples, as the rest of the library
does; `uniform` counts every client the same, in the model's mean and in s, as the paper prints it. (The authors' code
reaches the optimum by examples on another way: equal means, and for each client alpha divided by its share.) There is
no setting at which it is FedAvg: already the first round's update counts twice, once through s.

The paper knows no local momentum. Nothing here counts steps, so nothing has to be changed for it: s_i is made of where
a client ended. s is an integral that forgets nothing, so single rounds can overshoot; and alpha adds to the curvature a
client's own steps have to stand: lr alpha well below 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, Weighing, setting
from fedgg.core.client_rows import Rows, weighted_sum


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """Differs from FedAvg: clients and server remember their updates, which takes each client's own pull out."""

    when: ClassVar[str] = "the same clients come back often: it ends at the optimum, and nothing more travels"

    alpha: Number = setting(
        0.01, "weight of the dynamic regulariser", "Acar et al. 2021: 0.01; they tried 0.001 to 0.1", positive=True
    )
    mean: Literal["share", "uniform"] = setting(
        "share", "how clients count", "the same weights as everywhere here; the paper: uniform"
    )

    def solves(self) -> Weighing:
        return "examples" if self.mean == "share" else "clients"

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
