"""What is wrong with an experiment, in one line: the key, the value, and the nearest valid key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fedgg.algorithms import ALGORITHMS


def nearest(word: str, choices: Iterable[str]) -> str:
    """`: did you mean 'x'?`, or the list of choices when nothing is near."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else f": choose from {', '.join(choices)}"


def one_line(error: ValidationError, model: type[BaseModel]) -> str:
    problems = [_describe(problem, model) for problem in error.errors(include_url=False)]
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _describe(problem: Any, model: type[BaseModel]) -> str:
    place = [str(part) for part in problem["loc"]]
    key = ".".join(place)
    if problem["type"] == "extra_forbidden":
        elsewhere = [full for full in _all_keys(model) if full.endswith(f".{place[-1]}")]
        if elsewhere:
            return f"unknown key {key!r}: did you mean {elsewhere[0]!r}?"
        if len(place) == 1 and place[0] in _ALGORITHMS_KEYS:
            return f"unknown key {key!r}: did you mean 'algorithm.{key}'?"
        return f"unknown key {key!r}{nearest(place[-1], _keys(model, place[:-1]))}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if not key or (problem["type"] == "value_error" and isinstance(problem["input"], dict)):
        return str(message)  # about several settings of a section: the message names them
    return f"{key} = {problem['input']!r}: {message[0].lower()}{message[1:]}"


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
    for part in path:
        model = section_in(model.model_fields[part].annotation) or model
    return list(model.model_fields)
