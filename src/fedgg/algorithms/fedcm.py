"""FedCM: Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021, Algorithm 2.

    w_i <- w_i - lr (alpha grad + (1 - alpha) pace)                      K local steps
    pace <- sum_i p_i (w - w_i) / (K_i lr)                               the last global update, as a gradient

The pace is sent with the model and is zero in the first round. There is no client state.

FedCM is close to FedGG: in both, the last global update acts on every local step. FedGG turns the client's drift
towards it (through a cosine: its length has no effect, and neither has the term on a drift that already points that
way), and a client can compute the direction from the model it received before. FedCM always adds the full update and
scales the client's own gradient down by the same share. The update has to be sent: for a client that was absent for r
rounds, the difference of two received models would hold r updates, and with (1 - alpha) r above 1 the pace would grow.

The paper weights clients equally; here they count by their examples, as in all averages of the library. The paper does
not treat local momentum: with momentum b the pace is divided by the effective number of steps (a_K,
`client.effective_steps`) instead of K, so that a constant gradient is its own pace. Divided by K it would return a_K /
K (up to 10 for b = 0.9) times as long each round, and diverge.

alpha is applied to the step, so that weight decay is part of the client's gradient, as the gradient of a regularised
objective is. A pace that no longer changes is then grad + decay w. FL-Simulator, whose values papers print, adds weight
decay to the mixture, after clipping it: its pace is grad + decay / alpha w. Its decay and clip_norm divided by alpha
are the same steps here (`tests/unit/algorithms/test_fedcm.py`).

If all clients take the same number of steps, the pace is zero at the fixed point, which is FedAvg's with alpha times
the learning rate: nearer the optimum by examples. With different numbers, which the paper does not treat, each update
is divided by its own number, so that the pace at the fixed point is the mean gradient by examples, independent of the
numbers: for small steps, alpha times FedAvg's pull (by examples times steps) and 1 - alpha times the pull by examples
cancel there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.tensor_rows import Rows, weighted_sum


@dataclass(frozen=True)
class FedCM(Algorithm):
    """Differs from FedAvg: local gradients are mixed with the last global update. Neutral at alpha 1."""

    when: ClassVar[str] = "few of many clients take part in a round; no client state, 1.5 times the traffic"

    alpha: Number = setting(
        0.1, "share of the client's gradient, above 0", "Xu et al. 2021: 0.1", positive=True, search=(0.05, 0.5)
    )

    def neutral(self) -> FedCM:
        return replace(self, alpha=1.0)

    def server_memory(self, w: Tensor) -> Rows:
        return {"pace": torch.zeros_like(w)}

    def send_down(self, w: Tensor, server: Server) -> Rows:
        return {"pace": server.memory["pace"]}

    def begin(self, w: Tensor, client: Client) -> Rows:
        return {"anchor": w, "pace": client.down["pace"]}

    def terms(self, client: Client) -> dict[str, Number]:
        return {"pace": (1 - self.alpha) / self.alpha}  # `nudge` multiplies the sum by alpha

    def nudge(self, move: Tensor, w: Tensor, client: Client) -> Tensor:
        return self.alpha * move

    def needs_sgd(self) -> str:
        return "the server divides updates by SGD's effective steps times lr"

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, memory = super().finish(w, client)
        return up | {"reach": client.effective_steps * client.lr}, memory

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        new, _ = super().aggregate(w, up, share, server)
        return new, {"pace": -weighted_sum(share, up["delta"] / up["reach"])}
