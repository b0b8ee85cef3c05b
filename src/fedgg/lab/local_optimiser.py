"""The parts of local training and evaluation, from their names in an experiment: optimiser, schedule, task, metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from fedgg.core.algorithm import Algorithm
from fedgg.core.metrics import METRICS, Mean, Metric
from fedgg.core.optimisers import OPTIMISERS, SCHEDULES, SGD, Optimiser, OptimiserSettings
from fedgg.core.tasks import TASKS, Criterion, OwnLoss, Task
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.name_resolution import part_named
from fedgg.registry import accepted_settings


def optimiser_of(experiment: Experiment, round_: int) -> OptimiserSettings:
    """The optimiser of this round, counted from zero."""
    local, config = experiment.local, experiment.optimiser
    kind = OPTIMISERS[config.name] if config.name in OPTIMISERS else optimiser_class(config.name)
    name, warmup, settings = experiment.schedule.name, experiment.schedule.warmup, experiment.schedule.settings
    schedule = SCHEDULES[name] if name in SCHEDULES else schedule_function(name)
    accepted = accepted_settings(schedule)
    offered = {**settings, "lr_decay": local.lr_decay, "rounds": experiment.rounds}
    lr = local.lr * schedule(round_, **{key: value for key, value in offered.items() if key in accepted})
    if round_ < warmup:
        lr = lr * (round_ + 1) / (warmup + 1)
    clip_norm = math.inf if config.clip_norm is None else config.clip_norm
    momentum = local.momentum if issubclass(kind, SGD) else 0.0
    known = {"lr": lr, "momentum": momentum, "weight_decay": local.weight_decay, "clip_norm": clip_norm}
    values = {**known, **kind.defaults, **config.settings}
    names = [field.name for field in fields(kind) if field.name != "used"]
    for name in names:
        if not isinstance(values.get(name), int | float) or isinstance(values[name], bool):
            raise UserError(f"optimiser {config.name} needs a number for {name!r}: set optimiser.{name}, or a default")
    if unknown := [name for name in config.settings if name not in names]:
        raise UserError(f"optimiser {config.name} has no setting {unknown[0]!r}: its settings are {', '.join(names)}")
    return OptimiserSettings(kind, {name: float(values[name]) for name in names}, config.state == "kept")


def optimiser_class(name: str) -> type[Optimiser]:
    kind = part_named(OPTIMISERS, name)
    if not (isinstance(kind, type) and issubclass(kind, Optimiser) and is_dataclass(kind)):
        raise UserError(f"optimiser.name = {name!r} must be a dataclass that extends fedgg.core.optimisers.Optimiser")
    return kind


def schedule_function(name: str) -> Callable[..., float]:
    function: Callable[..., float] = part_named(SCHEDULES, name)
    if not callable(function) or "round_" not in accepted_settings(function):
        raise UserError(f"schedule.name = {name!r} must be a function with the parameter `round_`")
    return function


def check_optimiser(experiment: Experiment, algorithm: Algorithm) -> None:
    """UserError where the algorithm is defined for SGD only, or the settings do not fit the optimiser."""
    _check_schedule(experiment)
    settings = optimiser_of(experiment, 0)
    for name, (least, above) in settings.kind.ranges.items():
        if not least <= settings.values[name] < above:
            raise UserError(
                f"optimiser.{name} = {settings.values[name]:g}: give a number from {least:g} to below {above:g}"
            )
    reason = algorithm.needs_sgd()
    if reason and not issubclass(settings.kind, SGD):
        raise UserError(
            f"{type(algorithm).__name__} is defined for SGD, not for optimiser.name = {experiment.optimiser.name!r}: "
            f"{reason}"
        )
    if reason and settings.kept:
        raise UserError(
            f"{type(algorithm).__name__} needs a velocity that starts at zero ({reason}): leave optimiser.state out"
        )


def _check_schedule(experiment: Experiment) -> None:
    """UserError where a schedule fails in some round, or gives a learning rate that is negative or not finite."""
    chosen = experiment.schedule
    shown = ", ".join(f"{key} = {value}" for key, value in {"schedule.name": chosen.name, **chosen.settings}.items())
    for round_ in range(experiment.rounds):
        try:
            lr = optimiser_of(experiment, round_).values["lr"]
        except (ArithmeticError, TypeError, ValueError) as error:
            raise UserError(f"{shown}: it fails in round {round_ + 1}: {type(error).__name__}: {error}") from error
        if not 0 <= lr < math.inf:
            raise UserError(f"{shown}: the learning rate of round {round_ + 1} is {lr:g}; give other settings")


# Task and metrics ----------------------------------------------------------------------------------------------------

MetricGiven = str | Metric | type[Metric] | Callable[..., Any]


@dataclass(frozen=True)
class Objective:
    """A loss and metrics handed in from Python, in place of those an experiment names."""

    loss: Criterion | None = None
    metrics: tuple[MetricGiven, ...] | None = None


NAMED_OBJECTIVE = Objective()


def task_of(experiment: Experiment, loss: Criterion | None = None) -> Task:
    """The task that the experiment names; `loss`, a function handed in from Python, takes its place."""
    config = experiment.task
    if loss is None and config.name in TASKS:
        kind = TASKS[config.name]
        try:
            return kind(**config.settings)
        except TypeError:
            accepted = ", ".join(accepted_settings(kind)) or "none"
            unknown = next(iter(config.settings.keys() - accepted_settings(kind).keys()), "")
            raise UserError(f"the task {config.name} has no setting {unknown!r}: its settings are {accepted}") from None
    function: Any = part_named(TASKS, config.name) if loss is None else loss
    if isinstance(function, Task):
        return function
    if not callable(function) or isinstance(function, type):
        raise UserError(
            f"task.name = {config.name!r} must be a function of outputs [N, ...] and targets [N, ...] that returns the "
            f"loss of each example, [N]"
        )
    return OwnLoss(function)


def metrics_of(experiment: Experiment, task: Task, given: Sequence[MetricGiven] | None = None) -> tuple[Metric, ...]:
    """The metrics that the experiment names, or those of its task; objects handed in from Python take their place."""
    metrics: list[Metric] = []
    for one in given or experiment.metrics or task.metrics:
        metric = _metric(one)
        if task.targets not in (*metric.needs, "any"):
            fitting = ", ".join(name for name, kind in METRICS.items() if task.targets in kind.needs)
            raise UserError(
                f"the metric {metric.name} is not defined for the task {experiment.task.name}: choose from {fitting}"
            )
        if metric.name in [other.name for other in metrics]:
            raise UserError(f"two metrics have the name {metric.name!r}: leave one out, or name it otherwise")
        metrics.append(metric)
    return tuple(metrics)


def _metric(given: MetricGiven) -> Metric:
    """From a registered name, user code, a class, an object, or a function that gives a number for each example."""
    if isinstance(given, str) and given in METRICS:
        return METRICS[given](given)
    METRICS.check(given) if isinstance(given, str) else None
    part: Any = part_named(METRICS, given) if isinstance(given, str) else given
    if isinstance(part, Metric):
        metric = part
    elif isinstance(part, type) and issubclass(part, Metric):
        metric = part(part.__name__.lower())
    elif callable(part) and not isinstance(part, type):
        metric = Mean(getattr(part, "__name__", type(part).__name__), part)
    else:
        raise UserError(
            f"the metric {given!r} must be a function of outputs [N, ...] and targets [N, ...] that returns a number "
            f"for each example, [N], or a class that extends fedgg.Metric"
        )
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", metric.name):
        raise UserError(f"a metric is named {metric.name!r}: name it with letters, digits and _, as f2_score")
    return metric
