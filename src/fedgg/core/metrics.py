"""Metrics: named sums over examples, added up chunk by chunk, and the value that they make.

Sums are in double precision and added in the order of the chunks, so that every engine computes the same bits. With
`next_token` an example here is a token that is not padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgg.core.tasks import Targets
from fedgg.errors import UserError
from fedgg.registry import Registry

Sums = Mapping[str, Tensor]


@dataclass(frozen=True)
class Metric:
    """Interface: `sums` of a chunk, and the `value` of all sums."""

    higher_is_better: ClassVar[bool] = True
    percent: ClassVar[bool] = False  # whether it is a share, shown times 100
    gathers: ClassVar[bool] = False  # whether the sums of chunks are concatenated instead of added
    of_classes: ClassVar[bool] = False  # whether classes have values of their own
    needs: ClassVar[tuple[Targets, ...]] = ("classes", "tokens", "labels", "values", "any")  # targets it is defined for

    name: str = ""  # by default that of the class

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        """Of outputs `[N, ...]` and targets `[N, ...]`: tensors of any shape, the same for every chunk."""
        raise NotImplementedError

    def value(self, sums: Sums) -> float:
        """NaN where it is not defined, as the recall of no examples."""
        raise NotImplementedError

    def by_class(self, sums: Sums) -> list[float]:
        """The values of the classes, where it has them."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mean(Metric):
    """The mean over examples of a function of the user's: outputs and targets to one number for each example.

    Attributes of the function may say more: `function.higher_is_better = False`, `function.percent = True`.
    """

    function: Callable[[Tensor, Tensor], Tensor] = field(default=lambda outputs, targets: outputs)

    def __post_init__(self) -> None:
        for attribute in ("higher_is_better", "percent"):
            if hasattr(self.function, attribute):
                object.__setattr__(self, attribute, bool(getattr(self.function, attribute)))

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        each = self.function(outputs, targets)
        if not isinstance(each, Tensor) or each.shape != targets.shape[:1]:
            got = list(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise UserError(
                f"the metric {self.name} returned {got} for {len(targets)} examples: return one number for each, "
                f"[{len(targets)}], of which the mean is taken"
            )
        return {"sum": each.double().sum(), "count": torch.tensor(float(len(each)), dtype=torch.float64)}

    def value(self, sums: Sums) -> float:
        return _ratio(sums["sum"], sums["count"])


class Accuracy(Metric):
    """The share of examples whose largest output is that of their class."""

    percent = True
    needs = ("classes", "tokens")
    within: ClassVar[int] = 1  # how many of the largest outputs count

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        if self.within == 1:
            right = outputs.argmax(1) == targets
        else:
            largest = outputs.topk(min(self.within, outputs.shape[1]), 1).indices
            right = (largest == targets[:, None]).any(1)
        return {"right": right.sum().double(), "count": torch.tensor(float(len(targets)), dtype=torch.float64)}

    def value(self, sums: Sums) -> float:
        return _ratio(sums["right"], sums["count"])


class Top5(Accuracy):
    """The share of examples whose class is among the five largest outputs."""

    within = 5


class LabelAccuracy(Metric):
    """The share of labels that are predicted rightly, over all examples and labels."""

    percent = True
    needs = ("labels",)

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        right = (outputs > 0) == (targets > 0)
        return {"right": right.sum().double(), "count": torch.tensor(float(right.numel()), dtype=torch.float64)}

    def value(self, sums: Sums) -> float:
        return _ratio(sums["right"], sums["count"])


class _OfClasses(Metric):
    """From how often each class (or label) is predicted, true, and both."""

    percent = True
    of_classes = True
    needs = ("classes", "tokens", "labels")

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        if targets.ndim > 1:
            predicted, true = outputs > 0, targets > 0
        else:
            classes = outputs.shape[1]
            predicted, true = F.one_hot(outputs.argmax(1), classes).bool(), F.one_hot(targets, classes).bool()
        parts = {"both": predicted & true, "predicted": predicted, "true": true}
        return {name: part.sum(0).double() for name, part in parts.items()}

    def value(self, sums: Sums) -> float:
        """The mean over the classes for which it is defined."""
        defined = [value for value in self.by_class(sums) if not math.isnan(value)]
        return math.fsum(defined) / len(defined) if defined else math.nan


class Recall(_OfClasses):
    """The share of a class's examples that are predicted as such; the mean over the classes that occur."""

    def by_class(self, sums: Sums) -> list[float]:
        return (sums["both"] / sums["true"]).tolist()  # 0 / 0 is NaN: no example has the class


class F1(_OfClasses):
    """Macro-F1: 2 both / (predicted + true) of a class; the mean over the classes that occur or are predicted."""

    def by_class(self, sums: Sums) -> list[float]:
        return (2 * sums["both"] / (sums["predicted"] + sums["true"])).tolist()


class Perplexity(Metric):
    """The exponential of the mean cross entropy."""

    higher_is_better = False
    needs = ("classes", "tokens")

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        losses = F.cross_entropy(outputs, targets, reduction="none").double()
        return {"loss": losses.sum(), "count": torch.tensor(float(len(targets)), dtype=torch.float64)}

    def value(self, sums: Sums) -> float:
        mean = _ratio(sums["loss"], sums["count"])
        return math.inf if mean >= 700 else math.exp(mean)


class RMSE(Metric):
    """The root of the mean squared error."""

    higher_is_better = False
    needs = ("values",)

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        errors = outputs.reshape(targets.shape).double() - targets.double()
        return {"squares": errors.square().sum(), "count": torch.tensor(float(errors.numel()), dtype=torch.float64)}

    def value(self, sums: Sums) -> float:
        return math.sqrt(_ratio(sums["squares"], sums["count"]))


class MAE(Metric):
    """The mean absolute error."""

    higher_is_better = False
    needs = ("values",)

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        errors = outputs.reshape(targets.shape).double() - targets.double()
        return {"errors": errors.abs().sum(), "count": torch.tensor(float(errors.numel()), dtype=torch.float64)}

    def value(self, sums: Sums) -> float:
        return _ratio(sums["errors"], sums["count"])


class AUROC(Metric):
    """Area under the ROC curve, from the scores of all examples; of more than two classes the mean of one against
    the others, over the classes for which it is defined."""

    percent = True
    gathers = True
    of_classes = True
    needs = ("classes", "labels")

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        if targets.ndim > 1:
            return {"scores": outputs.double(), "true": targets.double()}
        true = F.one_hot(targets, outputs.shape[1]).double()
        scores = outputs.double().softmax(1)
        return {"scores": scores, "true": true}

    def value(self, sums: Sums) -> float:
        values = self.by_class(sums)
        if sums["scores"].shape[1] == 2 and not (sums["true"].sum(1) != 1).any():
            return values[1]
        defined = [value for value in values if not math.isnan(value)]
        return math.fsum(defined) / len(defined) if defined else math.nan

    def by_class(self, sums: Sums) -> list[float]:
        columns = range(sums["scores"].shape[1])
        return [_area(sums["scores"][:, column], sums["true"][:, column] > 0) for column in columns]


def _area(scores: Tensor, true: Tensor) -> float:
    """The share of pairs of a true and another example in which the true one has the higher score; ties count half."""
    positives, negatives = int(true.sum()), int((~true).sum())
    if not positives or not negatives:
        return math.nan
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[places]  # equal scores have their mean rank
    return float((ranks[true].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def _ratio(total: Tensor, count: Tensor) -> float:
    return float(total) / float(count) if count else math.nan


class Loss(Metric):
    """The mean loss of the task, which is recorded with any metrics."""

    higher_is_better = False

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        return {}

    def value(self, sums: Sums) -> float:
        """Taken from the score's loss instead."""
        return math.nan


METRICS: Registry[type[Metric]] = Registry(
    "metric",
    {
        "accuracy": Accuracy,
        "top5": Top5,
        "recall": Recall,
        "f1": F1,
        "auroc": AUROC,
        "label_accuracy": LabelAccuracy,
        "perplexity": Perplexity,
        "rmse": RMSE,
        "mae": MAE,
        "loss": Loss,
    },
    code="NAME",
)


def check_metric(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    """UserError where a metric is not defined for outputs and targets of these shapes."""
    has_classes = outputs.ndim == 2 and targets.ndim == 1
    has_labels = "labels" in metric.needs and outputs.shape == targets.shape
    if "classes" in metric.needs and "values" not in metric.needs and not has_classes and not has_labels:
        raise UserError(
            f"the metric {metric.name} needs outputs [N, classes] and targets [N], got {list(outputs.shape)} and "
            f"{list(targets.shape)}: name the task beside your loss (task.name = 'next_token', for instance), or give "
            f"a metric of your own"
        )
    sums = metric.sums(outputs, targets)
    if not isinstance(sums, Mapping) or not all(isinstance(value, Tensor) for value in sums.values()):
        raise UserError(f"the metric {metric.name}: sums() must return a dict of tensors")
    value = metric.value(sums)
    if not isinstance(value, float):
        raise UserError(f"the metric {metric.name}: value() must return a float, got {type(value).__name__}")
