"""FedAvgM: Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution, 2019.

The server treats the average update as a gradient and gives it momentum; clients count by their examples:

    v <- beta v + delta
    w <- w + lr v
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Number, Server, setting
from fedgg.core.tensor_rows import Rows, weighted_sum


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """Differs from FedAvg: the server's step has momentum. Neutral at momentum 0, server_lr 1."""

    when: ClassVar[str] = "few clients a round, so that updates vary from round to round; no extra traffic"

    momentum: Number = setting(
        0.9, "server momentum beta", "Hsu et al. 2019, Sec. 4.3: the setting shown throughout", search=(0.5, 0.99)
    )
    server_lr: Number = setting(1.0, "server learning rate", "Hsu et al. 2019: 1", search=(0.1, 2.0))

    def neutral(self) -> FedAvgM:
        return replace(self, momentum=0.0, server_lr=1.0)

    def server_memory(self, w: Tensor) -> Rows:
        return {"velocity": torch.zeros_like(w)}

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        delta = weighted_sum(share, up["delta"])
        velocity = self.momentum * server.memory["velocity"] + delta
        return w + self.server_lr * velocity, {"velocity": velocity}
