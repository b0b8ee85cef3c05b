"""An experiment: frozen, validated, TOML in and out. Every choice that changes results has a name here."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticUndefined

from fedgg import files
from fedgg.core.metrics import METRICS
from fedgg.core.optimisers import SCHEDULES
from fedgg.errors import UserError
from fedgg.lab.config_errors import one_line, section_in
from fedgg.lab.config_sections import (
    AlgorithmConfig,
    ConfigSection,
    DataConfig,
    EngineConfig,
    LocalConfig,
    ModelConfig,
    OptimiserConfig,
    PartConfig,
    ScheduleConfig,
    ServerConfig,
    SplitConfig,
    TaskConfig,
)
from fedgg.lab.optional_sections import (
    OFF_UNLESS_THERE,
    SWITCHES,
    AttackConfig,
    PersonalConfig,
    PrivacyConfig,
    RobustConfig,
    StopConfig,
)
from fedgg.registry import NAMED_PARTS, accepted_settings, names_code, suggestion
from fedgg.runfolder.record_types import flat
from fedgg.runfolder.validation import PLACES

LARGEST = {"fp32": 3.4028234663852886e38, "fp64": sys.float_info.max}
# Where these are not set, the data decide, whichever they will be; a loss handed in from Python replaces the task.
FOLLOW_THE_DATA = ("data.normalise", "split.scheme", "split.clients", "task.name")
# Keys of a section that remain where its part gets another name.
REMAINING = {
    "task": ("loss",),
    "algorithm": (),
    "model": ("start", "statistics"),
    "optimiser": ("clip_norm", "state"),
    "schedule": ("warmup",),
    "server_schedule": ("warmup",),
}
# Keys that are left out of an identity where they have the value that was the only one in the first run folders.
YOUNG_KEYS = (
    ("data", "proxy", 0),
    ("data", "images", False),
    ("split", "unseen", 0),
    ("split", "feature_noise", 0.0),
    ("split", "feature_rotation", 0.0),
    ("local", "steps", None),
    ("local", "part", 1.0),
    ("local", "drop_last", False),
    ("server", "lr", 1.0),
    ("server", "lr_decay", 1.0),
)
# Not part of an identity: how many processes work on it, and lost clients, which the history names. Threads have rules
# of their own (`_identity`).
HANDS = {"threads", "workers", "lost_clients"}
STORAGE = {"checkpoint_every", "checkpoint_seconds", "memory_limit_mb"}  # of [server]


class Experiment(ConfigSection):
    """One run, complete: the same experiment gives the same bits again on the same machine."""

    name: str = Field("", max_length=10_000, description="a label; does not change results")
    seed: int = Field(0, ge=0, description="random seed: split, initial weights, client sampling, batch order")
    rounds: int = Field(100, ge=1, description="communication rounds")
    metrics: tuple[str, ...] = Field(
        (), description=f"the primary one first: {METRICS.choices()}; by default those of the task"
    )
    data: DataConfig = DataConfig()
    split: SplitConfig = SplitConfig()
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    local: LocalConfig = LocalConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    server: ServerConfig = ServerConfig()
    server_schedule: ScheduleConfig = ScheduleConfig()
    engine: EngineConfig = EngineConfig()
    privacy: PrivacyConfig | None = Field(
        None, description="client-level differential privacy; off unless a key is set"
    )
    robust: RobustConfig | None = Field(None, description="robust aggregation; off unless robust.rule is set")
    attack: AttackConfig | None = Field(None, description="clients that attack; off unless attack.kind is set")
    personal: PersonalConfig | None = Field(
        None, description="personal parts of the model; off unless personal.method or personal.parameters is set"
    )

    @field_validator("metrics", mode="before")
    @classmethod
    def _metrics_by_name(cls, names: Any) -> Any:
        """One name, several with commas between them, or a list."""
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        for name in names if isinstance(names, list | tuple) else ():
            if isinstance(name, str) and name not in METRICS and not names_code(name):
                raise ValueError(METRICS.suggestion(name))
        return names

    stop: StopConfig | None = Field(None, description="early stopping; off unless stop.metric is set")

    def __init__(self, **fields: Any) -> None:
        """A rule or kind of "none" leaves its section out: beside others on an axis of a sweep, for instance."""
        for name, switch in SWITCHES.items():
            if isinstance(fields.get(name), dict) and fields[name].get(switch) == "none":
                fields[name] = None
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise UserError(one_line(error, type(self))) from error

    @model_validator(mode="after")
    def _sections_fit_each_other(self) -> Experiment:
        if self.privacy is not None and self.robust is not None:
            raise ValueError(
                "privacy and robust cannot be had together: the noise is made for the mean of clipped updates, and a "
                "robust rule is another one; leave one out (privacy.clip alone already bounds every client)"
            )
        if self.attack is not None and self.clients_are_known and self.attack.clients > self.split.clients:
            raise ValueError(f"attack.clients = {self.attack.clients} but there are only {self.split.clients} clients")
        if (self.personal is not None or self.split.unseen) and not self.data.holdout:
            section = "personal" if self.personal is not None else "split.unseen"
            raise ValueError(f"{section} needs examples to score clients' models on: set data.holdout = 0.2")
        if self.split.unseen and self.clients_are_known and self.split.unseen >= self.split.clients:
            raise ValueError(f"split.unseen = {self.split.unseen} leaves none of {self.split.clients} clients to train")
        if self.task.settings and names_code(self.task.name):
            raise ValueError(f"task.{next(iter(self.task.settings))}: a loss of your own has no settings; leave it out")
        if self.stop is not None:
            # Whether the run has this metric is checked by `metrics_of`: some are handed in from Python.
            place = self.stop.metric.partition("_")[0]
            if self.stop.metric not in ("test_loss", "train_loss") and place not in PLACES:
                names = [f"{where}_{name}" for where in PLACES for name in self.metrics or METRICS if name in METRICS]
                way_out = suggestion(self.stop.metric, names)
                if not way_out.startswith("did you mean"):  # a metric of one's own, perhaps
                    *places, last = (f"{where}_{self.stop.metric}" for where in PLACES)
                    way_out = f"say where it is measured: {', '.join(places)} or {last}"
                raise ValueError(f"stop.metric = {self.stop.metric!r}: {way_out}")
            lacking = {
                "test": "a whole global model: stop by personal_ scores" if self.has_personal_parts else "",
                "holdout": "clients that hold examples out: data.holdout" if not self.data.holdout else "",
                "personal": "personal models: [personal]" if self.personal is None else "",
                "unseen": "clients that never train: split.unseen" if not self.split.unseen else "",
            }
            if reason := lacking.get(place) or (lacking["test"] if place == "holdout" else ""):
                raise ValueError(f"stop.metric = {self.stop.metric!r} needs {reason}")
            if self.server.evaluate_every >= self.rounds:
                raise ValueError(
                    f"stop cannot end the run: server.evaluate_every = {self.server.evaluate_every}, so that the only "
                    f"evaluation is at its end (rounds = {self.rounds}); set a smaller one"
                )
        # A NaN differs from itself, TOML has no None, and its dates are text in JSON: none of them would come back.
        for section in (
            "data",
            "task",
            "model",
            "algorithm",
            "optimiser",
            "schedule",
            "server_schedule",
            "split",
            "robust",
        ):
            part: PartConfig | None = getattr(self, section)
            for key, value in (part.settings if part else {}).items():
                if _holds(value, lambda one: one is not None and not isinstance(one, str | int | float)):
                    kinds = "a number, a text, true or false, or a list of those"
                    raise ValueError(f"{section}.{key} is a {type(value).__name__}: a setting is {kinds}")
                where = f"{section}.{key} = {value!r}: a setting cannot be"
                if _holds(value, lambda one: one is None):
                    raise ValueError(f"{where} None; leave it out for its default")
                if _holds(value, lambda one: isinstance(one, float) and one != one):
                    raise ValueError(f"{where} NaN; give a number, or put the word into quotes")
        # What becomes a number of the run's precision must not overflow in it; infinite ones are as they are.
        largest = LARGEST["fp64" if self.engine.precision == "fp64" else "fp32"]
        numeric = (
            "local",
            "algorithm",
            "optimiser",
            "schedule",
            "server",
            "server_schedule",
            "privacy",
            "robust",
            "attack",
        )
        for section in numeric:
            for key, value in (getattr(self, section) or ConfigSection()).model_dump().items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if number and largest < abs(value) and value not in (math.inf, -math.inf):
                    raise ValueError(f"{section}.{key} = {value}: too large for {self.engine.precision}")
        cohort = self.server.cohort
        if cohort is not None and not (cohort >= 1 and cohort == int(cohort)) and not 0 < cohort < 1:
            raise ValueError(f"server.cohort = {cohort}: give a number of clients from 1, or a share between 0 and 1")
        if cohort is not None and self.clients_are_known and cohort > self.split.clients:
            raise ValueError(f"server.cohort = {cohort} but there are only {self.split.clients} clients")
        return self

    @property
    def has_personal_parts(self) -> bool:
        """Whether parts of the model stay with the clients, so that there is no whole global model to score."""
        return self.personal is not None and self.personal.method != "ditto"

    @property
    def clients_are_known(self) -> bool:
        """False where the data will say how many there are."""
        chosen = self.split.settings.get("choose", "all") != "all"
        return self.split.scheme != "given" or chosen or "clients" in self.split.model_fields_set

    def cohort_of(self, clients: int) -> int:
        """How many of so many clients take part in a round; of a share at least one."""
        cohort = self.server.cohort
        if cohort is None:
            return clients
        return min(clients, int(cohort) if cohort >= 1 else max(1, round(cohort * clients)))

    def hash(self) -> str:
        """Identity of the numbers: everything but the name, how many processes work on it, and how it is stored."""
        return hashlib.sha256(json.dumps(self._identity(path=False), sort_keys=True).encode()).hexdigest()

    def trajectory(self) -> str:
        """Identity of the path through the models: not how far it is followed, nor how often it is evaluated."""
        return hashlib.sha256(json.dumps(self._identity(path=True), sort_keys=True).encode()).hexdigest()

    def trajectories(self) -> tuple[str, ...]:
        """Under which names run folders may know it: older versions of fedgg left `engine.threads` out.

        Those that named the engine `loop` were trained by the fused step: see `as_begun`.
        """
        path = self._identity(path=True)
        path["engine"].pop("threads", None)
        older = hashlib.sha256(json.dumps(path, sort_keys=True).encode()).hexdigest()
        return tuple(dict.fromkeys((self.trajectory(), older)))

    def as_begun(self, begun_as: str) -> Experiment:
        """The same experiment with the engine that trained the rounds of a folder, which records this identity.

        Before there was an engine `fused`, `loop` was the name of the fused step.
        """
        if self.engine.name != "loop":
            return self
        fused = self.changed({"engine.name": "fused"})
        return fused if begun_as in fused.trajectories() else self

    def _identity(self, *, path: bool) -> dict[str, Any]:
        """The settings that `trajectory()` (`path`) or `hash()` is made of, the engine as far as it changes bits."""
        excluded: dict[str, Any] = {"name": True, "engine": HANDS, "server": STORAGE}
        if path:
            excluded["privacy"] = {"epsilon_limit"}  # it says how far the path is followed, as the rounds do
            schedules = {self.schedule.name, self.server_schedule.name}  # one of user code may read the rounds
            if all(name in SCHEDULES and "rounds" not in accepted_settings(SCHEDULES[name]) for name in schedules):
                excluded["rounds"] = True
            excluded["server"] = excluded["server"] | {"evaluate_every"}
            excluded["metrics"] = excluded["stop"] = True
        content = self.model_dump(mode="json", exclude=excluded)
        # Settings younger than the first run folders are left out where they change nothing.
        content = {key: value for key, value in content.items() if key not in OFF_UNLESS_THERE or value is not None}
        for name in ("metrics", "task", "optimiser", "schedule", "server_schedule"):
            if getattr(self, name) == type(getattr(self, name))():
                content.pop(name, None)
        for section, key, default in YOUNG_KEYS:
            if content[section][key] == default:
                del content[section][key]
        # On a CPU `auto`, `fused`, `workers` and `devices` have the same bits. The fused step is "loop" here, as in
        # folders of versions that had no other step under that name.
        name, threads = self.engine.name, self.engine.threads_in_use
        on_cpu, known_as = self.engine.devices[0] == "cpu", {"fused": "loop", "loop": "local_step", "devices": "auto"}
        content["engine"]["name"] = known_as.get(name, name)
        if on_cpu and name in ("auto", "workers", "devices"):
            content["engine"]["name"] = "loop"
        if on_cpu and name != "stacked":  # clients are trained one by one, in any number of processes
            content["engine"]["device"] = "cpu"
        if threads > 1:  # sums of several threads are added up in another order
            content["engine"]["threads"] = threads
        return content

    def differences(self, other: Experiment) -> str:
        """The first few settings in which the paths of two experiments differ, for people."""
        mine, theirs = (
            {key: value for key, value in flat(one._identity(path=True)).items() if value is not None}
            for one in (self, other)
        )
        keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        shown = ", ".join(f"{key} = {_value(mine, key)} there, {_value(theirs, key)} here" for key in keys[:3])
        return shown + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")

    def to_toml(self) -> str:
        """The whole experiment, defaults included, as a TOML file that `fedgg run` reads."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def changed(self, changes: dict[str, Any]) -> Experiment:
        """A copy with dotted keys replaced, as {"local.lr": 0.1}; another name or rule drops the old one's settings.

        So does the split `given` with the number of clients of another one.
        """
        content = self.model_dump(mode="json", exclude_none=True)
        for key, value in sorted(
            changes.items(), key=lambda change: change[0] not in (*NAMED_PARTS, "personal.method")
        ):
            place = content
            *path, last = key.split(".")
            for part in path:
                if not isinstance(place.setdefault(part, {}), dict):
                    raise UserError(f"{key!r}: {part!r} is a value, not a section")
                place = place[part]
            if path and last == "name" and path[0] in REMAINING and place.get("name") != value:
                for setting in place.keys() - REMAINING[path[0]]:
                    del place[setting]
            if key in ("robust.rule", "personal.method") and place.get(last) != value:
                place.clear()
            if key in ("split.scheme", "data.source") and place.get(last) != value:
                for setting in getattr(self, path[0]).settings:
                    place.pop(setting)
            place[last] = value
        is_given_now = changes.get("split.scheme") == "given" != self.split.scheme  # by clients of its own
        for key in FOLLOW_THE_DATA:
            section, _, name = key.partition(".")
            is_set = name in getattr(self, section).model_fields_set and not (is_given_now and name == "clients")
            if not is_set and not {key, section} & changes.keys():
                content[section].pop(name)
        return Experiment(**content)


