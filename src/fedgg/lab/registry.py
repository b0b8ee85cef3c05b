"""From names to objects: algorithms and models, the library's own or a user's `MODULE:NAME` or `FILE.py:NAME`."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from fedgg.algorithms import ALGORITHMS
from fedgg.core.algorithm import Algorithm, Number, arithmetic_beside_fedavg, what_it_must_be
from fedgg.core.buffers import not_finite
from fedgg.core.sampling import torch_stream
from fedgg.engines.user_modules import PREFIX, module_of
from fedgg.errors import UserError
from fedgg.files import check_regular
from fedgg.lab.config import Experiment
from fedgg.lab.config_errors import elsewhere, nearest
from fedgg.lab.trust import HANDED_IN, Code, check_trusted, code_at, names_code, note_use
from fedgg.models import MODELS


def find_object(address: str) -> Any:
    """The object behind `package.module:Name` or `path/to/file.py:Name`; only code that the user allows is loaded."""
    code, name = _code_and_name(address)
    allowed = check_trusted(code)
    try:
        module = importlib.import_module(code.place) if code.text is None else module_of(Path(code.place), code.text)
    except Exception as error:
        raise UserError(f"{code.place} cannot be imported: {type(error).__name__}: {error}") from error
    note_use(code, allowed)
    if not hasattr(module, name):
        public = [n for n, thing in vars(module).items() if isinstance(thing, type) and not n.startswith("_")]
        raise UserError(f"{code.place} has no {name!r}{nearest(name, public)}")
    return getattr(module, name)


def _code_and_name(address: str) -> tuple[Code, str]:
    """Found without running any of it."""
    place, _, name = address.rpartition(":")
    if place in ALGORITHMS or place in MODELS:
        raise UserError(f"{address!r}: a setting needs a value, as in {address}=1")
    if address.startswith(f"{HANDED_IN}:"):
        raise UserError(f"{address} was handed in as an object from Python: hand it in again, as to fedgg.run")
    return code_at(place), name


def code_of_parts(experiment: Experiment) -> dict[str, Code]:
    """The code that the experiment's model and algorithm would run, where they are not the library's."""
    names = {"model": experiment.model.name, "algorithm": experiment.algorithm.name}
    return {part: _code_and_name(name)[0] for part, name in names.items() if names_code(name)}


def check_code(experiment: Experiment) -> None:
    """UserError, or a question to the user, before anything begins, where the experiment runs code not yet allowed."""
    for code in code_of_parts(experiment).values():
        check_trusted(code)


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
    types, limits = get_type_hints(kind), {field.name: field.metadata for field in fields(kind)}
    for key, value in values.items():
        _check_setting(f"algorithm.{key}", value, types[key], limits[key])
    numbers = {key for key, value in values.items() if types[key] in (Number, float) and isinstance(value, int)}
    return values | {key: float(values[key]) for key in numbers}


def _unknown_setting(section: str, name: str, key: str, known: list[str]) -> str:
    suggestion = nearest(key, known, section) if known else ": it has none"
    others = elsewhere(Experiment, f"{section}.{key}")
    return f"{section} {name} has no setting {key!r}{suggestion}" + (f"; elsewhere: {others}" if others else "")


def _check_setting(key: str, value: Any, kind: Any, limits: Mapping[str, Any] | None = None) -> None:
    wrong = what_it_must_be(value, kind, limits)
    if wrong is not None:
        raise UserError(f"{key} = {value!r}: {wrong}")


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
    if names_code(name):
        check_trusted(_code_and_name(name)[0])
    elif name not in MODELS:
        raise UserError(f"unknown model {name!r}{nearest(name, MODELS)}")


def model_maker(name: str) -> Callable[..., nn.Module]:
    """The library's model, or a user's class; nothing of another type is called with an experiment's settings."""
    check_model_name(name)
    if name in MODELS:
        return MODELS[name]
    maker = find_object(name)
    if isinstance(maker, type) and issubclass(maker, nn.Module):
        return maker
    if inspect.isfunction(maker) and _is_factory(maker, name.rpartition(":")[0]):
        return maker
    raise UserError(
        f"model {name} must be a subclass of torch.nn.Module, or a function of {name.rpartition(':')[0]} that is "
        f"annotated to return one"
    )


def _is_factory(function: Callable[..., Any], place: str) -> bool:
    """Whether a function belongs to the named file or package, and its annotation says that it makes modules."""
    home = function.__module__ or ""
    own = home.startswith(PREFIX) if place.endswith(".py") else home.partition(".")[0] == place.partition(".")[0]
    try:
        made = get_type_hints(function).get("return")
    except Exception:  # annotations of a user's own can name anything
        return False
    return own and isinstance(made, type) and issubclass(made, nn.Module)


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
    maker = model_maker(name) if isinstance(name, str) else name
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
    with torch_stream(seed, "model"):
        try:
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
    try:
        given = read_tensors(path)
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        constants = {name: tensor.cpu().clone() for name, tensor in module.state_dict().items() if name not in trained}
        load_weights(module, given, path)
        for name, tensor in given.items():
            usual = constants.get(name, torch.zeros_like(tensor))  # a constant may be infinite
            if not_finite({name: usual}, {name: tensor}):
                raise UserError(f"{path}: {name} holds NaN or infinity")
    except UserError as error:
        raise UserError(f"model.start: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The content of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        check_regular(path)
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from error


def load_weights(module: nn.Module, given: dict[str, Tensor], path: Path) -> None:
    """Replace the module's weights by those of a file, which must be of the same names and shapes."""
    own = module.state_dict()
    missing, foreign = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or foreign:
        raise UserError(f"{path} does not fit the model: missing {missing[:3]}, unknown {foreign[:3]}")
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            shapes = f"{tuple(given[name].shape)}, the model needs {tuple(tensor.shape)}"
            raise UserError(f"{path}: {name} has shape {shapes}")
    module.load_state_dict(given)
