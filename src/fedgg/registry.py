"""Parts of an experiment by name: one `Registry` for each kind, beside the parts themselves.

`fedgg.algorithms.ALGORITHMS`, `fedgg.core.optimisers.OPTIMISERS` and `SCHEDULES`, `fedgg.core.tasks.TASKS`,
`fedgg.core.metrics.METRICS`, `fedgg.models.MODELS`, `fedgg.data.DATASETS`, `fedgg.data.SPLITS`,
`fedgg.aggregation.RULES` and `fedgg.engines.ENGINES`. Help texts, error messages and the lists in docs/parts.md are
generated from them. A part is imported when it is first used, so that `fedgg --help` does not import torch.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Generic, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from fedgg.errors import UserError

Part = TypeVar("Part")

# The settings that name a part, each of which may also name code of the user's: FILE.py:NAME or MODULE:NAME.
NAMED_PARTS = (
    "task.name",
    "model.name",
    "algorithm.name",
    "optimiser.name",
    "schedule.name",
    "server_schedule.name",
    "data.source",
    "split.scheme",
    "robust.rule",
    "engine.name",
)
ARRAYS_IN_FILE = "npz:"  # begins the name of a file of arrays, not of a module
HUGGING_FACE = "hf:"  # begins the name of a data set of the package `datasets`


def names_code(name: str) -> bool:
    """Whether a part of this name is code outside the library."""
    return ":" in name and not name.startswith((ARRAYS_IN_FILE, HUGGING_FACE))


def nearest(word: str, choices: Iterable[str], section: str = "") -> str:
    """`: did you mean 'x'?`, or the list of choices where none is similar; with the section whose keys they are."""
    return f": {suggestion(word, choices, section)}"


def suggestion(word: str, choices: Iterable[str], section: str = "") -> str:
    choices = list(choices)
    similar = [choice for choice in choices if choice.lower() == word.lower()]
    cutoff = 0.6 if len(word) in (3, 4) else 0.5  # most short words share half of their letters with another
    similar = similar or difflib.get_close_matches(word, choices, n=1, cutoff=cutoff)
    similar = similar or difflib.get_close_matches(word.lower().replace("-", ""), choices, n=1, cutoff=cutoff)
    within = f"{section}." if section else ""
    if variants := [choice for choice in choices if choice.startswith(f"{word.lower()}-")]:  # of one data set
        return f"choose from {', '.join(variants)}"
    if similar:
        return f"did you mean {within + similar[0]!r}?"
    return f"choose from {', '.join(within + choice for choice in choices)}"


def first_line(part: object) -> str:
    """The first paragraph of a docstring, on one line."""
    paragraph = (inspect.getdoc(part) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


class Registry(Mapping[str, Part], Generic[Part]):
    """From names to classes or functions; an entry is the object itself, or "module:name", imported when it is used."""

    def __init__(self, kind: str, entries: Mapping[str, Part | str], code: str):
        """`kind`: what an entry is called in messages; `code`: what a FILE.py must define to be used in its place,
        CLASS, FUNCTION, or NAME for either of them."""
        self.kind = kind
        self.code = code
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Part:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = cast("Part", getattr(importlib.import_module(module), attribute))
            self._entries[name] = entry
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def descriptions(self) -> dict[str, str]:
        """Of every entry, the first paragraph of its docstring."""
        return {name: first_line(self[name]) for name in self}

    def choices(self, *others: str) -> str:
        """What the setting may be, for help texts; `others` are values beside the registered names."""
        either = " of a function or class" if self.code == "NAME" else ""
        return f"{', '.join([*others, *self])}, FILE.py:{self.code} or MODULE:{self.code}{either}"

    def suggestion(self, name: str, *others: str) -> str:
        """What may have been meant by a name that is not here."""
        if name.endswith(".py"):
            code = "function or class" if self.code == "NAME" else self.code.lower()
            return f"name the {code} too, as in {name}:{'MyClass' if self.code == 'CLASS' else 'my_function'}"
        return suggestion(name, [*others, *self])

    def check(self, name: str) -> None:
        """UserError where the name is neither registered nor that of user code."""
        if name not in self and not names_code(name):
            raise UserError(f"unknown {self.kind} {name!r}: {self.suggestion(name)}")


def accepted_settings(part: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a class or function that can be given by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: one for name, one in inspect.signature(part).parameters.items() if one.kind in kinds}


def described_parameters(part: Any) -> dict[str, tuple[str, str]]:
    """Of every such parameter the default and the meaning, as text; empty if there is none.

    The meaning is what `setting` declares, or the text of `Annotated[type, text]` in a function, with the choices of a
    `Literal`.
    """
    declared: Mapping[str, str | None]
    if is_dataclass(part):
        declared = {field.name: field.metadata.get("about") for field in fields(part)}
    else:
        declared = _annotated(part)
    defaults = {name: one.default for name, one in accepted_settings(part).items()} | getattr(part, "defaults", {})
    return {
        name: ("" if default in (None, inspect.Parameter.empty) else str(default), declared.get(name) or "")
        for name, default in defaults.items()
    }


def _annotated(function: Any) -> dict[str, str]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):  # a user's annotations need not be importable
        return {}
    meanings = {}
    for name, hint in hints.items():
        note, kind = getattr(hint, "__metadata__", ("",))[0], getattr(hint, "__origin__", None)
        if isinstance(note, str) and note:
            choices = f" (one of {', '.join(map(str, get_args(kind)))})" if get_origin(kind) is Literal else ""
            meanings[name] = note + choices
    return meanings
