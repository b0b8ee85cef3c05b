"""From the names in an experiment to its parts: registered ones, or user code `FILE.py:NAME` or `MODULE:NAME`.

User code is imported only if the user allows it, and an object is called only if it is what its section needs.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_origin, get_type_hints

from torch import nn

from fedgg.aggregation import RULES
from fedgg.algorithms import ALGORITHMS
from fedgg.core.algorithm import Algorithm, Number, arithmetic_beside_fedavg, what_it_must_be
from fedgg.core.metrics import METRICS
from fedgg.core.optimisers import OPTIMISERS, SCHEDULES
from fedgg.core.random_choices import torch_stream
from fedgg.core.server import Collector
from fedgg.core.tasks import TASKS
from fedgg.data import DATASETS, NOT_SETTINGS, SPLITS, registered_name
from fedgg.data.dataset import Dataset, unknown_data_set
from fedgg.data.partition import OFFERED
from fedgg.engines import ENGINES, Engine
from fedgg.engines.import_user_file import PREFIX, module_of
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.config_errors import elsewhere
from fedgg.lab.config_sections import DataConfig, EngineConfig, SplitConfig
from fedgg.lab.optional_sections import RobustConfig
from fedgg.lab.trusted_code import HANDED_IN, Code, check_trusted, code_at
from fedgg.models import MODELS
from fedgg.older_python import is_class
from fedgg.registry import NAMED_PARTS, Registry, accepted_settings, names_code, nearest

Part = TypeVar("Part")
REGISTRIES: tuple[Registry[Any], ...] = (
    ALGORITHMS,
    OPTIMISERS,
    SCHEDULES,
    TASKS,
    METRICS,
    MODELS,
    DATASETS,
    SPLITS,
    RULES,
    ENGINES,
)
USED_CODE: dict[str, tuple[Code, str]] = {}  # by place: the code that this process has run, and what allowed it


# User code -----------------------------------------------------------------------------------------------------------


def find_object(address: str) -> Any:
    """The object behind `package.module:Name` or `path/to/file.py:Name`; only code that the user allows is loaded."""
    code, name = _code_and_name(address)
    allowed = check_trusted(code)
    try:
        module = importlib.import_module(code.place) if code.text is None else module_of(Path(code.place), code.text)
    except Exception as error:
        raise UserError(f"{code.place} cannot be imported: {type(error).__name__}: {error}") from error
    USED_CODE[code.place] = (code, allowed)
    if not hasattr(module, name):
        public = [n for n, thing in vars(module).items() if callable(thing) and not n.startswith("_")]
        raise UserError(f"{code.place} has no {name!r}{nearest(name, public)}")
    return getattr(module, name)


def _code_and_name(address: str) -> tuple[Code, str]:
    """Found without running any of it."""
    place, _, name = address.rpartition(":")
    if any(place in registry for registry in REGISTRIES):
        raise UserError(f"{address!r}: a setting needs a value, as in {address}=1")
    if address.startswith(f"{HANDED_IN}:"):
        raise UserError(f"{address} was handed in as an object from Python: hand it in again, as to fedgg.run")
    return code_at(place), name


def named_parts(experiment: Experiment) -> dict[str, str]:
    """The names of the experiment's parts, by section."""
    names: dict[str, str] = {}
    for setting in NAMED_PARTS:
        section, _, key = setting.partition(".")
        config = getattr(experiment, section)
        if config is not None:
            names[section] = getattr(config, key)
    if experiment.task.loss is not None:
        names["task.loss"] = experiment.task.loss
    return names | {f"metrics[{place}]": name for place, name in enumerate(experiment.metrics)}


def used_code(experiment: Experiment) -> dict[str, dict[str, str]]:
    """By part, for versions.json: the file as it was named, its SHA-256, and what allowed it."""
    files = {}
    for part, name in named_parts(experiment).items():
        code, allowed = USED_CODE.get(name.rpartition(":")[0], (None, ""))
        if code is not None:
            files[part] = {"path": code.place, "sha256": code.sha256, "allowed": allowed}
    return files


