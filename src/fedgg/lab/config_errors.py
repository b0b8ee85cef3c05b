"""What is wrong with an experiment, in one line: the key, the value, and the nearest valid key."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from fedgg.algorithms import ALGORITHMS
from fedgg.lab.config_sections import PartConfig
from fedgg.older_python import is_class
from fedgg.registry import accepted_settings, nearest

PLAIN = (str, int, float, list, tuple, dict, type(None))  # what an experiment is written with
# Keys in whose place a function, class or object may be handed in from Python, as an argument of `run` and `compare`.
ARGUMENTS = {
    "task": "loss",
    "model": "model",
    "data": "data",
    "algorithm": "algorithm",
    "task.name": "loss",
    "task.loss": "loss",
    "metrics": "metrics",
    "model.name": "model",
    "data.source": "data",
    "algorithm.name": "algorithm",
}


def one_line(error: ValidationError, model: type[BaseModel]) -> str:
    problems = [_describe(problem, model) for problem in error.errors(include_url=False)]
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:199]}…"


def _describe(problem: Any, model: type[BaseModel]) -> str:
    place = [str(part) for part in problem["loc"]]
    key = ".".join(place)
    if problem["type"] == "extra_forbidden":
        if ":" in key and key.partition(":")[0] in ALGORITHMS:
            name, _, setting = key.partition(":")
            return (
                f"unknown key {key!r}: a setting is 'algorithm.{setting}', its algorithm is said by --algorithm {name}"
            )
        if len(place) > 1 and place[-1] == "name":  # which other sections have: none of theirs is meant
            return (
                f"unknown key {key!r}: choose from {', '.join(f'{place[0]}.{one}' for one in _keys(model, place[:-1]))}"
            )
        section = _section_at(model, place[:-1])
        if issubclass(section, PartConfig) and place[-1] in section.undeclared_settings():
            assert section.registry is not None, "its parts have this setting"
            names = [name for name, part in section.registry.items() if place[-1] in accepted_settings(part)]
            return f"{key} is a setting of {' or '.join(names)}: leave it out"
        return f"unknown key {_unknown(place, problem['input'], model)}"
    is_object = problem["type"].endswith("_type") and not isinstance(problem["input"], PLAIN)
    argument = ARGUMENTS.get(place[0] if place[0] == "metrics" else key) if is_object else None
    if argument is not None:
        return (
            f"{key} = {_shown(problem['input'])}: functions, classes and objects are handed in beside the experiment, "
            f"as {argument}=...; in a variant of several they are named, FILE.py:NAME, after fedgg.trust('FILE.py')"
        )
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type") and key in model.model_fields:
        inner = ", ".join(f"{key}.{one}" for one in _keys(model, [key])[:3])
        return f"{key} = {_shown(problem['input'])}: {key} is a section; write {inner}"
    if problem["type"] == "missing":
        names = _names_for(model, place)
        return f"{key} is missing" + (f": choose from {', '.join(names)}" if names else "")
    field = _section_at(model, place[:-1]).model_fields.get(place[-1]) if is_object and place else None
    if field is not None:
        return f"{key} = {_shown(problem['input'])}: this is an object of Python; give {field.description}"
    message = problem["msg"].removeprefix("Value error, ")
    if not key or (problem["type"] == "value_error" and isinstance(problem["input"], dict)):
        return str(message)  # about several settings of a section: the message names them
    return f"{key} = {_shown(problem['input'])}: {message[0].lower()}{message[1:]}"


def _unknown(place: list[str], value: Any, model: type[BaseModel]) -> str:
    """The key and what may have been meant: a similar key of the same section first, then the same word elsewhere."""
    if len(place) == 1 and isinstance(value, dict) and value:  # an unknown section
        full = f"{place[0]}.{next(iter(value))}"
        close, same_word = difflib.get_close_matches(full, _all_keys(model), n=1), _elsewhere(model, full)
        has_word = bool(close) and close[0].rpartition(".")[2] == full.rpartition(".")[2]
        meant = [repr(close[0])] if close and (has_word or not same_word) else same_word
        return (
            f"{full!r}: did you mean {' or '.join(meant)}?"
            if meant
            else f"{place[0]!r}{nearest(place[0], _keys(model, []))}"
        )
    key, section, word = ".".join(place), ".".join(place[:-1]), place[-1]
    if not section:
        same_word = _elsewhere(model, word)
        return f"{key!r}" + (
            f": did you mean {' or '.join(same_word)}?" if same_word else nearest(word, _keys(model, []))
        )
    others, keys = elsewhere(model, key), _keys(model, place[:-1])
    if not others:
        return f"{key!r}{nearest(word, keys, section)}"
    # A key of another section has another meaning: it does not stand before a similar one of this section.
    close = difflib.get_close_matches(word, keys, n=1, cutoff=0.7)
    if close:
        return f"{key!r}: did you mean {f'{section}.{close[0]}'!r}? Elsewhere: {others}"
    return f"{key!r}: [{section}] has {', '.join(keys)}; elsewhere: {others}"


def elsewhere(model: type[BaseModel], key: str) -> str:
    """Keys of other sections with the same last word, each with its meaning; empty where there are none."""
    return ", ".join(_elsewhere(model, key, described=True))


def _elsewhere(model: type[BaseModel], key: str, *, described: bool = False) -> list[str]:
    section, _, word = key.rpartition(".")
    abouts = _all_keys(model)
    same = [full for full in abouts if full.rpartition(".")[2] == word and full.rpartition(".")[0] != section]
    keys = [f"{full!r} ({abouts[full].partition(';')[0]})" if described else repr(full) for full in same]
    return [*_of_algorithms(f"{section}_{word}"), *keys, *_of_algorithms(word)]


def _of_algorithms(setting: str) -> list[str]:
    names = [name for name, kind in ALGORITHMS.items() if setting in {field.name for field in fields(kind)}]
    return [f"'algorithm.{setting}' of {', '.join(names)}"] if names else []


def _all_keys(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Every key with its description."""
    keys: dict[str, str] = {}
    for name, field in model.model_fields.items():
        inner = section_in(field.annotation)
        keys |= {f"{prefix}{name}": field.description or ""} if inner is None else _all_keys(inner, f"{prefix}{name}.")
    return keys | {f"{prefix}{key}": about for key, about in _undeclared(model).items()}


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section a field holds, be it always there or off unless it is set."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if is_class(kind) and issubclass(kind, BaseModel)), None)


def _keys(model: type[BaseModel], path: list[str]) -> list[str]:
    section = _section_at(model, path)
    return [*section.model_fields, *_undeclared(section)]


def _undeclared(section: type[BaseModel]) -> dict[str, str]:
    """Keys that a section has through its registered parts, with their meaning."""
    rows = section.undeclared_settings() if issubclass(section, PartConfig) else {}
    return {key: about for key, (_, about) in rows.items()}


def _names_for(model: type[BaseModel], place: list[str]) -> list[str]:
    """What there is to choose from, where the value is one of some names."""
    field = _section_at(model, place[:-1]).model_fields[place[-1]]
    names = get_args(field.annotation) if get_origin(field.annotation) is Literal else field.examples or ()
    return [str(name) for name in names]


def _section_at(model: type[BaseModel], path: list[str]) -> type[BaseModel]:
    for part in path:
        model = section_in(model.model_fields[part].annotation) or model
    return model
