"""From names to objects: algorithms and models, the library's own or a user's `MODULE:NAME` or `FILE.py:NAME`."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from fedgg.algorithms import ALGORITHMS
from fedgg.core.algorithm import Algorithm, Number, arithmetic_beside_fedavg
from fedgg.core.buffers import not_finite
from fedgg.core.seeds import torch_stream
from fedgg.engines.strangers import read_module
from fedgg.errors import UserError
from fedgg.lab.complaints import nearest
from fedgg.lab.config import Experiment
from fedgg.models import MODELS


def find_object(address: str) -> Any:
    """The object behind `package.module:Name` or `path/to/file.py:Name`."""
    place, _, name = address.rpartition(":")
    if place in ALGORITHMS or place in MODELS:
        raise UserError(f"{address!r}: a setting needs a value, as in {address}=1")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        public = [n for n, thing in vars(module).items() if isinstance(thing, type) and not n.startswith("_")]
        raise UserError(f"{place} has no {name!r}{nearest(name, public)}")
    return getattr(module, name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    return read_module(path)


def algorithm_class(name: str) -> type[Algorithm]:
    if ":" not in name:
        if name.endswith(".py"):
            raise UserError(f"{name}: name the class too, as in {name}:MyAlgorithm")
        if name not in ALGORITHMS:
            raise UserError(f"unknown algorithm {name!r}{nearest(name, ALGORITHMS)}")
        return ALGORITHMS[name]
    found = find_object(name)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise UserError(f"{name} is no algorithm: it must be a subclass of fedgg.Algorithm")
    return found


def build_algorithm(name: str, settings: dict[str, Any]) -> Algorithm:
    kind = algorithm_class(name)
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
    types = get_type_hints(kind)
    positive, infinite = (
        {field.name for field in fields(kind) if field.metadata.get(mark)} for mark in ("positive", "may_be_infinite")
    )
    for key, value in values.items():
        if not (key in infinite and isinstance(value, float) and value == float("inf")):
            _check_setting(f"algorithm.{key}", value, types[key])
        if key in positive and not isinstance(value, Tensor) and value == 0:
            raise UserError(f"algorithm.{key} = {value!r}: must be above zero")
    numbers = {key for key, value in values.items() if types[key] in (Number, float) and isinstance(value, int)}
    return values | {key: float(values[key]) for key in numbers}


def _unknown_setting(section: str, name: str, key: str, known: list[str]) -> str:
    said = nearest(key, known, section) if known else ": it has none"
    return f"{section} {name} has no setting {key!r}{said}"


def _check_setting(key: str, value: Any, kind: Any) -> None:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UserError(f"{key} = {value!r}: choose from {', '.join(map(str, get_args(kind)))}")
    elif kind is bool or kind is str:
        if not isinstance(value, kind):
            raise UserError(f"{key} = {value!r}: must be {'true or false' if kind is bool else 'text'}")
    elif kind is int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{key} = {value!r}: must be a whole number")
    elif not isinstance(value, Tensor):
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise UserError(f"{key} = {value!r}: must be a number, zero or more")
        if value == float("inf"):
            raise UserError(f"{key} = {value!r}: must be a finite number")


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


def check_model_name(name: str) -> None:
    if name.endswith(".py"):
        raise UserError(f"{name}: name the class too, as in {name}:MyModel")
    if ":" not in name and name not in MODELS:
        raise UserError(f"unknown model {name!r}{nearest(name, MODELS)}")


def build_model(
    name: str | Callable[..., nn.Module] | nn.Module,
    settings: dict[str, Any],
    shape: tuple[int, ...],
    classes: int,
    seed: int,
) -> nn.Module:
    """A module whose starting weights are a function of the seed (a module handed in keeps the weights it has)."""
    if isinstance(name, nn.Module):
        return copy.deepcopy(name)  # it is moved to the run's device and precision; the user's stays as it is
    if isinstance(name, str):
        check_model_name(name)
        maker = MODELS[name] if name in MODELS else find_object(name)
    else:
        maker = name
    title = name if isinstance(name, str) else getattr(name, "__name__", "model")
    offered = {"shape": shape, "classes": classes}
    try:
        accepted = inspect.signature(maker).parameters
    except (TypeError, ValueError):
        raise UserError(f"model {title} is a {type(maker).__name__}, nothing that makes a torch.nn.Module") from None
    for key in settings:
        if key not in accepted and not any(p.kind == p.VAR_KEYWORD for p in accepted.values()):
            known = [own for own in accepted if own not in offered]
            raise UserError(_unknown_setting("model", title, key, known))
    for key, kind in _plain_hints(maker).items():
        if key in settings:
            _check_setting(f"model.{key}", settings[key], kind)
    given = {key: value for key, value in offered.items() if key in accepted}
    try:
        with torch_stream(seed, "model"):
            module = maker(**given, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"model {title} cannot be built with {settings or 'its defaults'}: {error}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model {title} is a {type(module).__name__}, not a torch.nn.Module")
    return module


def _plain_hints(maker: Callable[..., Any]) -> dict[str, Any]:
    """The parameters whose annotation says what they must be: numbers, switches and words."""
    try:
        hints = get_type_hints(maker if inspect.isfunction(maker) else maker.__init__)
    except (NameError, TypeError, AttributeError):  # a user's annotations need not be importable
        return {}
    return {key: hint for key, hint in hints.items() if hint in (int, float, bool, str) or get_origin(hint) is Literal}


def load_start(module: nn.Module, path: Path) -> None:
    """Replace the module's weights by those of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        given = load_file(path)
    except FileNotFoundError:
        raise UserError(f"model.start: there is no file {path}") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"model.start: {path} is not a readable safetensors file: {error}") from error
    own = module.state_dict()
    missing, foreign = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or foreign:
        raise UserError(f"model.start: {path} does not fit the model: missing {missing[:3]}, unknown {foreign[:3]}")
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            shapes = f"{tuple(given[name].shape)}, the model needs {tuple(tensor.shape)}"
            raise UserError(f"model.start: {path}: {name} has shape {shapes}")
        usual = torch.zeros_like(given[name]) if name in trained else tensor.cpu()  # a constant may be infinite
        if not_finite({name: usual}, {name: given[name]}):
            raise UserError(f"model.start: {path}: {name} holds NaN or infinity")
    module.load_state_dict(given)
