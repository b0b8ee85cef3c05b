"""FedExP: Jhunjhunwala, Wang and Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023.

    w <- w + step delta,    delta = sum_i p_i delta_i
    step = max(1, sum_i p_i |delta_i|^2 / (2 (|delta|^2 + epsilon)))

Clients that disagree have updates that cancel in the mean; the more they do, the further the server goes along what is
left. What it reads of the updates are their lengths, so local momentum is nothing to it. The paper writes equal
clients; here they count by their examples, in the mean and in the lengths.

epsilon is a squared length and sets where extrapolation ends: the step is never longer than half the mean |delta_i|^2 /
epsilon. Where clients' optima differ, updates cancel altogether at FedAvg's fixed point while their lengths stay: there
the step grows without this floor, and the model circles. The paper therefore also shows the mean of the last two
models. Ours shows the model itself; epsilon well below the clients' |delta_i|^2 is for models that can fit all clients
at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedgg.core.algorithm import Algorithm, Number, Server, setting
from fedgg.core.client_rows import Rows, dot, weighted_sum


@dataclass(frozen=True)
class FedExP(Algorithm):
    """Differs from FedAvg: the server goes beyond the mean update where updates cancel. Neutral at infinite epsilon."""

    when: ClassVar[str] = "the model can fit all clients at once and rounds are dear; nothing more travels"

    epsilon: Number = setting(
        1e-3,
        "floor under the mean update's squared length",
        "the authors' code: 0.001 for CIFAR, 0.1 for EMNIST",
        positive=True,
        may_be_infinite=True,
    )

    def neutral(self) -> FedExP:
        return replace(self, epsilon=float("inf"))

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        delta = weighted_sum(share, up["delta"])
        lengths = weighted_sum(share, dot(up["delta"], up["delta"]))
        step = (lengths / (2 * (dot(delta, delta) + self.epsilon))).clamp_min(1)
        return w + step * delta, server.memory
