"""FedWMSAM: Li et al., A Fast and Flat Federated Learning Method via Weighted Momentum and Sharpness-Aware
Minimization, NeurIPS 2025 (arXiv 2511.22080).

In the b-th local step (b = 0, 1, ...) of a client that received w, with m the last global update as a gradient and c,
c_i the control variates of SCAFFOLD:

    m_i  = m + alpha / (1 - alpha) (c - c_i)
    d    = rho (w + b m_i - w_i) / |w + b m_i - w_i|                     towards where m_i leads, seen from w_i
    w_i <- w_i - lr (alpha grad L_i(w_i + d) + (1 - alpha) m_i)
    m   <- sum_i p_i (w - w_i) / (K_i lr)
    c_i <- c_i - c + (w - w_i) / (K_i lr)
    c   <- c + (the mean, over all clients, of the change of c_i)
    alpha <- (1 - adapt) alpha + adapt min(0.9, max(0.1, sum_i p_i (1 + cos(w_i - w, m))))

An update that follows the momentum has a cosine of -1 with m, which is a gradient: alpha then stays small, and momentum
leads; updates that disagree with it raise alpha, and the clients' own gradients lead. alpha is updated after the round,
with the m of that round; in the first round, where m is zero, the sum counts as zero. One backward pass a step.

The mean change of c_i is m minus c for the clients of the round, so that clients need not send it: they send the update
and its number of steps times lr. The server sends m, c and alpha, and clients store c_i.

The equations of d, m_i and the step are those the authors print in the README of their repository; the rule for alpha
with its constants, and the updates of m and c, are those of their code. That code moves against d, downhill, and reads
single entries of the flat vector w + b m_i - w_i where it means the part of a parameter; here d is the printed one. Its
b m_i is a gradient added to a model, without the learning rate; so it is here. Choices of ours: clients count by their
examples in all means; weight decay is part of the client's gradient, inside alpha, as in FedCM; with local momentum,
updates are divided by the effective number of steps as in FedCM and SCAFFOLD; each client is divided by its own number.
`correction` multiplies c - c_i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.tensor_rows import Rows, dot, length, weighted_sum

LEAST, MOST = 0.1, 0.9  # of the value that alpha moves to


@dataclass(frozen=True)
class FedWMSAM(Algorithm):
    """Differs from FedAvg: personal momentum of adaptive weight, and gradients taken towards where it leads."""

    when: ClassVar[str] = "few of many skewed clients, flat minima with one backward pass; twice the traffic"

    rho: Number = setting(
        0.1,
        "how far from the model gradients are taken",
        "the authors' code: 0.1; their best: 0.01",
        search=(1e-3, 1.0),
    )
    alpha: Number = setting(
        0.1,
        "share of the client's gradient in the first round, above 0",
        "the authors' code: 0.1",
        positive=True,
        search=(0.05, 0.5),
    )
    adapt: Number = setting(0.01, "how fast alpha follows the cosine; 0: constant", "the authors' code: 0.01")
    correction: Number = setting(1.0, "weight of the control variates", "Li et al. 2025: 1")

    def neutral(self) -> FedWMSAM:
        return replace(self, rho=0.0, alpha=1.0, adapt=0.0, correction=0.0)

    def server_memory(self, w: Tensor) -> Rows:
        zero = torch.zeros_like(w)
        return {"momentum": zero, "variate": zero, "alpha": self.alpha + zero[:, :1]}

    def client_memory(self, w: Tensor) -> Rows:
        return {"variate": torch.zeros_like(w)}

    def send_down(self, w: Tensor, server: Server) -> Rows:
        return {name: server.memory[name] for name in ("momentum", "variate", "alpha")}

    def begin(self, w: Tensor, client: Client) -> Rows:
        """`pull`: m_i (1 - alpha) / alpha, which is finite at alpha 1."""
        alpha, momentum = client.down["alpha"], client.down["momentum"]
        correction = self.correction * (client.down["variate"] - client.memory["variate"])
        pull = (1 - alpha) / alpha * momentum + correction
        leading = momentum + torch.where(alpha < 1, alpha / (1 - alpha), 0) * correction
        return {"anchor": w, "alpha": alpha, "pull": pull, "momentum": leading}

    def displacement(self, client: Client) -> dict[str, Number]:
        b = client.step
        squares = b * b * client.inner("momentum", "momentum") + client.inner("drift", "drift")
        size = (squares - 2 * b * client.inner("drift", "momentum")).clamp_min(0).sqrt()
        factor = torch.where(size > 0, self.rho / torch.where(size > 0, size, 1), 0)
        return {"momentum": factor * b, "drift": -factor}

    def terms(self, client: Client) -> dict[str, Number]:
        return {"pull": 1.0}  # `nudge` multiplies the sum by alpha

    def nudge(self, move: Tensor, w: Tensor, client: Client) -> Tensor:
        return client.notes["alpha"] * move

    def needs_sgd(self) -> str:
        return "momentum and variates are updates divided by SGD's effective steps times lr"

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, memory = super().finish(w, client)
        reach = client.effective_steps * client.lr
        variate = memory["variate"] - client.down["variate"] - up["delta"] / reach
        return up | {"reach": reach}, {"variate": variate}

    def diagnostics(self, w: Tensor, client: Client) -> Rows:
        return super().diagnostics(w, client) | {"alpha": client.notes["alpha"]}

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        new, _ = super().aggregate(w, up, share, server)
        old, variate, alpha = (server.memory[name] for name in ("momentum", "variate", "alpha"))
        momentum = -weighted_sum(share, up["delta"] / up["reach"])
        lengths = length(up["delta"]) * length(old)
        cosine = dot(up["delta"], old) / torch.where(lengths > 0, lengths, 1)
        disagreement = weighted_sum(share, torch.where(lengths > 0, 1 + cosine, 0))
        return new, {
            "momentum": momentum,
            "variate": variate + server.coverage * (momentum - variate),
            "alpha": (1 - self.adapt) * alpha + self.adapt * disagreement.clamp(LEAST, MOST),
        }
