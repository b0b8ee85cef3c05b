"""FedExP: Jhunjhunwala, Wang and Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023.

    w <- w + step delta,    delta = sum_i p_i delta_i
    step = max(1, sum_i p_i |delta_i|^2 / (2 (|delta|^2 + epsilon)))

Updates of clients that disagree partly cancel in the mean; the more they do, the larger the server's step along the
mean. Only the lengths of updates are used, so local momentum needs no correction. The paper weights clients equally;
here they count by their examples, in the mean and in the lengths.

epsilon is a squared length and limits extrapolation: the step is at most max(1, half the mean |delta_i|^2 / epsilon).
If the clients' optima differ, updates cancel completely at FedAvg's fixed point while their lengths do not vanish:
without this floor the step would grow without bound, and the model oscillates. The paper therefore also shows the mean
of the last two models; here the model itself is evaluated. An epsilon well below the clients' |delta_i|^2 is for models
that can fit all clients at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedgg.core.algorithm import Algorithm, Number, Server, setting
from fedgg.core.tensor_rows import Rows, dot, weighted_sum


@dataclass(frozen=True)
class FedExP(Algorithm):
    """Differs from FedAvg: the server extrapolates the mean update if updates cancel. Neutral at infinite epsilon."""

    when: ClassVar[str] = "the model can fit all clients at once and rounds are expensive; no extra traffic"

    epsilon: Number = setting(
        1e-3,
        "floor under the mean update's squared length",
        "the authors' code: 0.001 for CIFAR, 0.1 for EMNIST",
        positive=True,
        may_be_infinite=True,
        search=(1e-4, 0.1),
    )

    def neutral(self) -> FedExP:
        return replace(self, epsilon=float("inf"))

    def fixes_server_step(self) -> str:
        return "it computes the length of the server's step in every round"

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        delta = weighted_sum(share, up["delta"])
        lengths = weighted_sum(share, dot(up["delta"], up["delta"]))
        step = (lengths / (2 * (dot(delta, delta) + self.epsilon))).clamp_min(1)
        return w + step * delta, server.memory
