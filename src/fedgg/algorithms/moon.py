"""MOON: Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021, Eq. 3 and Alg. 1.

    min_w  L_i(w) + mu l_con
    l_con = -log( e^{s(z, z_glob) / tau} / (e^{s(z, z_glob) / tau} + e^{s(z, z_prev) / tau}) )

for every example, with s the cosine, z its representation in the model being trained, z_glob in the global model as
received, z_prev in the model this client ended its last round with: representations are drawn to the global model's and
away from the client's own old ones. With hats for unit vectors that is one inner product,

    l_con = softplus(-<z^, z_glob^ - z_prev^> / tau),

which has no gradient where the two agree, as at a first meeting: the previous model is then the one received.

The representation is what goes into the model's last linear layer. The paper puts a projection head of 256 there, which
is the models' own setting `projection`. Clients are weighted by examples, as the paper does; the previous model is a
round old, which keeps it off the optimum by something of the order of mu lr, even at one step a round. Local momentum
needs no care: the contrast is a part of the loss. Where mu is large for the step, fleeing one's own last model
overshoots: even clients that agree are then driven apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Client, Number, setting
from fedgg.core.client_rows import Rows


@dataclass(frozen=True)
class MOON(Algorithm):
    """Differs from FedAvg: representations are drawn to the global model's, away from its last. Neutral at mu 0."""

    when: ClassVar[str] = "deep models on skewed images; clients keep a model and compute two thirds more"
    step_passes: ClassVar[float] = 2.0  # the received and the previous model, forward only
    needs_representation: ClassVar[bool] = True

    mu: Number = setting(
        1.0, "weight of the contrast", "Li et al. 2021: of 0.1 to 10 the best on CIFAR-100; 5 on CIFAR-10"
    )
    temperature: Number = setting(
        0.5, "tau: how sharply similarities are told apart", "Li et al. 2021, Sec. 4.1: 0.5", positive=True
    )

    def neutral(self) -> MOON:
        return replace(self, mu=0.0)

    def client_memory(self, w: Tensor) -> Rows:
        return {"previous": w}

    def loss(self, w: Tensor, batch: Batch, client: Client) -> Tensor:
        outputs, here = client.net.seen(w, batch.x)
        with torch.no_grad():
            received = _unit(client.net.representation(client.notes["anchor"], batch.x))
            previous = _unit(client.net.representation(client.memory["previous"], batch.x))
        nearer = (_unit(here) * (received - previous)).sum(2)
        contrast = F.softplus(-nearer / self.temperature) * batch.mask
        mean = contrast.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp_min(1)
        return client.net.mean_loss(outputs, batch.y, batch.mask) + self.mu * mean

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, _ = super().finish(w, client)
        return up, {"previous": w}


def _unit(z: Tensor) -> Tensor:
    """z / |z|; a representation of zeros has no direction, and no part in the contrast."""
    size = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return torch.where(size > 0, z / torch.where(size > 0, size, 1), 0)
