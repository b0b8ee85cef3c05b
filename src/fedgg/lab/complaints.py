"""What is wrong with an experiment, in one line: the key, the value, and the nearest valid key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from fedgg.algorithms import ALGORITHMS


def nearest(word: str, choices: Iterable[str], section: str = "") -> str:
    """`: did you mean 'x'?`, or the list of choices when nothing is near; with the section they are keys of."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    within = f"{section}." if section else ""
    if close:
        return f": did you mean {within + close[0]!r}?"
    return f": choose from {', '.join(within + choice for choice in choices)}"


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
                f"unknown key {key!r}: choose from {', '.join(f'{place[0]}.{own}' for own in _keys(model, place[:-1]))}"
            )
        elsewhere = [full for full in _all_keys(model) if full.endswith(f".{place[-1]}")]
        if elsewhere:
            return f"unknown key {key!r}: did you mean {elsewhere[0]!r}?"
        if len(place) == 1 and place[0] in _ALGORITHMS_KEYS:
            return f"unknown key {key!r}: did you mean 'algorithm.{key}'?"
        if len(place) == 1 and isinstance(problem["input"], dict):
            whole = [f"{key}.{inner}" for inner in problem["input"]][:1]
            if close := [one for full in whole for one in difflib.get_close_matches(full, _all_keys(model), n=1)]:
                return f"unknown key {whole[0]!r}: did you mean {close[0]!r}?"
        return f"unknown key {key!r}{nearest(place[-1], _keys(model, place[:-1]), '.'.join(place[:-1]))}"
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type") and key in model.model_fields:
        inner = ", ".join(f"{key}.{one}" for one in _keys(model, [key])[:3])
        return f"{key} = {_shown(problem['input'])}: {key} is a section; write {inner}"
    if problem["type"] == "missing":
        names = _names_for(model, place)
        return f"{key} is missing" + (f": choose from {', '.join(names)}" if names else "")
    message = problem["msg"].removeprefix("Value error, ")
    if not key or (problem["type"] == "value_error" and isinstance(problem["input"], dict)):
        return str(message)  # about several settings of a section: the message names them
    return f"{key} = {_shown(problem['input'])}: {message[0].lower()}{message[1:]}"


_ALGORITHMS_KEYS = {field.name for kind in ALGORITHMS.values() for field in fields(kind)}


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        inner = section_in(field.annotation)
        keys += [f"{prefix}{name}"] if inner is None else _all_keys(inner, f"{prefix}{name}.")
    return keys


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section a field holds, be it always there or off unless it is set."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _keys(model: type[BaseModel], path: list[str]) -> list[str]:
    return list(_section_at(model, path).model_fields)


def _names_for(model: type[BaseModel], place: list[str]) -> list[str]:
    """What there is to choose from, where the value is one of some names."""
    annotation = _section_at(model, place[:-1]).model_fields[place[-1]].annotation
    return [str(name) for name in get_args(annotation)] if get_origin(annotation) is Literal else []


def _section_at(model: type[BaseModel], path: list[str]) -> type[BaseModel]:
    for part in path:
        model = section_in(model.model_fields[part].annotation) or model
    return model
