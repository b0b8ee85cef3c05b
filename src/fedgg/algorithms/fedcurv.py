"""FedCurv: Shoham et al., Overcoming Forgetting in Federated Learning on Non-IID Data, 2019.

    min_w  L_i(w) + lambda sum_{j != i} (w - w_j)^T diag(I_j) (w - w_j)

with w_j the other clients' final models of the last round and I_j the Fisher information of each on its own data:
parameters that are important to other clients stay near those clients' values. As its authors propose, two sums are
sent,

    U = sum_j I_j,   V = sum_j I_j w_j,   and the gradient is 2 lambda (U_i w - V_i),

U_i and V_i being the sums without the client's own part, which it stores and subtracts. The sums are those of the last
round's clients: a client that did not take part in it, by the stored round number, subtracts nothing.

I_j is the empirical Fisher information (with the true labels), a mean over examples. Models are averaged by examples,
as in FedAvg; in the sums all clients count the same, as in the paper. The other models are one round old, so that even
with one step a round the fixed point differs from the optimum by examples by the order of lambda lr. Local momentum
needs no correction: the term is the gradient of a penalty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.tensor_rows import Rows, length


@dataclass(frozen=True)
class FedCurv(Algorithm):
    """Differs from FedAvg: parameters important to other clients are held near their values. Neutral at lam 0."""

    when: ClassVar[str] = "clients forget each other's classes, and three times the traffic is acceptable"
    look_passes: ClassVar[float] = 3.0  # the gradient of each example, once a round

    lam: Number = setting(
        1.0, "weight of the penalty", "ours: the paper tunes it; 0.01 to 10 do not hurt on digits", search=(0.01, 10.0)
    )

    def neutral(self) -> FedCurv:
        return replace(self, lam=0.0)

    def server_memory(self, w: Tensor) -> Rows:
        return {"curvature": torch.zeros_like(w), "weighted": torch.zeros_like(w)}

    def client_memory(self, w: Tensor) -> Rows:
        return {**self.server_memory(w), "until": torch.zeros_like(w[:, :1])}

    def send_down(self, w: Tensor, server: Server) -> Rows:
        return server.memory

    def begin(self, w: Tensor, client: Client) -> Rows:
        in_last_round = client.memory["until"] == client.round
        others = {
            name: client.down[name] - torch.where(in_last_round, client.memory[name], 0)
            for name in ("curvature", "weighted")
        }
        # U w - V, split into U (w - anchor) and a vector that is constant during the round.
        return {"anchor": w, "curvature": others["curvature"], "pull": others["curvature"] * w - others["weighted"]}

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": 2 * self.lam * client.notes["curvature"], "pull": 2 * self.lam}

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        assert client.probe is not None
        up, _ = super().finish(w, client)
        fisher = client.probe.fisher(w)
        parts = {"curvature": fisher, "weighted": fisher * w}
        return up | parts, parts | {"until": client.round + 1}

    def diagnostics(self, w: Tensor, client: Client) -> Rows:
        """The length of the drift, and of the penalty's gradient at the client's final model."""
        penalty = self.steer(torch.zeros_like(w), w, client)
        return super().diagnostics(w, client) | {"penalty_gradient": length(penalty)}

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        new, _ = super().aggregate(w, up, share, server)
        return new, {name: up[name].sum(0, keepdim=True) for name in ("curvature", "weighted")}
