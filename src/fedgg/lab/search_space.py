"""What `fedgg tune` searches: ranges and choices of settings for every algorithm, and the file of a search."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedgg.errors import UserError
from fedgg.lab.config import Experiment, read_toml
from fedgg.lab.name_resolution import algorithm_class, check_parts
from fedgg.lab.study import Study, study_in
from fedgg.lab.task_and_metrics import NAMED_OBJECTIVE, Objective
from fedgg.registry import nearest

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Sampler = Literal["tpe", "random"]
Pruner = Literal["median", "hyperband", "none"]
HOLDOUT = 0.2  # of every client's examples, where the experiment sets none
FRESH = 3  # seeds of the final study


@dataclass(frozen=True)
class Range:
    """From `low` to `high`; whole numbers where both are. `log`: drawn on a logarithmic scale."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (self.low, self.high))
        if not numbers or not isinstance(self.log, bool) or not -math.inf < self.low < self.high < math.inf:
            raise UserError(f"{asdict(self)}: give numbers with low below high, and log = true or false")
        if self.log and self.low <= 0:
            raise UserError(f"low = {self.low}: a logarithmic range begins above zero")

    @property
    def ends(self) -> tuple[Any, ...]:
        return self.low, self.high

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution, IntDistribution

        if isinstance(self.low, int) and isinstance(self.high, int):
            return IntDistribution(self.low, self.high, log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Choices:
    """One of these values."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values or not all(isinstance(value, str | int | float) for value in self.values):
            raise UserError(f"{list(self.values)}: give at least one number, text, true or false")

    @property
    def ends(self) -> tuple[Any, ...]:
        return self.values

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)


Space = dict[str, Range | Choices]  # by dotted key


def default_space(algorithm: str) -> Space:
    """The clients' learning rate, and the settings of the algorithm that declare a range (`setting(search=...)`)."""
    space: Space = {"local.lr": Range(0.001, 1.0, log=True)}
    for setting in fields(algorithm_class(algorithm)):
        if (search := setting.metadata.get("search")) is not None:
            low, high = map(float, search)
            space[f"algorithm.{setting.name}"] = Range(low, high, log=low > 0 and high / low >= 10)
    return space


def spaces(given: Mapping[str, Any], variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Space]:
    """The space of every label: defaults, keys of `given` for all, and its table LABEL for one.

    What a variant sets is not searched; a key with one choice is fixed.
    """
    labels = {label.lower(): label for label in variants}
    tables = {labels[key.lower()]: table for key, table in given.items() if _is_of_label(key, table, labels)}
    shared = _leaves({key: value for key, value in given.items() if not _is_of_label(key, value, labels)})
    by_label: dict[str, Space] = {}
    for label, settings in variants.items():
        special = _leaves(tables.get(label, {}))
        if fixed := [key for key in special if key in settings]:
            raise UserError(f"space.{label}: {fixed[0]} is set by the variant {label!r} already; leave one of them out")
        space = default_space(str(settings.get("algorithm.name", Experiment().algorithm.name)))
        by_label[label] = {key: one for key, one in {**space, **shared, **special}.items() if key not in settings}
    return by_label


def _is_of_label(key: str, value: Any, labels: Mapping[str, str]) -> bool:
    """Whether an entry of a space is the table of one label; labels are compared without regard to case."""
    return isinstance(value, Mapping) and key.lower() in labels


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Space:
    space: Space = {}
    for key, value in table.items():
        where = f"{prefix}{key}"
        try:
            if isinstance(value, Range | Choices):
                space[where] = value
            elif isinstance(value, Mapping) and "low" in value:
                if unknown := [name for name in value if name not in ("low", "high", "log")]:
                    raise UserError(f"unknown key {unknown[0]!r}{nearest(unknown[0], ('low', 'high', 'log'))}")
                if "high" not in value:
                    raise UserError("a range has low and high")
                space[where] = Range(**value)
            elif isinstance(value, Mapping):
                space |= _leaves(value, f"{where}.")
            elif isinstance(value, Sequence) and not isinstance(value, str):
                space[where] = Choices(tuple(value))
            else:
                raise UserError(f"{value!r}: give {{low = ..., high = ..., log = true}} or a list of values")
        except UserError as error:
            raise UserError(str(error) if str(error).startswith("space.") else f"space.{where}: {error}") from error
    return space


# A search ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """What is searched for, and how: a study whose seeds are those of the trials, and the space of every variant."""

    study: Study
    space: dict[str, Space]
    trials: int = 20  # of every algorithm, pruned and diverged ones included
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"
    window: int = 1  # evaluations: a score is the mean of the last ones, since single ones may be noisy
    fresh_seeds: tuple[int, ...] = ()  # of the final study; by default those after the largest seed of the trials
    objective: Objective = NAMED_OBJECTIVE

    def __post_init__(self) -> None:
        if not self.fresh_seeds:
            after = max(self.study.seeds) + 1
            object.__setattr__(self, "fresh_seeds", tuple(range(after, after + FRESH)))
        if used := sorted(set(self.fresh_seeds) & set(self.study.seeds)):
            raise UserError(f"seed {used[0]} is one of the trials' seeds: the final study needs seeds of its own")
        for name, choices in (("sampler", Sampler), ("pruner", Pruner)):
            value = getattr(self, name)
            if value not in get_args(choices):
                raise UserError(f"{name} = {value!r}{nearest(str(value), get_args(choices))}")
        for name in ("trials", "window"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(f"{name} = {value!r}: give a whole number from 1")
        for label, space in self.space.items():
            if fixed := [key for key in ("seed", "name", "data.holdout") if key in space]:
                raise UserError(f"space of {label}: {fixed[0]} is the same in all trials; leave it out")
            for key, one in space.items():
                for value in one.ends:  # all mistakes before the first trial
                    try:
                        check_parts(self.experiment(label, self.study.seeds[0], {key: value}))
                    except UserError as error:
                        raise UserError(f"space of {label}: {error}") from error

    @property
    def holdout(self) -> float:
        return self.study.base.data.holdout or HOLDOUT

    @property
    def shown_window(self) -> str:
        return f", mean of the last {self.window} evaluations," if self.window > 1 else ""

    def experiment(self, label: str, seed: int, settings: Mapping[str, Any]) -> Experiment:
        changes = {**self.study.variants[label], **settings, "name": label, "seed": seed}
        return self.study.base.changed({"data.holdout": self.holdout, **changes})

    def hash(self) -> str:
        """Identity of the whole search, for a folder of its own; more trials belong to the same."""
        return hashlib.sha256(" ".join(f"{label} {self.identity(label)}" for label in self.space).encode()).hexdigest()

    def identity(self, label: str, handed_in: str = "") -> str:
        """Of everything that decides the trials of a label, but for how many there are; `handed_in`: of objects."""
        space = {key: repr(one) for key, one in self.space[label].items()}
        runs = [self.experiment(label, seed, {}).hash() for seed in self.study.seeds]
        window = [self.window] if self.window > 1 else []  # earlier versions have no window
        content = json.dumps([space, runs, self.sampler, self.pruner, handed_in, *window])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_search(path: Path) -> tuple[Study, dict[str, Any], dict[str, Any]]:
    """A study file with the table [space] and keys of `Search`: trials, sampler, pruner, window and fresh_seeds."""
    content = read_toml(path)
    names = ("trials", "sampler", "pruner", "window", "fresh_seeds")
    options, space = {key: content.pop(key) for key in names if key in content}, content.pop("space", {})
    if not isinstance(space, dict):
        raise UserError(f"{path}: space must be a table, got {space!r}")
    seeds = options.get("fresh_seeds", [])
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
        raise UserError(f"{path}: fresh_seeds must be a list of whole numbers, got {seeds!r}")
    study = study_in(content, path, "space", *names)
    return study, space, options | {"fresh_seeds": tuple(seeds)}