def code_of_parts(experiment: Experiment) -> dict[str, Code]:
    """The user code that the experiment's parts would run, by section."""
    return {part: _code_and_name(name)[0] for part, name in named_parts(experiment).items() if names_code(name)}


def check_code(experiment: Experiment) -> None:
    """UserError, or a question to the user, before anything begins, where the experiment runs code not yet allowed."""
    for code in code_of_parts(experiment).values():
        check_trusted(code)


def check_parts(experiment: Experiment) -> None:
    """UserError where a name is unknown, code is not allowed, or an object is not what its section needs."""
    check_code(experiment)
    check_needs(build_algorithm(experiment.algorithm.name, experiment.algorithm.settings), experiment)
    MODELS.check(experiment.model.name)
    split_function(experiment.split)
    if names_code(experiment.data.source):
        data_function(experiment.data)
    elif experiment.data.settings:
        check_data_settings(experiment.data)
    if experiment.robust is not None:
        build_rule(experiment.robust)
    if experiment.engine.name != "auto":
        engine_class(experiment.engine.name)


def part_named(registry: Registry[Part], name: str) -> Part | Any:
    """The registered part, or the object behind the name of user code, whatever it is."""
    if name in registry:
        return registry[name]
    registry.check(name)
    return find_object(name)


def _is_function_of(place: str, thing: Any) -> bool:
    """Whether it is a function that the named file or package defines: what these import was not allowed with them."""
    if not inspect.isfunction(thing):
        return False
    home = thing.__module__ or ""
    return home.startswith(PREFIX) if place.endswith(".py") else home.partition(".")[0] == place.partition(".")[0]


def _returned_type(function: Callable[..., Any]) -> Any:
    """The class that a function is annotated to return, without what it contains."""
    try:
        annotation = get_type_hints(function).get("return")
    except Exception:  # a user's annotations can name anything
        return None
    return get_origin(annotation) or annotation


# Settings ------------------------------------------------------------------------------------------------------------


def check_settings(
    section: str,
    name: str,
    part: Callable[..., Any],
    settings: Mapping[str, Any],
    offered: Iterable[str] = (),
    may_be_negative: bool = False,
) -> None:
    """UserError for settings that a class or function has no parameter for, or of another type than it declares.

    `offered`: parameters that are not settings. `may_be_negative`: floating point settings.
    """
    try:
        parameters = inspect.signature(part).parameters
    except (TypeError, ValueError):
        raise UserError(f"{section} {name} is a {type(part).__name__}, which cannot be called with settings") from None
    known = [key for key in parameters if key not in offered]
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in settings:
        if key not in known and not takes_any:
            raise UserError(_unknown_setting(section, name, key, known))
    try:
        hints = get_type_hints(part if inspect.isfunction(part) else part.__init__)
    except (NameError, TypeError, AttributeError):  # a user's annotations need not be importable
        return
    limits = {field.name: field.metadata for field in fields(part)} if is_dataclass(part) else {}
    for key in settings:
        # Numbers, switches and words are checked; other annotations say less than what a setting may be.
        if hints.get(key) in (int, float, bool, str) or get_origin(hints.get(key)) is Literal:
            is_negative = isinstance(settings[key], int | float) and settings[key] < 0
            if not (may_be_negative and hints[key] is float and is_negative):
                _check_setting(f"{section}.{key}", settings[key], hints[key], limits.get(key) or None)


def _check_required(section: str, name: str, part: Callable[..., Any], available: Iterable[str]) -> None:
    """UserError where a parameter has neither a default nor a value."""
    parameters = inspect.signature(part).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [one.name for one in parameters if one.default is one.empty and one.kind not in several]
    if missing := [parameter for parameter in required if parameter not in set(available)]:
        raise UserError(f"{section} {name} has a parameter {missing[0]!r} without a value: give it a default")


def _unknown_setting(section: str, name: str, key: str, known: list[str]) -> str:
    suggestion = nearest(key, known, section) if known else ": it has none"
    others = elsewhere(Experiment, f"{section}.{key}")
    return f"{section} {name} has no setting {key!r}{suggestion}" + (f"; elsewhere: {others}" if others else "")


