"""Local optimisers on rows, as in `torch.optim`: SGD, Adam, AdamW; and schedules of their learning rate.

An optimiser is a frozen dataclass whose numeric settings are columns `[K, 1]`. Its state (SGD's velocity, Adam's
moments) is a dict of rows, new in every round unless clients keep it (`optimiser.state`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedgg.core.tensor_rows import Rows, length
from fedgg.older_python import Self
from fedgg.registry import Registry

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Optimiser:
    """The base of local optimisers. Subclasses add settings as fields, and override `start` and `move`.

    `lr`, `weight_decay` and `momentum` are keys of `[local]`; others are keys of `[optimiser]`, with `defaults`.
    """

    defaults: ClassVar[Mapping[str, float]] = {}
    # The least value of a setting, and the value that it must stay below.
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    # Values with which a setting has no effect.
    without_effect: ClassVar[Mapping[str, float]] = {"momentum": 0.0, "weight_decay": 0.0, "clip_norm": math.inf}

    lr: Tensor
    momentum: Tensor  # of SGD; zero for optimisers that have none
    weight_decay: Tensor
    clip_norm: Tensor  # the longest gradient; infinity: no clipping
    used: frozenset[str]  # settings that have an effect on some row: known without reading tensors

    @classmethod
    def on_rows(cls, settings: Sequence[Mapping[str, float]], like: Tensor) -> Self:
        """One row for each of `settings`; a single one is for all rows of `like`."""
        names = [field.name for field in fields(cls) if field.name != "used"]
        columns = {
            name: torch.tensor([each[name] for each in settings], dtype=like.dtype, device=like.device)[:, None]
            for name in names
        }
        if len(settings) == 1:
            columns = {name: column.expand(len(like), 1).clone() for name, column in columns.items()}
        neutral = cls.without_effect
        used = {name for name in names for each in settings if each[name] != neutral.get(name)}
        return cls(**columns, used=frozenset(used))

    def start(self, w: Tensor) -> Rows:
        """The state before the first step."""
        return {}

    def move(self, grad: Tensor, w: Tensor, state: Rows) -> tuple[Tensor, Rows]:
        """The step `w_new - w` and the new state."""
        raise NotImplementedError

    def clipped(self, grad: Tensor) -> Tensor:
        """The gradient, scaled down to the length `clip_norm` where it is longer."""
        return grad * (self.clip_norm / (length(grad) + CLIP_EPSILON)).clamp_max(1.0)

    def effective_steps(self, steps: Tensor) -> Tensor:
        """How many plain steps `steps` steps are worth under a constant gradient, `[K, 1]`."""
        return steps.to(self.lr.dtype)


@dataclass(frozen=True)
class SGD(Optimiser):
    """Stochastic gradient descent with momentum and weight decay.

    v <- b v + gradient + weight_decay w
    w <- w - lr v
    """

    @classmethod
    def of(cls, lr: float, momentum: float, weight_decay: float, like: Tensor) -> SGD:
        """The same settings for all rows of `like`, without clipping."""
        return cls.on_rows([sgd(lr, momentum, weight_decay).values], like)

    def start(self, w: Tensor) -> Rows:
        return {"velocity": torch.zeros_like(w)}

    def move(self, grad: Tensor, w: Tensor, state: Rows) -> tuple[Tensor, Rows]:
        """Weight decay is added last, as in the fused step (`engines.fused`): whichever of the two trains an algorithm
        at its neutral setting, the sum is rounded in the same order and has FedAvg's bits.
        """
        velocity = self.momentum * state["velocity"] + grad if "momentum" in self.used else grad
        if "weight_decay" in self.used:
            velocity = velocity + self.weight_decay * w
        return -self.lr * velocity, {"velocity": velocity}

    def effective_steps(self, steps: Tensor) -> Tensor:
        """a_K = sum over m = 1..K of (1 - b^m)/(1 - b) = (K - b (1 - b^K)/(1 - b))/(1 - b); K itself for b = 0."""
        b, k = self.momentum, steps.to(self.momentum.dtype)
        return (k - b * (1 - b**k) / (1 - b)) / (1 - b)


@dataclass(frozen=True)
class Adam(Optimiser):
    """Adam (Kingma and Ba, ICLR 2015); weight decay is added to the gradient.

    m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2
    w <- w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
    """

    defaults: ClassVar[Mapping[str, float]] = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}  # as in torch.optim
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "beta1": (0.0, 1.0),
        "beta2": (0.0, 1.0),
        "epsilon": (1e-30, math.inf),
    }
    decoupled: ClassVar[bool] = False  # whether weight decay acts on the weights instead of the gradient

    beta1: Tensor = field(metadata={"about": "decay of the mean of gradients"})
    beta2: Tensor = field(metadata={"about": "decay of the mean of squared gradients"})
    epsilon: Tensor = field(metadata={"about": "added to the root of the mean square"})

    def start(self, w: Tensor) -> Rows:
        return {"first": torch.zeros_like(w), "second": torch.zeros_like(w), "count": w.new_zeros(len(w), 1)}

    def move(self, grad: Tensor, w: Tensor, state: Rows) -> tuple[Tensor, Rows]:
        decays = "weight_decay" in self.used
        if decays and not self.decoupled:
            grad = grad + self.weight_decay * w
        count = state["count"] + 1
        first = self.beta1 * state["first"] + (1 - self.beta1) * grad
        second = self.beta2 * state["second"] + (1 - self.beta2) * grad.square()
        scale = (second / (1 - self.beta2**count)).sqrt() + self.epsilon
        move = -self.lr * (first / (1 - self.beta1**count)) / scale
        if decays and self.decoupled:
            move = move - self.lr * self.weight_decay * w
        return move, {"first": first, "second": second, "count": count}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019): w <- w - lr weight_decay w, then Adam."""

    decoupled: ClassVar[bool] = True


