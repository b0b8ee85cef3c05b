"""SCAFFOLD: Karimireddy et al., Stochastic Controlled Averaging for Federated Learning, ICML 2020, Alg. 1, Option II.

    w_i <- w_i - lr (grad + c - c_i)                    K local steps
    c_i+ = c_i - c + (w - w_i) / (K lr)
    c   <- c + the mean, over all clients, of c_i+ - c_i (zero for those that did not take part)

The paper does not treat local momentum. With momentum b there are three variants, all equal at b = 0:

plain   the correction is added to the gradient, the variate divides by K: diverges for b > 0.5;
exact   the correction is added to the gradient, the variate divides by the effective number of K steps with momentum
        (a_K): a constant gradient is recovered exactly, and quadratics end at their optimum;
after   the correction is applied after the optimiser's step, outside momentum, and the variate divides by K, as in
        widely used benchmark code; biased on quadratics.

The server's variate is a mean over clients, and which mean decides which problem is solved: `share` weights clients by
their examples, as the models are; `uniform` counts every client the same, as the paper prints it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number, Server, Weighing, setting
from fedgg.core.tensor_rows import Rows, weighted_sum

SMALL, SAFE = 0.06, 0.1  # shares of the mean number of examples, as measured: docs/decisions/0003-scaffold-default.md


@dataclass(frozen=True)
class SCAFFOLD(Algorithm):
    """Differs from FedAvg: client and server keep a variate (an estimated gradient); local steps add c - c_i."""

    when: ClassVar[str] = "the same clients take part often and can store a model; twice the traffic"

    correction: Literal["plain", "exact", "after"] = setting(
        "exact",
        "how the correction is combined with local momentum",
        "measured: docs/decisions/0003-scaffold-default.md",
    )
    variate_mean: Literal["share", "uniform"] = setting(
        "share", "which mean the server's variate is", "the same weights as the models' mean; the paper: uniform"
    )

    def solves(self) -> Weighing:
        return "examples" if self.variate_mean == "share" else "clients"

    def server_memory(self, w: Tensor) -> Rows:
        return {"variate": torch.zeros_like(w)}

    def client_memory(self, w: Tensor) -> Rows:
        return {"variate": torch.zeros_like(w)}

    def send_down(self, w: Tensor, server: Server) -> Rows:
        return {"variate": server.memory["variate"]}

    def begin(self, w: Tensor, client: Client) -> Rows:
        return {"anchor": w, "correction": client.down["variate"] - client.memory["variate"]}

    def terms(self, client: Client) -> dict[str, Number]:
        return {} if self.correction == "after" else {"correction": 1.0}

    def needs_sgd(self) -> str:
        return "control variates are gradients, estimated as an update divided by SGD's steps times lr"

    def warning(self, examples: Sequence[int]) -> str:
        smallest, mean = min(filter(None, examples)), sum(examples) / len(examples)
        if smallest >= SMALL * mean:
            return ""
        return (
            f"the smallest client holds {smallest} examples, less than {SMALL:.0%} of the mean: such clients diverged "
            f"in 2 of 20 runs on CIFAR-10 and destroyed the global model (docs/decisions/0003-scaffold-default.md); "
            f"split.min_examples = {math.ceil(SAFE * mean)} draws a split without them"
        )

    def nudge(self, move: Tensor, w: Tensor, client: Client) -> Tensor:
        return move - client.lr * client.notes["correction"] if self.correction == "after" else move

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        delta = w - client.notes["anchor"]
        steps = client.effective_steps if self.correction == "exact" else client.steps
        change = -client.down["variate"] - delta / (steps * client.lr)
        return {"delta": delta, "variate_change": change}, {"variate": client.memory["variate"] + change}

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        w, memory = super().aggregate(w, up, share, server)
        weights = (
            share * server.coverage if self.variate_mean == "share" else torch.full_like(share, 1 / server.clients)
        )
        change = weighted_sum(weights, up["variate_change"])
        return w, {"variate": memory["variate"] + change}
