"""FedCL: Yao and Sun, Continual Local Training for Better Initialization of Federated Models, ICIP 2020.

    min_w  L_i(w) + (lambda / 2) sum_k F_k (w_k - w^r_k)^2

Elastic weight consolidation: a client may move far in parameters that are unimportant to the global model, and little
in important ones. The importance F is the Fisher information of the global model, measured by the server in every round
on its own small proxy set and sent with the model. The proxy set is `data.proxy` training examples that no client
holds. The 1/2 is that of elastic weight consolidation.

F is the diagonal of the empirical Fisher information (with the true labels), a mean over the proxy set. Clients are
weighted by examples, as in FedAvg. Local momentum needs no correction: the term is the gradient of a penalty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.tensor_rows import Rows, length


@dataclass(frozen=True)
class FedCL(Algorithm):
    """Differs from FedAvg: parameters important to the global model are held near it. Neutral at lam 0."""

    when: ClassVar[str] = "the server has a few examples of its own (data.proxy); no client state"
    needs_proxy: ClassVar[bool] = True

    lam: Number = setting(
        1.0, "weight of the penalty", "ours: the paper tunes it; 0.1 to 100 do not hurt on digits", search=(0.1, 100.0)
    )

    def neutral(self) -> FedCL:
        return replace(self, lam=0.0)

    def send_down(self, w: Tensor, server: Server) -> Rows:
        assert server.probe is not None
        return {"fisher": server.probe.fisher(w)}

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": self.lam * client.down["fisher"]}

    def diagnostics(self, w: Tensor, client: Client) -> Rows:
        """The length of the drift, and of the penalty's gradient at the client's final model."""
        penalty = self.steer(torch.zeros_like(w), w, client)
        return super().diagnostics(w, client) | {"penalty_gradient": length(penalty)}
