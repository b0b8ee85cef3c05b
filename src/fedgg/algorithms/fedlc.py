"""FedLC: Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022.

    min_w  cross entropy of f_c(x) - tau n_c^{-1/4},   n_c the client's number of examples of class c

The fewer examples of a class a client holds, the more its output is lowered in training, so that the model has to make
up for it by a margin: rare classes are not drowned by frequent ones. Evaluation uses the outputs as they are. Counting
labels is all that a client does more.

The paper writes the margin in pairs, tau (n_y^{-1/4} - n_c^{-1/4}); here the loss is the usual cross entropy of the
calibrated outputs, whose sum over classes includes the example's own, as in FL-bench, which this follows. There a class
the client does not hold counts as 1e-8 examples, so that its output is lowered by 100 tau and is practically left out.
Clients count by their examples. Local momentum needs no correction: the margin is part of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Client, Number, setting
from fedgg.core.tensor_rows import Rows

NONE = 1e-8  # examples, in place of none


@dataclass(frozen=True)
class FedLC(Algorithm):
    """Differs from FedAvg: in training, outputs are lowered for classes the client has few of. Neutral at tau 0."""

    when: ClassVar[str] = "labels are skewed: clients lack classes; no cost"
    needs_classes: ClassVar[bool] = True

    tau: Number = setting(1.0, "size of the margins", "FL-bench: 1", search=(0.1, 2.0))

    def neutral(self) -> FedLC:
        return replace(self, tau=0.0)

    def begin(self, w: Tensor, client: Client) -> Rows:
        assert client.probe is not None
        return {"anchor": w, "margins": client.probe.class_counts(w).clamp_min(NONE) ** -0.25}

    def loss(self, w: Tensor, batch: Batch, client: Client) -> Tensor:
        margins = (self.tau * client.notes["margins"])[:, None]
        return client.net.mean_loss(client.net(w, batch.x) - margins, batch.y, batch.mask)