OPTIMISERS: Registry[type[Optimiser]] = Registry(
    "client optimiser", {"sgd": SGD, "adam": Adam, "adamw": AdamW}, code="CLASS"
)


@dataclass(frozen=True)
class OptimiserSettings:
    """The local optimiser of a round: its class and its numeric settings by name."""

    kind: type[Optimiser]
    values: Mapping[str, float]
    kept: bool = False  # whether clients keep its state between rounds


def sgd(lr: float, momentum: float, weight_decay: float) -> OptimiserSettings:
    values = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "clip_norm": math.inf}
    return OptimiserSettings(SGD, values)


KEPT = "optimiser."  # begins the names of an optimiser's state among the rows that a client keeps


def with_kept_state(memory: Rows, state: Rows) -> Rows:
    """Client state together with the optimiser's."""
    return memory | {f"{KEPT}{name}": rows for name, rows in state.items()}


def kept_state(memory: Rows) -> tuple[Rows, Rows]:
    """The client state of the algorithm, and that of the optimiser, empty where it is not kept."""
    state = {name.removeprefix(KEPT): rows for name, rows in memory.items() if name.startswith(KEPT)}
    return {name: rows for name, rows in memory.items() if not name.startswith(KEPT)}, state


# Learning-rate schedules: factors on `local.lr` or `server.lr`, by round, counted from 0 -----------------------------

LastFactor = Annotated[float, "the factor after the last round"]


def constant(round_: int) -> float:
    """The same learning rate in every round."""
    return 1.0


def exponential(round_: int, lr_decay: float = 1.0) -> float:
    """Multiplied by lr_decay after every round."""
    return lr_decay**round_


def step(round_: int, lr_decay: float = 1.0, every: Annotated[int, "rounds between two decays"] = 10) -> float:
    """Multiplied by lr_decay after every `every` rounds."""
    return lr_decay ** (round_ // every)


def cosine(round_: int, rounds: int, end: LastFactor = 0.0) -> float:
    """Half a cosine over all rounds, from 1 to `end`."""
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * round_ / rounds))


def linear(round_: int, rounds: int, end: LastFactor = 0.0) -> float:
    """A straight line over all rounds, from 1 to `end`."""
    return 1 - (1 - end) * round_ / rounds


SCHEDULES: Registry[Callable[..., float]] = Registry(
    "learning-rate schedule",
    {"exponential": exponential, "constant": constant, "step": step, "cosine": cosine, "linear": linear},
    code="FUNCTION",
)
