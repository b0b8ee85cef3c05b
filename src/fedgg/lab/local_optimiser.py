"""The clients' optimiser in a round, and the learning rates of clients and server by their schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass

from fedgg.core.algorithm import Algorithm
from fedgg.core.optimisers import OPTIMISERS, SCHEDULES, SGD, Optimiser, OptimiserSettings
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import ScheduleConfig
from fedgg.lab.name_resolution import check_settings, part_named
from fedgg.registry import accepted_settings


def optimiser_of(experiment: Experiment, round_: int) -> OptimiserSettings:
    """The optimiser of this round, counted from zero."""
    local, config = experiment.local, experiment.optimiser
    kind = OPTIMISERS[config.name] if config.name in OPTIMISERS else optimiser_class(config.name)
    lr = local.lr
    if local.lr_decay != 1 or experiment.schedule != ScheduleConfig():
        lr = scheduled_lr(lr, local.lr_decay, experiment.schedule, experiment.rounds, round_)
    clip_norm = math.inf if config.clip_norm is None else config.clip_norm
    momentum = local.momentum if issubclass(kind, SGD) else 0.0
    known = {"lr": lr, "momentum": momentum, "weight_decay": local.weight_decay, "clip_norm": clip_norm}
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    values = {**known, **defaults, **kind.defaults, **config.settings}
    names = [field.name for field in fields(kind) if field.name != "used"]
    for name in names:
        if not isinstance(values.get(name), int | float) or isinstance(values[name], bool):
            raise UserError(f"optimiser {config.name} needs a number for {name!r}: set optimiser.{name}, or a default")
    if unknown := [name for name in config.settings if name not in names]:
        raise UserError(f"optimiser {config.name} has no setting {unknown[0]!r}: its settings are {', '.join(names)}")
    return OptimiserSettings(kind, {name: float(values[name]) for name in names}, config.state == "kept")


def scheduled_lr(lr: float, lr_decay: float, config: ScheduleConfig, rounds: int, round_: int) -> float:
    """The learning rate of a round, counted from zero: of the clients, or of the server."""
    schedule = SCHEDULES[config.name] if config.name in SCHEDULES else schedule_function(config.name)
    accepted = accepted_settings(schedule)
    offered = {**config.settings, "lr_decay": lr_decay, "rounds": rounds}
    lr = lr * schedule(round_, **{key: value for key, value in offered.items() if key in accepted})
    return lr * (round_ + 1) / (config.warmup + 1) if round_ < config.warmup else lr


def server_rates(experiment: Experiment, algorithm: Algorithm) -> tuple[float, ...]:
    """The server's learning rate of every round. UserError where the algorithm needs 1."""
    server, schedule = experiment.server, experiment.server_schedule
    rates = _checked_rates("server_schedule", schedule, server.lr, server.lr_decay, experiment.rounds)
    reason = algorithm.fixes_server_step()
    if reason and any(rate != 1 for rate in rates):
        raise UserError(
            f"{type(algorithm).__name__} has a server step of its own ({reason}): leave server.lr, server.lr_decay and "
            f"[server_schedule] out"
        )
    return rates


def optimiser_class(name: str) -> type[Optimiser]:
    kind = part_named(OPTIMISERS, name)
    if not (isinstance(kind, type) and issubclass(kind, Optimiser) and is_dataclass(kind)):
        raise UserError(f"optimiser.name = {name!r} must be a dataclass that extends fedgg.core.optimisers.Optimiser")
    return kind


def schedule_function(name: str) -> Callable[..., float]:
    function: Callable[..., float] = part_named(SCHEDULES, name)
    if not callable(function) or "round_" not in accepted_settings(function):
        raise UserError(f"schedule {name!r} must be a function with the parameter `round_`")
    return function


def check_optimiser(experiment: Experiment, algorithm: Algorithm) -> None:
    """UserError where the algorithm is defined for SGD only, or the settings do not fit the optimiser."""
    local = experiment.local
    _checked_rates("schedule", experiment.schedule, local.lr, local.lr_decay, experiment.rounds)
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
            f"{reason}; set optimiser.name = 'sgd', or take another algorithm"
        )
    if reason and settings.kept:
        raise UserError(
            f"{type(algorithm).__name__} needs a velocity that starts at zero ({reason}): leave optimiser.state out"
        )


def _checked_rates(
    section: str, schedule: ScheduleConfig, lr: float, lr_decay: float, rounds: int
) -> tuple[float, ...]:
    """The rates of all rounds. UserError where a schedule fails, or gives one that is negative or not finite."""
    if lr_decay != 1 and schedule.name in SCHEDULES and "lr_decay" not in accepted_settings(SCHEDULES[schedule.name]):
        decay = f"{'server' if section == 'server_schedule' else 'local'}.lr_decay"
        takers = [name for name, function in SCHEDULES.items() if "lr_decay" in accepted_settings(function)]
        raise UserError(
            f"{decay} = {lr_decay:g} has no effect with {section}.name = {schedule.name!r}: leave one of them out "
            f"(it is a setting of {' and '.join(takers)})"
        )
    function = SCHEDULES[schedule.name] if schedule.name in SCHEDULES else schedule_function(schedule.name)
    check_settings(section, schedule.name, function, schedule.settings, schedule.not_settings, may_be_negative=True)
    settings = {f"{section}.name": schedule.name, **schedule.settings}
    shown, rates = ", ".join(f"{key} = {value}" for key, value in settings.items()), list[float]()
    for round_ in range(rounds):
        try:
            rates.append(scheduled_lr(lr, lr_decay, schedule, rounds, round_))
        except Exception as error:  # a user's function may raise anything
            raise UserError(f"{shown}: it fails in round {round_ + 1}: {type(error).__name__}: {error}") from error
        if not 0 <= rates[-1] < math.inf:
            raise UserError(f"{shown}: the learning rate of round {round_ + 1} is {rates[-1]:g}; give other settings")
    return tuple(rates)
