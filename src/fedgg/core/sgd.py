"""The local optimiser on rows: stochastic gradient descent with momentum and weight decay, as in PyTorch.

    v <- b v + gradient + weight_decay w
    w <- w - lr v

Momentum starts at zero in every round: a client is a fresh optimiser each time it is called, as in the paper's setting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SGD:
    lr: Tensor  # [K, 1]
    momentum: Tensor  # [K, 1]
    weight_decay: Tensor  # [K, 1]
    has_momentum: bool  # known outside the tensors, so that plain SGD does not pay for a velocity
    has_decay: bool

    @classmethod
    def of(cls, lr: float, momentum: float, weight_decay: float, like: Tensor) -> SGD:
        """The same setting for all rows of `like`."""

        def column(value: float) -> Tensor:
            return torch.full_like(like[:, :1], value)

        return cls(column(lr), column(momentum), column(weight_decay), momentum != 0, weight_decay != 0)

    def move(self, grad: Tensor, w: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """The step `w_new - w` and the new velocity.

        Weight decay is added last, as in the fused step (`engines.fused`): whichever of the two trains an algorithm at
        its neutral setting, the sum is rounded in the same order and has FedAvg's bits.
        """
        velocity = self.momentum * velocity + grad if self.has_momentum else grad
        if self.has_decay:
            velocity = velocity + self.weight_decay * w
        return -self.lr * velocity, velocity

    def effective_steps(self, steps: Tensor) -> Tensor:
        """How many plain steps `steps` steps with momentum are worth under a constant gradient, `[K, 1]`.

        a_K = sum over m = 1..K of (1 - b^m)/(1 - b) = (K - b (1 - b^K)/(1 - b))/(1 - b); K itself for b = 0.
        """
        b, k = self.momentum, steps.to(self.momentum.dtype)
        return (k - b * (1 - b**k) / (1 - b)) / (1 - b)


def learning_rate(lr: float, decay: float, round_: int) -> float:
    """The local learning rate of a round, counted from zero."""
    return lr * decay**round_