def _check_setting(key: str, value: Any, kind: Any, limits: Mapping[str, Any] | None = None) -> None:
    wrong = what_it_must_be(value, kind, limits)
    if wrong is not None:
        raise UserError(f"{key} = {value!r}: {wrong}")


# Algorithms ----------------------------------------------------------------------------------------------------------


def algorithm_class(name: str) -> type[Algorithm]:
    kind = part_named(ALGORITHMS, name)
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise UserError(f"{name} is not an algorithm: it must be a subclass of fedgg.Algorithm")
    return kind


def build_algorithm(name: str, settings: dict[str, Any]) -> Algorithm:
    kind = ALGORITHMS.get(name) or algorithm_class(name)
    if not settings:
        return kind()
    known = [field.name for field in fields(kind)]
    for key in settings:
        if key not in known:
            raise UserError(_unknown_setting("algorithm", name, key, known))
    return kind(**_checked(kind, settings))


def given_algorithm(given: Any) -> Algorithm:
    """An algorithm from Python: an instance, or a class or name whose defaults are meant; its settings are checked."""
    if isinstance(given, str):
        if "=" in given:
            raise UserError(f"algorithm {given!r}: from Python settings are given as in fedgg.FedGG(mu=0.1)")
        return build_algorithm(given, {})
    algorithm = given() if isinstance(given, type) and issubclass(given, Algorithm) else given
    if not isinstance(algorithm, Algorithm):
        raise UserError(f"algorithm must be a fedgg.Algorithm such as fedgg.FedGG(mu=0.1), got {given!r}")
    values = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    changed = {key: value for key, value in _checked(type(algorithm), values).items() if value is not values[key]}
    return replace(algorithm, **changed) if changed else algorithm


def _checked(kind: type[Algorithm], values: dict[str, Any]) -> dict[str, Any]:
    """The values, numbers as floats: experiments that differ in a number train as one program, 1 or 1.0."""
    types, limits = get_type_hints(kind), {field.name: field.metadata for field in fields(kind)}
    for key, value in values.items():
        _check_setting(f"algorithm.{key}", value, types[key], limits[key])
    numbers = {key for key, value in values.items() if types[key] in (Number, float) and isinstance(value, int)}
    return values | {key: float(values[key]) for key in numbers}


def extra_work(experiment: Experiment) -> float:
    """Local passes over examples, as many times FedAvg's."""
    chosen = experiment.algorithm
    return arithmetic_beside_fedavg(build_algorithm(chosen.name, chosen.settings), experiment.local.epochs)


def check_needs(algorithm: Algorithm, experiment: Experiment) -> None:
    """Complain about an experiment that lacks what its algorithm cannot do without."""
    if algorithm.needs_proxy and not experiment.data.proxy:
        raise UserError(
            f"{type(algorithm).__name__} needs examples at the server: set data.proxy, for instance to 100; "
            f"they are taken out of the clients' training examples"
        )


# Data sets and splits ------------------------------------------------------------------------------------------------


def check_data_settings(data: DataConfig) -> None:
    """UserError where a setting of a registered data set is not of the type it declares."""
    name = registered_name(data.source)
    if name not in DATASETS:
        raise unknown_data_set(data.source)
    check_settings("data", name, DATASETS[name], data.settings, NOT_SETTINGS)


def data_function(data: DataConfig) -> Callable[..., Any]:
    """The function of user code that returns a data set, its settings checked."""
    name = data.source
    function, place = find_object(name), name.rpartition(":")[0]
    kind = _returned_type(function) if _is_function_of(place, function) else None
    if not (is_class(kind) and issubclass(kind, tuple | list | Dataset)):
        raise UserError(
            f"data.source = {name!r} must be a function of {place} that is annotated to return a tuple (x_train, "
            f"y_train, x_test, y_test), optionally with the client of each training example, or a Dataset"
        )
    check_settings("data", name, function, data.settings, ("folder",))
    _check_required("data", name, function, ("folder", *data.settings))
    return cast("Callable[..., Any]", function)


