"""FedSAM and MoFedSAM: Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.

    g   = grad L_i(w_i) on the step's batch
    g'  = grad L_i(w_i + rho g / |g|) on the same batch
    FedSAM:    w_i <- w_i - lr g'
    MoFedSAM:  w_i <- w_i - lr (alpha g' + (1 - alpha) pace),     pace <- sum_i p_i (w - w_i) / (K_i lr)

Each client minimises the largest loss within rho of its model instead of the loss itself, to first order. A step has
two forward and two backward passes. MoFedSAM is FedCM with g' as the client's gradient; the pace is sent with the
model.

The paper weights clients equally; here they count by their examples. Both gradients are of the same batch with the same
dropout masks; the recorded training loss and the statistics of normalisation layers are those of the first pass. Weight
decay acts at w_i and is not part of g, as in FL-Simulator; clipping is of g' alone. Where g is
zero, the second gradient is taken at w_i. FedSAM needs no correction for local momentum; MoFedSAM's is FedCM's
(`fedcm.py`): the pace is divided by the effective number of steps. alpha multiplies the whole step, weight decay
included, as in FedCM. The fixed points are FedAvg's and FedCM's, displaced by the order of rho.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.algorithms.fedcm import FedCM
from fedgg.core.algorithm import Algorithm, Client, Number, setting
from fedgg.core.tensor_rows import length

TWO_PASSES = 3.0  # one forward pass more, and one backward pass, which counts as two


def uphill(grad: Tensor, rho: Number) -> Tensor:
    """rho g / |g|; zero where the gradient is."""
    size = length(grad)
    return rho * torch.where(size > 0, grad / torch.where(size > 0, size, 1), 0)


@dataclass(frozen=True)
class FedSAM(Algorithm):
    """Differs from FedAvg: local steps are of sharpness-aware minimisation. Neutral at rho 0."""

    when: ClassVar[str] = "flat minima, no state and no extra traffic; twice the arithmetic"
    step_passes: ClassVar[float] = TWO_PASSES

    rho: Number = setting(0.1, "how far uphill the second gradient is taken", "FL-Simulator: 0.1", search=(1e-3, 1.0))

    def neutral(self) -> FedSAM:
        return replace(self, rho=0.0)

    def second_displacement(self, grad: Tensor, w: Tensor, client: Client) -> Tensor:
        return uphill(grad, self.rho)


@dataclass(frozen=True)
class MoFedSAM(FedCM):
    """Differs from FedAvg: steps of sharpness-aware minimisation, mixed with the last global update."""

    when: ClassVar[str] = "few of many clients take part in a round; twice the arithmetic, 1.5 times the traffic"
    step_passes: ClassVar[float] = TWO_PASSES

    rho: Number = setting(0.1, "how far uphill the second gradient is taken", "FL-Simulator: 0.1", search=(1e-3, 1.0))

    def neutral(self) -> MoFedSAM:
        return replace(self, alpha=1.0, rho=0.0)

    def second_displacement(self, grad: Tensor, w: Tensor, client: Client) -> Tensor:
        return uphill(grad, self.rho)
