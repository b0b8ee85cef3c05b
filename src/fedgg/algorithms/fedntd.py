"""FedNTD: Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS
2022.

    min_w  L_i(w) + beta tau^2 KL(q_global || q_local)

for every example, with q the softmax of the outputs divided by tau over all classes but the example's own. What the
global model, as received, says of the other classes is kept; the example's own class is left to the supervised loss. It
costs a forward pass of the received model in every step; nothing more is sent or stored.

The received model runs in evaluation mode. Clients count by their examples, as in the authors' code. Local momentum
needs no correction: the distillation is part of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Client, Number, setting


@dataclass(frozen=True)
class FedNTD(Algorithm):
    """Differs from FedAvg: outputs for an example's other classes stay near the global model's. Neutral at beta 0."""

    when: ClassVar[str] = "labels are skewed and clients forget classes they lack; one third more arithmetic"
    step_passes: ClassVar[float] = 1.0  # the received model, forward only
    needs_classes: ClassVar[bool] = True

    beta: Number = setting(1.0, "weight of the distillation", "the authors' code: 1", search=(0.1, 10.0))
    tau: Number = setting(1.0, "temperature: outputs are divided by it", "the authors' code: 1", positive=True)

    def neutral(self) -> FedNTD:
        return replace(self, beta=0.0)

    def loss(self, w: Tensor, batch: Batch, client: Client) -> Tensor:
        outputs = client.net(w, batch.x)
        with torch.no_grad():
            received = client.net.quiet(client.notes["anchor"], batch.x)
        tau = self.tau[..., None] if isinstance(self.tau, Tensor) else self.tau
        local, others = (_of_others(each / tau, batch.y) for each in (outputs, received))
        divergence = (others.exp() * (others - local)).sum(2) * batch.mask
        mean = divergence.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp_min(1)
        return client.net.mean_loss(outputs, batch.y, batch.mask) + self.beta * self.tau**2 * mean


def _of_others(outputs: Tensor, y: Tensor) -> Tensor:
    """Logarithms of the softmax over the classes that are not the example's own, `[K, B, classes - 1]`."""
    classes = outputs.shape[2]
    others = torch.arange(classes - 1, device=y.device).expand(*y.shape, classes - 1)
    others = others + (others >= y[..., None])  # all classes but y, in their order
    return outputs.gather(2, others).log_softmax(2)