def split_function(split: SplitConfig) -> Callable[..., Any]:
    """The registered split, or a user's function of `labels` and `clients`, its settings checked."""
    if (registered := SPLITS.get(split.scheme)) is not None:
        if split.settings:
            check_settings("split", split.scheme, registered, split.settings, OFFERED)
        return registered
    function, place = part_named(SPLITS, split.scheme), split.scheme.rpartition(":")[0]
    if not (_is_function_of(place, function) and {"labels", "clients"} <= accepted_settings(function).keys()):
        raise UserError(
            f"split.scheme = {split.scheme!r} must be a function of {place} with the parameters `labels` and `clients`"
        )
    check_settings("split", split.scheme, function, split.settings, OFFERED)
    _check_required("split", split.scheme, function, (*OFFERED, *split.scheme_settings))
    return cast("Callable[..., Any]", function)


# Aggregation rules and engines ---------------------------------------------------------------------------------------


def build_rule(robust: RobustConfig) -> Collector:
    kind = part_named(RULES, robust.rule)
    if not (isinstance(kind, type) and issubclass(kind, Collector)):
        raise UserError(f"robust.rule = {robust.rule!r} must be a subclass of fedgg.core.server.Collector")
    settings = robust.rule_settings
    check_settings("robust", robust.rule, kind, settings)
    _check_required("robust", robust.rule, kind, settings)
    try:
        return kind(**settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"robust.rule = {robust.rule!r} cannot be made with {settings}: {error}") from error


def engine_class(name: str) -> type[Engine]:
    kind = part_named(ENGINES, name)
    if not (isinstance(kind, type) and all(callable(getattr(kind, method, None)) for method in ("train", "score"))):
        raise UserError(f"engine.name = {name!r} must be a class with the methods train and score")
    if name not in ENGINES:
        _check_required("engine", name, kind, EngineConfig.model_fields)
    return cast("type[Engine]", kind)


# Models --------------------------------------------------------------------------------------------------------------


def model_maker(name: str) -> Callable[..., nn.Module]:
    """The registered model, or a user's class or annotated function."""
    maker, place = part_named(MODELS, name), name.rpartition(":")[0]
    if name in MODELS or (isinstance(maker, type) and issubclass(maker, nn.Module)):
        return cast("Callable[..., nn.Module]", maker)
    made = _returned_type(maker) if _is_function_of(place, maker) else None
    if is_class(made) and issubclass(made, nn.Module):
        return cast("Callable[..., nn.Module]", maker)
    raise UserError(
        f"model {name} must be a subclass of torch.nn.Module, or a function of {place} that is annotated to return one"
    )


def build_model(
    name: str | Callable[..., nn.Module] | nn.Module,
    settings: dict[str, Any],
    shape: tuple[int, ...],
    classes: int,
    seed: int,
) -> nn.Module:
    """A module whose starting weights are a function of the seed (a module handed in keeps the weights it has)."""
    if isinstance(name, nn.Module):
        try:
            return copy.deepcopy(name)  # it is moved to the run's device and precision; the user's stays as it is
        except Exception as error:  # a module may hold anything
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"model {type(name).__name__} cannot be copied ({reason}): hand in a function that makes it instead"
            ) from error
    maker = (MODELS.get(name) or model_maker(name)) if isinstance(name, str) else name
    title = name if isinstance(name, str) else getattr(name, "__name__", "model")
    offered: dict[str, Any] = {"shape": shape, "classes": classes}
    if settings or title not in MODELS:
        check_settings("model", title, maker, settings, offered)
    accepted = inspect.signature(maker).parameters
    offered = {key: value for key, value in offered.items() if key in accepted}
    with torch_stream(seed, "model"):
        try:
            module = maker(**offered, **settings)
        except UserError:
            raise
        except Exception as error:  # a user's function may raise anything
            reason = f"{error}" if isinstance(error, TypeError | ValueError | RuntimeError) else repr(error)
            raise UserError(f"model {title} cannot be built with {settings or 'its defaults'}: {reason}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model {title} is a {type(module).__name__}, not a torch.nn.Module")
    return module
