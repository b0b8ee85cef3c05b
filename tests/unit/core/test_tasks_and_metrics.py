"""Losses against plain `torch.nn`, metrics against scikit-learn, in double precision; how chunks are added up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedgg
from fedgg.core.evaluation import evaluate
from fedgg.core.metrics import METRICS, Mean, Metric
from fedgg.core.model import Net
from fedgg.core.tasks import MultiLabel, NextToken, Regression, Task
from fedgg.errors import UserError

scores = pytest.importorskip("sklearn.metrics")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-10, abs_tol=1e-12)


# Losses --------------------------------------------------------------------------------------------------------------


def test_multilabel() -> None:
    outputs, targets = normal(7, 4), (normal(7, 4, seed=1) > 0).long()
    each = MultiLabel().losses(outputs, targets)
    assert each.shape == (7,)
    assert close(float(each.mean()), float(nn.BCEWithLogitsLoss()(outputs, targets.double())))


@pytest.mark.parametrize("shape", [(7,), (7, 3)])
def test_regression(shape: tuple[int, ...]) -> None:
    targets, outputs = normal(*shape), normal(7, *(shape[1:] or (1,)), seed=1)
    each = Regression().losses(outputs, targets)
    assert each.shape == (7,)
    assert close(float(each.mean()), float(nn.MSELoss()(outputs.view(shape), targets)))


def test_next_token_with_padding() -> None:
    """The mean of the losses by their weights is the mean over all tokens that count."""
    outputs, targets = normal(5, 6, 9), torch.from_numpy(np.random.default_rng(1).integers(0, 9, (5, 6)))
    targets[0, 3:], targets[1, 0] = -100, 4
    task = NextToken(padding=4)
    each, weights = task.losses(outputs, targets), task.weights(targets)
    ignored = targets.where(targets != 4, -100)
    assert weights.tolist() == (ignored >= 0).sum(1).tolist()
    expected = nn.CrossEntropyLoss(ignore_index=-100)(outputs.flatten(0, 1), ignored.flatten())
    assert close(float((each * weights).sum() / weights.sum()), float(expected))
    nothing = torch.full((2, 6), -100)
    assert task.losses(outputs[:2], nothing).tolist() == [0, 0]


# Metrics -------------------------------------------------------------------------------------------------------------

CLASSES = torch.from_numpy(np.random.default_rng(2).integers(0, 6, 90))
LABELS = (normal(90, 6, seed=3) > 0.4).long()
LOGITS = normal(90, 6, seed=4).round(decimals=1)  # with ties
VALUES = normal(90, 6, seed=5)


@pytest.mark.parametrize("name", sorted(set(METRICS) - {"loss"}))
def test_no_metric_has_a_value_without_examples(name: str) -> None:
    metric = METRICS[name](name)
    targets = LABELS if metric.needs == ("labels",) else VALUES if metric.needs == ("values",) else CLASSES
    assert math.isnan(metric.value(metric.sums(LOGITS[:0], targets[:0])))


def test_clients_with_padding_alone_are_left_out_of_means() -> None:
    random = np.random.default_rng(0)
    x, clients = random.integers(1, 12, (60, 5)), np.repeat(np.arange(3), 20)
    y = np.roll(x, -1, 1)
    y[clients == 2] = -100
    lstm = {"task": {"name": "next_token"}, "model": {"name": "char_lstm", "hidden": 4, "layers": 1}}
    experiment = lstm | {"rounds": 1, "data": {"holdout": 0.3}, "local": {"batch": 7}}
    run = fedgg.run(experiment, data=(x, y, x, y, clients), metrics=["accuracy", "perplexity"])
    assert set(run.rounds[0]["holdout_perplexity_by_client"]) == {"0", "1"}
    assert run.rounds[0]["holdout_perplexity"] > 6
    assert set(run.rounds[0]["holdout_accuracy_by_client"]) == {"0", "1"}
    with pytest.raises(UserError, match="no target of the test set of arrays counts: all of them are padding"):
        fedgg.run(experiment, data=(x, y, x[40:], y[40:], clients))


def probabilities(classes: int = 6) -> Any:
    return LOGITS[:, :classes].softmax(1).numpy()


CASES: dict[str, tuple[str, Tensor, Tensor, Callable[[], float]]] = {
    "accuracy": ("accuracy", LOGITS, CLASSES, lambda: scores.accuracy_score(CLASSES, LOGITS.argmax(1))),
    "top5": ("top5", VALUES, CLASSES, lambda: scores.top_k_accuracy_score(CLASSES, VALUES, k=5)),
    "recall": ("recall", LOGITS, CLASSES, lambda: scores.recall_score(CLASSES, LOGITS.argmax(1), average="macro")),
    "f1": ("f1", LOGITS, CLASSES, lambda: scores.f1_score(CLASSES, LOGITS.argmax(1), average="macro")),
    "auroc": ("auroc", LOGITS, CLASSES, lambda: scores.roc_auc_score(CLASSES, probabilities(), multi_class="ovr")),
    "auroc of two classes": (
        "auroc",
        LOGITS[:, :2],
        CLASSES % 2,
        lambda: scores.roc_auc_score(CLASSES % 2, probabilities(2)[:, 1]),
    ),
    "f1 of labels": ("f1", LOGITS, LABELS, lambda: scores.f1_score(LABELS, LOGITS > 0, average="macro")),
    "recall of labels": ("recall", LOGITS, LABELS, lambda: scores.recall_score(LABELS, LOGITS > 0, average="macro")),
    "auroc of labels": ("auroc", LOGITS, LABELS, lambda: scores.roc_auc_score(LABELS, LOGITS, average="macro")),
    "label_accuracy": ("label_accuracy", LOGITS, LABELS, lambda: 1 - scores.hamming_loss(LABELS, LOGITS > 0)),
    "perplexity": (
        "perplexity",
        LOGITS,
        CLASSES,
        lambda: math.exp(scores.log_loss(CLASSES, probabilities(), labels=range(6))),
    ),
    "rmse": ("rmse", LOGITS, VALUES, lambda: scores.mean_squared_error(VALUES, LOGITS) ** 0.5),
    "mae": ("mae", LOGITS[:, 0], VALUES[:, 0], lambda: scores.mean_absolute_error(VALUES[:, 0], LOGITS[:, 0])),
}


def value_of(metric: Metric, outputs: Tensor, targets: Tensor, chunk: int) -> float:
    """As `evaluate` computes it, of an identity as the model, in chunks of examples."""
    parameter = nn.ParameterDict({"zero": nn.Parameter(torch.zeros(1, dtype=torch.float64))})
    net = Net(Shifted(parameter), NoLoss(), (metric,))
    chunks = zip(outputs.split(chunk), targets.split(chunk), strict=True)
    return evaluate(net, net.start, {}, chunks).values[metric.name]


class Shifted(nn.Module):
    def __init__(self, parameters: nn.ParameterDict):
        super().__init__()
        self.all = parameters

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = x + self.all["zero"]
        return shifted


class NoLoss(Task):
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.flatten(1).sum(1) if outputs.ndim > 1 else outputs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk", [90, 37])
def test_metrics_are_those_of_scikit_learn(case: str, chunk: int) -> None:
    name, outputs, targets, expected = CASES[case]
    assert close(value_of(METRICS[name](name), outputs, targets, chunk), float(expected()))


def test_classes_that_do_not_occur() -> None:
    """Recall: none of their examples; F1: 0 if predicted, as in scikit-learn; AUROC: not defined."""
    present = CLASSES % 3
    expected = scores.recall_score(present, LOGITS.argmax(1), average="macro", labels=[0, 1, 2])
    assert close(value_of(METRICS["recall"]("recall"), LOGITS, present, 40), float(expected))
    expected = scores.f1_score(present, LOGITS.argmax(1), average="macro")
    assert close(value_of(METRICS["f1"]("f1"), LOGITS, present, 40), float(expected))
    assert math.isnan(value_of(METRICS["auroc"]("auroc"), LOGITS[:, :2], CLASSES * 0, 40))


def test_perplexity_of_tokens_is_the_exponential_of_the_loss() -> None:
    task, tokens = NextToken(), CLASSES.view(15, 6).clone()
    tokens[2, 1:] = -100
    net = Net(Shifted(nn.ParameterDict({"zero": nn.Parameter(torch.zeros(1, dtype=torch.float64))})), task)
    net.metrics = (METRICS["perplexity"]("perplexity"), METRICS["accuracy"]("accuracy"))
    outputs = LOGITS.view(15, 6, 6)
    score = evaluate(net, net.start, {}, zip(outputs.split(4), tokens.split(4), strict=True))
    counts = tokens >= 0
    assert close(score.loss, float(F.cross_entropy(outputs[counts], tokens[counts])))
    assert close(score.values["perplexity"], math.exp(score.loss))
    assert close(score.values["accuracy"], scores.accuracy_score(tokens[counts], outputs[counts].argmax(1)))
    assert score.examples == 15


def test_a_function_is_a_mean_over_examples() -> None:
    def distance(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs()

    distance.higher_is_better = False  # type: ignore[attr-defined]
    metric = Mean("distance", distance)
    assert not metric.higher_is_better
    assert METRICS["accuracy"].higher_is_better
    expected = scores.mean_absolute_error(VALUES[:, 0], LOGITS[:, 0])
    assert close(value_of(metric, LOGITS[:, 0], VALUES[:, 0], 40), float(expected))


def test_tasks_without_probabilities_say_so() -> None:
    with pytest.raises(UserError, match="regression has no probabilities"):
        Regression().probabilities(VALUES)
