"""FedGG: Wu, Liu and Xue, Global Update Guided Federated Learning, CCC 2022, Algorithm 1.

    min_{w_i}  L_sup(w_i) + lambda (1 - cos(w^r - w^{r-1}, w_i - w^r))                        (Eq. 6 and 7)
    lambda = mu |w_i(m-1) - w^r| |w_i(m-1) - w_i(m-2)|, a constant in the differentiation     (Eq. 10)

With u = w_i - w^r, g the last global update, hats for unit vectors and c = <g^, u^>, the gradient is

    grad L_sup - (lambda / |u|) (g^ - c u^)

so that under the adaptive weight |u| cancels, and nothing is divided by a small number. Each possible reading of an
ambiguous or contradictory passage of the paper is a named setting; docs/readings.md describes them. Clients count by
their examples, as in the paper; at the fixed point the last global update is zero, and the point is FedAvg's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, setting
from fedgg.core.tensor_rows import Rows, dot, length, weighted_sum

EPSILON = 1e-8  # the floor under both lengths in torch.nn.functional.cosine_similarity


@dataclass(frozen=True)
class FedGG(Algorithm):
    """Differs from FedAvg: gradients turn the drift towards the last global update. Neutral at mu 0 without a push."""

    when: ClassVar[str] = "labels are skewed and traffic is expensive: clients store a model, no extra traffic"

    mu: Number = setting(
        0.01, "factor of the adaptive weight (Eq. 10)", "paper, Sec. 4.2: best of 0.001 to 1", search=(1e-3, 1.0)
    )
    lam: Number = setting(5e-8, "the fixed weight lambda, used when weight is fixed", "paper, Sec. 4.4: the best")
    weight: Literal["adaptive", "fixed"] = setting("adaptive", "which of the two weights", "paper: adaptive")
    gradient: Literal["exact", "printed"] = setting(
        "exact", "exact: of Eq. 6; printed: + c u^ as Eq. 9 and 11 print it", "Algorithm 1: gradient of l_cos"
    )
    first_step: Literal["skip", "epsilon", "push", "relative_push"] = setting(
        "skip",
        "at u = 0. skip: no term; epsilon: PyTorch's clamped cosine (fixed weight only); push: move the client by "
        "`push` along g^; relative_push: move it by `push` times the mean update of the rounds that g covers",
        "Algorithm 1: m > 1",
    )
    push: Number = setting(
        0.3, "length of the two pushes: how far they move a client over the round, momentum included", "ours"
    )
    push_decay: Number = setting(1.0, "factor on the push after every round", "ours: 1, a constant push")
    scope: Literal["model", "layer"] = setting("model", "one cosine for the model, or one for each layer", "Eq. 5")
    direction: Literal["received", "sent"] = setting(
        "received",
        "received: a client subtracts the last model it received (no bytes); sent: the server sends the direction",
        "paper, Sec. 3.3",
    )

    def neutral(self) -> FedGG:
        return replace(self, mu=0.0, lam=0.0, push=0.0)

    def needs_sgd(self) -> str:
        is_push = self.first_step in ("push", "relative_push")
        return f"first_step = {self.first_step!r} sets the length of SGD's first step" if is_push else ""

    def server_memory(self, w: Tensor) -> Rows:
        return {"update": torch.zeros_like(w)} if self.direction == "sent" else {}

    def client_memory(self, w: Tensor) -> Rows:
        if self.direction == "sent":
            return {}
        received = {"received": w}  # in a client's first round g = 0, so no term
        return {**received, "round": torch.zeros_like(w[:, :1])} if self.first_step == "relative_push" else received

    def send_down(self, w: Tensor, server: Server) -> Rows:
        return {"update": server.memory["update"]} if self.direction == "sent" else {}

    def begin(self, w: Tensor, client: Client) -> Rows:
        update = self._last_update(w, client)
        reach = (dot(update, update) if self.scope == "model" else client.net.layout.layer_dot(update, update)).sqrt()
        notes = {"anchor": w, "direction": update * self._inverse(reach)}
        return {**notes, "reach": reach / self._rounds(client)} if self.first_step == "relative_push" else notes

    def terms(self, client: Client) -> dict[str, Number]:
        by_layer = self.scope == "layer"
        inverse_drift = self._inverse(client.inner("drift", "drift", by_layer=by_layer).sqrt())
        cosine = client.inner("direction", "drift", by_layer=by_layer) * inverse_drift
        # pull: lambda / |u|, the length of the term; in the first step, where u = 0, as `first_step` says
        if self.weight == "adaptive":
            pull = self.mu * client.inner("step", "step", by_layer=by_layer).sqrt()
        else:
            pull = self.lam * inverse_drift
        if self.first_step == "skip":
            pull = torch.where(client.step == 0, torch.zeros_like(client.lr), pull)
        elif self.first_step != "epsilon":
            # A gradient of length 1 at the first step moves a client by lr / (1 - b) until momentum has died away.
            push = self.push * self.push_decay**client.round * (1 - client.momentum) / client.lr
            if self.first_step == "relative_push":
                push = push * client.notes["reach"]
            pull = torch.where(client.step == 0, push, pull)
        turn = pull * cosine * inverse_drift
        return {"direction": -pull, "drift": -turn if self.gradient == "printed" else turn}

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        anchor = client.notes["anchor"]
        keeps: Rows = {} if self.direction == "sent" else {"received": anchor}
        if "round" in client.memory:
            keeps["round"] = client.round.clone()
        return {"delta": w - anchor}, keeps

    def diagnostics(self, w: Tensor, client: Client) -> Rows:
        """After the last local step: c, lambda, |u| and the last step's length.

        Of the whole model, also with `scope = "layer"`: c is the cosine of the drift and the last global update.
        """
        drift = client.inner("drift", "drift").sqrt()
        if self.scope == "model":
            along, reach = client.inner("direction", "drift"), client.inner("direction", "direction").sqrt()
        else:  # each layer of the note `direction` has length 1, so the whole vector is not parallel to g
            update = self._last_update(client.notes["anchor"], client)
            along, reach = dot(update, client.vector("drift")), length(update)
        cosine = along / (drift * reach).clamp_min(torch.finfo(w.dtype).tiny)
        last_move = client.inner("step", "step").sqrt()
        weight = self.mu * drift * last_move if self.weight == "adaptive" else self.lam + 0 * drift
        return {"cosine": cosine, "weight": weight, "drift": drift, "step": last_move}

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        new = w + weighted_sum(share, up["delta"])
        return new, {"update": server.lr * (new - w)} if self.direction == "sent" else server.memory

    def _last_update(self, anchor: Tensor, client: Client) -> Tensor:
        """g, the last global update: received, or computed from the model received before."""
        return client.down["update"] if self.direction == "sent" else anchor - client.memory["received"]

    def _rounds(self, client: Client) -> Number:
        """How many rounds g covers: computed from the model received before, those since the client took part."""
        if "round" not in client.memory:  # direction sent, or a run that an earlier version began
            return 1.0
        return (client.round - client.memory["round"]).clamp_min(1)

    def _inverse(self, distance: Tensor) -> Tensor:
        """1 / distance; at zero PyTorch's 1 / epsilon under `first_step = "epsilon"`, otherwise 0."""
        if self.first_step == "epsilon":
            return 1 / distance.clamp_min(EPSILON)
        return torch.where(distance > 0, 1 / distance, 0)
