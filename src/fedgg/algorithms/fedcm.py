"""FedCM: Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021, Algorithm 2.

    w_i <- w_i - lr (alpha grad + (1 - alpha) pace)                      K local steps
    pace <- sum_i p_i (w - w_i) / (K_i lr)                               the last global update, as a gradient

The pace is sent with the model and is zero in the first round. Clients keep nothing and need not come back.

It is FedGG's closest relative: both make the last global update act on every local step. FedGG turns the client's drift
towards it (a cosine: the direction counts, not the length, and a drift that already follows is left alone), and a
client can work the direction out from the model it received before. FedCM adds it whatever the client does, with its
full length, and takes the client's own gradient back by as much. Sent it has to be: a client that was away for r rounds
would find r updates in the difference of two models, and with (1 - alpha) r above 1 the clients' pace feeds itself.

The paper weighs clients the same; here they count by their examples, as in everything the library averages. It knows no
local momentum either: with momentum b a pace is divided by what K steps are worth (a_K, `client.effective_steps`)
instead of K, so that a constant gradient is its own pace. Divided by K it would come back a_K / K (up to 10 for b =
0.9) times as long each round, and diverge. alpha is applied to the step, so that weight decay is part of the client's
gradient, as in the paper.

At rest, where clients take equally many steps, the pace is zero, and the fixed point is FedAvg's with alpha times the
learning rate: nearer the optimum by examples. Where they take different numbers, which the paper does not have, each is
divided by its own, so that the pace at rest is the mean gradient by examples, whoever stepped more: for small steps the
model rests where alpha of FedAvg's pull (by examples times steps) and 1 - alpha of the pull by examples cancel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.client_rows import Rows, weighted_sum


@dataclass(frozen=True)
class FedCM(Algorithm):
    """Differs from FedAvg: local gradients are mixed with the last global update. Neutral at alpha 1."""

    when: ClassVar[str] = "few of many clients a round, and they keep nothing; half as much again travels"

    alpha: Number = setting(0.1, "share of the client's own gradient, above 0", "Xu et al. 2021: 0.1", positive=True)

    def neutral(self) -> FedCM:
        return replace(self, alpha=1.0)

    def server_memory(self, w: Tensor) -> Rows:
        return {"pace": torch.zeros_like(w)}

    def send_down(self, w: Tensor, server: Server) -> Rows:
        return {"pace": server.memory["pace"]}

    def begin(self, w: Tensor, client: Client) -> Rows:
        return {"anchor": w, "pace": client.down["pace"]}

    def terms(self, client: Client) -> dict[str, Number]:
        return {"pace": (1 - self.alpha) / self.alpha}  # `nudge` takes alpha of the whole

    def nudge(self, move: Tensor, w: Tensor, client: Client) -> Tensor:
        return self.alpha * move

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, memory = super().finish(w, client)
        return up | {"reach": client.effective_steps * client.lr}, memory

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        new, _ = super().aggregate(w, up, share, server)
        return new, {"pace": -weighted_sum(share, up["delta"] / up["reach"])}
