"""FedCurv: Shoham et al., Overcoming Forgetting in Federated Learning on Non-IID Data, 2019.

    min_w  L_i(w) + lambda sum_{j != i} (w - w_j)^T diag(I_j) (w - w_j)

with w_j the models the other clients ended the last round with and I_j the Fisher information of each on its own data:
parameters that matter to others stay near what others made of them. As its authors propose, only two sums travel,

    U = sum_j I_j,   V = sum_j I_j w_j,   and the gradient is 2 lambda (U_i w - V_i),

U_i and V_i being the sums without the client's own part, which it keeps and subtracts. The sums are those of the last
round's clients: who was not among them has nothing to subtract, and knows it by the number of the round.

I_j is the empirical Fisher information (labels as they are), a mean over examples. Models are averaged by examples, as
FedAvg's; in the sums every client counts the same, as the paper has it. The others' models are a round old, which keeps
it off the optimum by examples by something of the order of lambda lr, even at one step a round. Local momentum needs no
care: the term is the gradient of a penalty, and goes the way of the loss's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.client_rows import Rows, length


@dataclass(frozen=True)
class FedCurv(Algorithm):
    """Differs from FedAvg: parameters that matter to other clients are held near those clients'. Neutral at lam 0."""

    when: ClassVar[str] = "clients forget each other's classes, and three times the traffic can be paid"
    look_passes: ClassVar[float] = 3.0  # the gradient of each example, once a round

    lam: Number = setting(1.0, "weight of the penalty", "ours: the paper tunes it; of 0.01 to 10 on digits none hurts")

    def neutral(self) -> FedCurv:
        return replace(self, lam=0.0)

    def server_memory(self, w: Tensor) -> Rows:
        return {"curvature": torch.zeros_like(w), "weighted": torch.zeros_like(w)}

    def client_memory(self, w: Tensor) -> Rows:
        return {**self.server_memory(w), "until": torch.zeros_like(w[:, :1])}

    def send_down(self, w: Tensor, server: Server) -> Rows:
        return server.memory

    def begin(self, w: Tensor, client: Client) -> Rows:
        inside = client.memory["until"] == client.round
        others = {
            name: client.down[name] - torch.where(inside, client.memory[name], 0) for name in ("curvature", "weighted")
        }
        # U w - V, taken apart into U (w - anchor) and a vector that stays as it is during the round.
        return {"anchor": w, "curvature": others["curvature"], "pull": others["curvature"] * w - others["weighted"]}

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": 2 * self.lam * client.notes["curvature"], "pull": 2 * self.lam}

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        assert client.probe is not None
        up, _ = super().finish(w, client)
        fisher = client.probe.fisher(w)
        own = {"curvature": fisher, "weighted": fisher * w}
        return up | own, own | {"until": client.round + 1}

    def diagnostics(self, w: Tensor, client: Client) -> Rows:
        """How far the client went, and the length of the penalty's gradient where it ended."""
        penalty = self.steer(torch.zeros_like(w), w, client)
        return super().diagnostics(w, client) | {"penalty_gradient": length(penalty)}

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        new, _ = super().aggregate(w, up, share, server)
        return new, {name: up[name].sum(0, keepdim=True) for name in ("curvature", "weighted")}
