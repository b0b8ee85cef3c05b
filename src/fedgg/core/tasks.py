"""Tasks: the targets of examples, and the loss of a model's outputs against them, one number for each example.

classification  targets [N], the numbers of classes; cross entropy of the outputs [N, classes].
multilabel      targets [N, labels] of 0 and 1; binary cross entropy of the outputs [N, labels], the mean over labels.
regression      targets [N] or [N, values], floating point; squared error of the outputs, the mean over values.
next_token      targets [N, T], the tokens after those of the input; cross entropy of the outputs [N, T, tokens], the
                mean over the tokens of an example that are not padding.

The loss of a batch is the mean over its examples, in which each counts by its weight: 1, or with `next_token` its
number of tokens, so that every token counts the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgg.errors import UserError
from fedgg.registry import Registry

Criterion = Callable[[Tensor, Tensor], Tensor]  # outputs [N, ...], targets [N, ...] -> loss of each example [N]
Targets = Literal["classes", "tokens", "labels", "values", "any"]

cross_entropy: Criterion = partial(F.cross_entropy, reduction="none")


@dataclass(frozen=True)
class Task:
    """Interface: `losses`, the loss of each example; where these differ, `weights` and `scored` too."""

    targets: ClassVar[Targets] = "any"
    metrics: ClassVar[tuple[str, ...]] = ("loss",)  # the default ones, the primary one first
    examples_differ: ClassVar[bool] = False  # whether examples have weights, and rows to be scored, of their own

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of outputs `[N, ...]` and targets `[N, ...]`: the loss of each example, `[N]`."""
        raise NotImplementedError

    def weights(self, targets: Tensor) -> Tensor:
        """How much each example counts, `[N]`."""
        return torch.ones(len(targets), device=targets.device)

    def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets as metrics are given them, one row for everything that counts."""
        return outputs, targets

    def output_shape(self, targets: Tensor, outputs: int) -> tuple[int, ...] | None:
        """The shape that a model's outputs must have, given the number of outputs; None: any."""
        return None

    def predictions(self, outputs: Tensor) -> Tensor:
        """What outputs say in the terms of the targets."""
        return outputs

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Probabilities from the outputs of the model, for tasks that have them."""
        what = "a loss of one's own" if type(self) is Task else f"the task {type(self).__name__.lower()}"
        raise UserError(f"{what} has no probabilities: take output='logits'")


@dataclass(frozen=True)
class Classification(Task):
    """One class for each example, as a number; cross entropy."""

    targets = "classes"
    metrics = ("accuracy",)
    losses = staticmethod(cross_entropy)  # type: ignore[assignment]  # engines recognise this very function

    def output_shape(self, targets: Tensor, outputs: int) -> tuple[int, ...]:
        return (len(targets), outputs)

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)


@dataclass(frozen=True)
class MultiLabel(Task):
    """Any number of labels for each example, as 0 and 1 `[N, labels]`; binary cross entropy, the mean over labels."""

    targets = "labels"
    metrics = ("f1", "label_accuracy")

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
        return each.flatten(1).mean(1)

    def output_shape(self, targets: Tensor, outputs: int) -> tuple[int, ...]:
        return tuple(targets.shape)

    def predictions(self, outputs: Tensor) -> Tensor:
        return (outputs > 0).long()

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()


@dataclass(frozen=True)
class Regression(Task):
    """Floating point targets `[N]` or `[N, values]`; squared error, the mean over values."""

    targets = "values"
    metrics = ("rmse", "mae")

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.reshape(targets.shape) - targets).square().reshape(len(targets), -1).mean(1)

    def output_shape(self, targets: Tensor, outputs: int) -> tuple[int, ...]:
        return (len(targets), 1) if targets.ndim == 1 else tuple(targets.shape)

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(-1)


@dataclass(frozen=True)
class NextToken(Task):
    """The next token at every place of a sequence, `[N, T]`; cross entropy, the mean over tokens that are not padding.

    Negative targets are padding (as -100 in PyTorch), and so is the token `padding`, where one is named.
    """

    targets = "tokens"
    metrics = ("accuracy", "perplexity")
    examples_differ = True

    padding: int = field(default=-100, metadata={"about": "the token that is padding, beside negative ones"})

    def counts(self, targets: Tensor) -> Tensor:
        """Which targets are not padding."""
        return (targets >= 0) & (targets != self.padding)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        counts = self.counts(targets)
        each = cross_entropy(outputs.flatten(0, -2), targets.clamp_min(0).flatten()).view(targets.shape)
        return torch.where(counts, each, 0).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp_min(1)

    def weights(self, targets: Tensor) -> Tensor:
        return self.counts(targets).flatten(1).sum(1)

    def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counts = self.counts(targets)
        return outputs[counts], targets[counts]

    def output_shape(self, targets: Tensor, outputs: int) -> tuple[int, ...]:
        return (*targets.shape, outputs)

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)


@dataclass(frozen=True)
class OwnLoss(Task):
    """A function of the user's: outputs `[N, ...]` and targets `[N, ...]` to the loss of each example, `[N]`.

    Everything else is that of `task`, where the function takes the place of the loss of a task.
    """

    function: Criterion
    task: Task = Task()
    targets: Targets = field(init=False)  # type: ignore[misc]
    metrics: tuple[str, ...] = field(init=False)  # type: ignore[misc]
    examples_differ: bool = field(init=False)  # type: ignore[misc]

    def __post_init__(self) -> None:
        for name in ("targets", "metrics", "examples_differ"):
            object.__setattr__(self, name, getattr(self.task, name))

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.function(outputs, targets)

    def weights(self, targets: Tensor) -> Tensor:
        return self.task.weights(targets)

    def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.task.scored(outputs, targets)

    def output_shape(self, targets: Tensor, outputs: int) -> tuple[int, ...] | None:
        return self.task.output_shape(targets, outputs)

    def predictions(self, outputs: Tensor) -> Tensor:
        return self.task.predictions(outputs)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return self.task.probabilities(outputs)


CLASSIFICATION = Classification()
TASKS: Registry[type[Task]] = Registry(
    "task",
    {"classification": Classification, "multilabel": MultiLabel, "regression": Regression, "next_token": NextToken},
    code="FUNCTION",
)


def task_name(task: Task) -> str:
    """For messages: the registered name, or that of the function that is the loss."""
    if isinstance(task, OwnLoss):
        return f"with the loss {getattr(task.function, '__name__', 'handed in')}"
    return next((name for name, kind in TASKS.items() if kind is type(task)), type(task).__name__)