def described_settings() -> list[tuple[str, str, str]]:
    """Every key of an experiment with its default and its meaning."""
    rows = []
    for name, field in Experiment.model_fields.items():
        section = section_in(field.annotation)
        if section is None or field.default is None:
            rows.append((name, _shown(field.default), field.description or ""))
        if section is not None:
            inner = section.model_fields
            rows += [(f"{name}.{key}", _shown(f.default), f.description or "") for key, f in inner.items()]
        if section is not None and issubclass(section, PartConfig):
            rows += [(f"{name}.{key}", *row) for key, row in section.undeclared_settings().items()]
    return rows


def _shown(default: Any) -> str:
    return (
        ""
        if default in (None, PydanticUndefined)
        else str(default).lower()
        if isinstance(default, bool)
        else str(default)
    )


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return files.read_toml(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        script = f"; run a script of your own with python {path}" if path.suffix == ".py" else ""
        raise UserError(f"{path} is not valid TOML: {error}{script}") from error


def load_experiment(path: Path) -> Experiment:
    content = read_toml(path)
    if isinstance(content.get("variants"), dict):
        raise UserError(f"{path} is a study of several experiments, not one: fedgg compare {path}")
    try:
        return Experiment(**content)
    except UserError as error:
        raise UserError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from error


def _holds(value: Any, condition: Callable[[Any], bool]) -> bool:
    """Whether the value, or anything within it, is such."""
    if isinstance(value, dict):
        return any(_holds(inner, condition) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(inner, condition) for inner in value)
    return condition(value)


def _value(settings: Mapping[str, Any], key: str) -> Any:
    """A setting for an error message: one that is not there is in a section that is off, or has its default."""
    return settings.get(key, "off" if key.partition(".")[0] in OFF_UNLESS_THERE else "its default")
