"""FedSpeed: Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy,
ICLR 2023.

    g   = grad L_i(w_i) on the step's batch
    g'  = grad L_i(w_i + rho g / |g|) on the same batch
    w_i <- w_i - lr (g' + alpha (w_i - w) + alpha s_i)          s_i the sum of the client's earlier updates
    w   <- (the mean of this round's w_i) + s                   s the mean, over all clients, of s_i

A proximal term, its correction by the client's past updates, and the gradient of sharpness-aware minimisation. With one
over alpha as the paper's lambda and -alpha s_i as its correction, that is FedDyn's rule (`feddyn.py`) with g' as the
client's gradient, and this class is FedDyn with a second gradient. A step has two forward and two backward passes; as
in FedDyn nothing more is sent, and a client stores s_i.

The paper mixes the two gradients; as in FL-Simulator, the second one alone is taken, and s is the mean over all
clients. Which mean it is, local momentum and weight decay are treated as in FedDyn and FedSAM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedgg.algorithms.feddyn import FedDyn
from fedgg.algorithms.fedsam import TWO_PASSES, uphill
from fedgg.core.algorithm import Client, Number, setting


@dataclass(frozen=True)
class FedSpeed(FedDyn):
    """Differs from FedAvg: FedDyn's correction of each client's drift, with sharpness-aware gradients."""

    when: ClassVar[str] = "the same clients take part often; flat minima; twice the arithmetic, no extra traffic"
    step_passes: ClassVar[float] = TWO_PASSES

    alpha: Number = setting(
        0.1,
        "weight of the proximal term, one over the paper's lambda",
        "FL-Simulator: 0.1",
        positive=True,
        search=(1e-3, 1.0),
    )
    rho: Number = setting(0.1, "how far uphill the second gradient is taken", "FL-Simulator: 0.1", search=(1e-3, 1.0))

    def second_displacement(self, grad: Tensor, w: Tensor, client: Client) -> Tensor:
        return uphill(grad, self.rho)
