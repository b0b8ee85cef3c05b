"""FedCL: Yao and Sun, Continual Local Training for Better Initialization of Federated Models, ICIP 2020.

    min_w  L_i(w) + (lambda / 2) sum_k F_k (w_k - w^r_k)^2

elastic weight consolidation: a client may move far in parameters that do not matter to the global model, and little in
those that do. How much each matters, F, is the Fisher information of the global model, measured by the server in every
round on a small proxy set of its own and sent down with the model. The proxy set is `data.proxy` examples taken out of
the clients' split, never of the test set. The 1/2 is that of elastic weight consolidation.

F is the diagonal of the empirical Fisher information (labels as they are), a mean over the proxy set. Clients are
weighted by examples, as FedAvg's. Local momentum needs no care: the term is the gradient of a penalty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.client_rows import Rows, length


@dataclass(frozen=True)
class FedCL(Algorithm):
    """Differs from FedAvg: parameters that matter to the global model are held near it. Neutral at lam 0."""

    when: ClassVar[str] = "the server has a few examples of its own (data.proxy) and clients keep nothing"
    needs_proxy: ClassVar[bool] = True

    lam: Number = setting(1.0, "weight of the penalty", "ours: the paper tunes it; of 0.1 to 100 on digits none hurts")

    def neutral(self) -> FedCL:
        return replace(self, lam=0.0)

    def send_down(self, w: Tensor, server: Server) -> Rows:
        assert server.probe is not None
        return {"fisher": server.probe.fisher(w)}

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": self.lam * client.down["fisher"]}

    def diagnostics(self, w: Tensor, client: Client) -> Rows:
        """How far the client went, and the length of the penalty's gradient where it ended."""
        penalty = self.steer(torch.zeros_like(w), w, client)
        return super().diagnostics(w, client) | {"penalty_gradient": length(penalty)}
