"""GHBM and FedHBM: Zaccone et al., Communication-Efficient Heterogeneous Federated Learning with Generalized Heavy-Ball
Momentum, TMLR 2025 (arXiv 2311.18578).

    GHBM:    w_i <- w_i - lr grad L_i(w_i) + (beta / K) (w - w_old) / tau        w_old the global model tau rounds ago
    FedHBM:  w_i <- w_i - lr grad L_i(w_i) + (beta / K) (w_i - v_i) / tau        v_i the client's own last local model

Momentum as the mean of the last tau global updates instead of the last one: with tau as many rounds as it takes until
most clients have taken part, it is not biased to the clients of the last round. Over a round's K steps a client moves
by beta times that mean. GHBM's server keeps tau models and sends the momentum; FedHBM's client uses the model it ended
its previous round with, and nothing more is sent. (The paper's LocalGHBM, with the model a client received before in
place of v_i, is not implemented.)

As in the authors' code, GHBM has no momentum in the first tau rounds, FedHBM none in a client's first, and FedHBM
divides by the expected number of rounds between two participations, one over the share of clients in a round; here that
is the setting tau of both. The paper weights clients equally; here they count by their examples. It does not treat
local momentum: with momentum b, K is the effective number of steps, so that a round moves by beta times the mean update
and not by up to 1 / (1 - b) times more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.tensor_rows import Rows

SGD_ONLY = "the momentum is divided by SGD's effective steps times lr"


@dataclass(frozen=True)
class GHBM(Algorithm):
    """Differs from FedAvg: local steps add the mean of the last tau global updates. Neutral at beta 0."""

    when: ClassVar[str] = "few of many clients take part in a round; no client state, 1.5 times the traffic"
    needs_steps: ClassVar[bool] = True

    beta: Number = setting(
        0.9, "momentum: how much of the mean update a round adds", "the authors' code", search=(0.3, 1.0)
    )
    tau: int = setting(
        10,
        "rounds over which updates are averaged",
        "Zaccone et al. 2025: one over the share of clients",
        positive=True,
    )

    def neutral(self) -> GHBM:
        return replace(self, beta=0.0)

    def server_memory(self, w: Tensor) -> Rows:
        return {"models": w[:, None].expand(-1, self.tau, -1).clone()}  # of the last tau rounds, the newest first

    def send_down(self, w: Tensor, server: Server) -> Rows:
        mean = (w - server.memory["models"][:, -1]) / self.tau
        return {"momentum": mean if server.round >= self.tau else torch.zeros_like(w)}

    def begin(self, w: Tensor, client: Client) -> Rows:
        return {"anchor": w, "momentum": client.down["momentum"]}

    def terms(self, client: Client) -> dict[str, Number]:
        return {"momentum": -self.beta / (client.effective_steps * client.lr)}

    def needs_sgd(self) -> str:
        return SGD_ONLY

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        new, _ = super().aggregate(w, up, share, server)
        return new, {"models": torch.cat([w[:, None], server.memory["models"][:, :-1]], 1)}


@dataclass(frozen=True)
class FedHBM(Algorithm):
    """Differs from FedAvg: local steps move on from the client's own last local model. Neutral at beta 0."""

    when: ClassVar[str] = "clients return often enough and can store a model; no extra traffic"
    needs_steps: ClassVar[bool] = True

    beta: Number = setting(
        1.0, "momentum: how much of the mean update a round adds", "the authors' code", search=(0.3, 1.0)
    )
    tau: Number = setting(
        10.0,
        "rounds between two participations of a client",
        "Zaccone et al. 2025: one over the share of clients",
        positive=True,
    )

    def neutral(self) -> FedHBM:
        return replace(self, beta=0.0)

    def client_memory(self, w: Tensor) -> Rows:
        return {"last": w, "returns": torch.zeros_like(w[:, :1])}  # returns: 0 in a client's first round, then 1

    def begin(self, w: Tensor, client: Client) -> Rows:
        return {"anchor": w, "since": w - client.memory["last"], "returns": client.memory["returns"]}

    def terms(self, client: Client) -> dict[str, Number]:
        """w_i - v_i is what the global model has moved since the client's last model, and its drift."""
        factor = -client.notes["returns"] * self.beta / (self.tau * client.effective_steps * client.lr)
        return {"since": factor, "drift": factor}

    def needs_sgd(self) -> str:
        return SGD_ONLY

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, memory = super().finish(w, client)
        return up, {"last": w, "returns": torch.ones_like(memory["returns"])}
