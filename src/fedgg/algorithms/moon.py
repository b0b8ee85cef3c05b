"""MOON: Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021, Eq. 3 and Alg. 1.

    min_w  L_i(w) + mu l_con
    l_con = -log( e^{s(z, z_glob) / tau} / (e^{s(z, z_glob) / tau} + e^{s(z, z_prev) / tau}) )

for every example, with s the cosine, z its representation in the model being trained, z_glob in the global model as
received, z_prev in the client's final model of its previous round: representations are drawn to the global model's and
away from those of the previous model. With hats for unit vectors that is one inner product,

    l_con = softplus(-<z^, z_glob^ - z_prev^> / tau),

whose gradient is zero if the two agree, as in a client's first round, when the previous model is the received one.

The representation is the input of the model's last linear layer. The paper puts a projection head of size 256 before
it, which is the models' setting `projection`. Clients are weighted by examples, as in the paper; the previous model is
one round old, so that even with one step a round the fixed point differs from the optimum by the order of mu lr. Local
momentum needs no correction: the contrast is part of the loss. If mu is too large for the step size, the move away from
the previous model overshoots, and even clients that agree are driven apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Client, Number, setting
from fedgg.core.tensor_rows import Rows


@dataclass(frozen=True)
class MOON(Algorithm):
    """Differs from FedAvg: representations are drawn to the global model's, away from its last. Neutral at mu 0."""

    when: ClassVar[str] = "deep models on skewed images; clients store a model and compute two thirds more"
    step_passes: ClassVar[float] = 2.0  # the received and the previous model, forward only
    needs_representation: ClassVar[bool] = True

    mu: Number = setting(
        1.0,
        "weight of the contrast",
        "Li et al. 2021: of 0.1 to 10 the best on CIFAR-100; 5 on CIFAR-10",
        search=(0.1, 10.0),
    )
    temperature: Number = setting(
        0.5, "tau: similarities are divided by it", "Li et al. 2021, Sec. 4.1: 0.5", positive=True
    )

    def neutral(self) -> MOON:
        return replace(self, mu=0.0)

    def client_memory(self, w: Tensor) -> Rows:
        return {"previous": w}

    def loss(self, w: Tensor, batch: Batch, client: Client) -> Tensor:
        outputs, representation = client.net.seen(w, batch.x)
        with torch.no_grad():
            received = _unit(client.net.representation(client.notes["anchor"], batch.x))
            previous = _unit(client.net.representation(client.memory["previous"], batch.x))
        similarity = (_unit(representation) * (received - previous)).sum(2)
        contrast = F.softplus(-similarity / self.temperature) * batch.mask
        mean = contrast.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp_min(1)
        return client.net.mean_loss(outputs, batch.y, batch.mask) + self.mu * mean

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, _ = super().finish(w, client)
        return up, {"previous": w}


def _unit(z: Tensor) -> Tensor:
    """z / |z|; 0 for a representation of zeros, which has no direction."""
    size = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return torch.where(size > 0, z / torch.where(size > 0, size, 1), 0)
