"""The task and the metrics of an experiment, from their names, user code or objects handed in from Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedgg.core.metrics import METRICS, Mean, Metric
from fedgg.core.tasks import TASKS, Criterion, OwnLoss, Task
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.name_resolution import part_named
from fedgg.registry import names_code, suggestion
from fedgg.runfolder.validation import PLACES

MetricGiven = str | Metric | type[Metric] | Callable[..., Any]


@dataclass(frozen=True)
class Objective:
    """A loss and metrics handed in from Python, in place of those an experiment names."""

    loss: Criterion | None = None
    metrics: tuple[MetricGiven, ...] | None = None


NAMED_OBJECTIVE = Objective()


def objective_of(loss: Any, metrics: Any) -> Objective:
    """Checked; one metric may stand for a list of one."""
    if loss is not None and (not callable(loss) or isinstance(loss, type)):
        raise UserError(f"loss must be a function of outputs and targets, got {loss!r}; names go into task.loss")
    if metrics is None:
        return NAMED_OBJECTIVE if loss is None else Objective(loss)
    return Objective(loss, tuple(metrics) if isinstance(metrics, list | tuple) else (metrics,))


def task_of(experiment: Experiment, loss: Criterion | None = None) -> Task:
    """The task that the experiment names; `loss`, a function handed in from Python, takes its place."""
    config = experiment.task
    is_named = config.name in TASKS
    task = TASKS[config.name](**config.settings) if is_named else Task()
    if is_named and config.loss is None:
        return task
    function: Any = loss
    if function is None and is_named and not names_code(config.loss or ""):
        raise UserError(f"task.loss = {config.loss!r}: name a function of yours, FILE.py:FUNCTION or MODULE:FUNCTION")
    if function is None:
        function = part_named(TASKS, (config.loss or "") if is_named else config.name)
    if not callable(function) or isinstance(function, type):
        raise UserError(
            f"{config.loss or config.name} must be a function of outputs [N, ...] and targets [N, ...] that returns "
            f"the loss of each example, [N]"
        )
    return OwnLoss(function, task)


def predicting_task(experiment: Experiment) -> Task:
    """The task as far as predictions go, without its loss, which may be code that is not at hand."""
    config = experiment.task
    return TASKS[config.name](**config.settings) if config.name in TASKS else Task()


def metrics_of(experiment: Experiment, task: Task, given: Sequence[MetricGiven] | None = None) -> tuple[Metric, ...]:
    """The metrics that the experiment names, or those of its task; objects handed in from Python take their place."""
    metrics: list[Metric] = []
    for one in given or experiment.metrics or task.metrics:
        metric = METRICS[one](one) if isinstance(one, str) and one in METRICS else _metric(one)
        if task.targets not in (*metric.needs, "any"):
            fitting = ", ".join(name for name, kind in METRICS.items() if task.targets in kind.needs)
            raise UserError(
                f"the metric {metric.name} is not defined for the task {experiment.task.name}: choose from {fitting}"
            )
        if metric.name in [other.name for other in metrics]:
            raise UserError(f"two metrics have the name {metric.name!r}: leave one out, or name it otherwise")
        metrics.append(metric)
    if experiment.stop is not None:
        scores = ["test_loss", "train_loss", *(f"{where}_{metric.name}" for where in PLACES for metric in metrics)]
        if experiment.stop.metric not in scores:
            name = experiment.stop.metric.partition("_")[2]
            fits = name in METRICS and task.targets in METRICS[name].needs and name != "loss"
            way_out = f"add {name} to metrics" if fits else suggestion(experiment.stop.metric, scores)
            raise UserError(f"stop.metric = {experiment.stop.metric!r}: {way_out}")
        target, percent = experiment.stop.target, [metric.name for metric in metrics if metric.percent]
        if target is not None and target > 1 and experiment.stop.metric.partition("_")[2] in percent:
            raise UserError(
                f"stop.target = {target:g}: {experiment.stop.metric} is from 0 to 1, write {target / 100:g}"
            )
    return tuple(metrics)


def _metric(given: MetricGiven) -> Metric:
    """From user code, a class, an object, or a function that gives a number for each example."""
    if isinstance(given, str):
        METRICS.check(given)
    part: Any = part_named(METRICS, given) if isinstance(given, str) else given
    if isinstance(part, Metric):
        metric = part
    elif isinstance(part, type) and issubclass(part, Metric):
        metric = part()
    elif callable(part) and not isinstance(part, type):
        metric = Mean(getattr(part, "__name__", type(part).__name__), part)
    else:
        raise UserError(
            f"the metric {given!r} must be a function of outputs [N, ...] and targets [N, ...] that returns a number "
            f"for each example, [N], or a class that extends fedgg.Metric"
        )
    if not metric.name:
        metric = replace(metric, name=re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(metric).__name__).lower())
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", metric.name):
        raise UserError(f"a metric is named {metric.name!r}: name it with letters, digits and _, as f2_score")
    return metric
