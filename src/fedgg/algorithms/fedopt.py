"""FedAdam, FedYogi, FedAdagrad: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2.

The server treats the average update delta as a gradient and gives every parameter its own step size:

    m <- beta1 m + (1 - beta1) delta
    v <- v + delta^2                                        FedAdagrad
    v <- v - (1 - beta2) delta^2 sign(v - delta^2)          FedYogi
    v <- beta2 v + (1 - beta2) delta^2                      FedAdam
    w <- w + server_lr m / (sqrt(v) + tau)

m starts at zero, v at tau^2, and v takes the squares of delta, as Adam does (versions of the paper differ in whether
they are delta's or m's). There is no bias correction, as in the paper: the first steps are short while m fills.
Squares, roots and signs are taken parameter by parameter.

Clients are weighted by their examples, as in the paper's experiments. Local training is FedAvg's, momentum included: it
lengthens updates, and the division by sqrt(v) removes that. A parameter moves by about server_lr a round, independent
of the updates' length, so server_lr has to be tuned for the model. The fixed point is FedAvg's; near it the step is
server_lr / tau times delta, and if that is too long the model oscillates.

They are FedAvg if v keeps its initial value (beta2 1; for FedAdagrad, a tau so large that squares are rounded away), m
is delta (beta1 0) and server_lr is 2 tau, by which it is divided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Number, Server, setting
from fedgg.core.tensor_rows import Rows, weighted_sum

BETA1 = "Reddi et al. 2021, Sec. 5: 0.9 for Adam and Yogi, 0 for Adagrad"
BETA2 = "Reddi et al. 2021, Sec. 5: 0.99"
TAU = "Reddi et al. 2021, Sec. 5: 1e-3, for all of its tasks"
SERVER_LR = "Reddi et al. 2021, appendix: the best for CIFAR-10; tune it for other tasks"


@dataclass(frozen=True)
class FedAdam(Algorithm):
    """Differs from FedAvg: the server's step is Adam's."""

    when: ClassVar[str] = "parameters need very different step sizes (embeddings, rare classes); tune server_lr"

    server_lr: Number = setting(0.01, "server learning rate", SERVER_LR, search=(1e-3, 1.0))
    beta1: Number = setting(0.9, "decay rate of the server's mean of updates", BETA1)
    beta2: Number = setting(0.99, "decay rate of the server's mean of squared updates", BETA2)
    tau: Number = setting(1e-3, "adaptivity: added to the root of v", TAU, positive=True, search=(1e-5, 0.1))

    def neutral(self) -> FedAdam:
        return replace(self, server_lr=2.0, beta1=0.0, beta2=1.0, tau=1.0)

    def server_memory(self, w: Tensor) -> Rows:
        return _initial_memory(w, self.tau)

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        delta = weighted_sum(share, up["delta"])
        squares = self.beta2 * server.memory["squares"] + (1 - self.beta2) * delta.square()
        return _step(self, w, delta, squares, server)


@dataclass(frozen=True)
class FedYogi(Algorithm):
    """Differs from FedAvg: the server's step is Yogi's: Adam's, with a v that decreases more slowly."""

    when: ClassVar[str] = "as FedAdam, if large updates are rare: its step size recovers more slowly after one"

    server_lr: Number = setting(0.01, "server learning rate", SERVER_LR, search=(1e-3, 1.0))
    beta1: Number = setting(0.9, "decay rate of the server's mean of updates", BETA1)
    beta2: Number = setting(0.99, "1 - beta2 is the rate at which v follows the squared updates", BETA2)
    tau: Number = setting(1e-3, "adaptivity: added to the root of v", TAU, positive=True, search=(1e-5, 0.1))

    def neutral(self) -> FedYogi:
        return replace(self, server_lr=2.0, beta1=0.0, beta2=1.0, tau=1.0)

    def server_memory(self, w: Tensor) -> Rows:
        return _initial_memory(w, self.tau)

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        delta, v = weighted_sum(share, up["delta"]), server.memory["squares"]
        squares = v - (1 - self.beta2) * delta.square() * (v - delta.square()).sign()
        return _step(self, w, delta, squares, server)


@dataclass(frozen=True)
class FedAdagrad(Algorithm):
    """Differs from FedAvg: the server's step is Adagrad's, whose step sizes never grow."""

    when: ClassVar[str] = "some parameters are rarely updated (sparse inputs), training is short; tune server_lr"

    server_lr: Number = setting(0.1, "server learning rate", SERVER_LR, search=(1e-3, 1.0))
    beta1: Number = setting(0.0, "decay rate of the server's mean of updates", BETA1)
    tau: Number = setting(1e-3, "adaptivity: added to the root of v", TAU, positive=True, search=(1e-5, 0.1))

    def neutral(self) -> FedAdagrad:
        return replace(self, server_lr=2.0**51, beta1=0.0, tau=2.0**50)

    def server_memory(self, w: Tensor) -> Rows:
        return _initial_memory(w, self.tau)

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        delta = weighted_sum(share, up["delta"])
        squares = server.memory["squares"] + delta.square()
        return _step(self, w, delta, squares, server)


def _initial_memory(w: Tensor, tau: Number) -> Rows:
    return {"momentum": torch.zeros_like(w), "squares": torch.zeros_like(w) + tau**2}


def _step(
    algorithm: FedAdam | FedYogi | FedAdagrad, w: Tensor, delta: Tensor, squares: Tensor, server: Server
) -> tuple[Tensor, Rows]:
    momentum = algorithm.beta1 * server.memory["momentum"] + (1 - algorithm.beta1) * delta
    new = w + algorithm.server_lr * momentum / (squares.sqrt() + algorithm.tau)
    return new, {"momentum": momentum, "squares": squares}
