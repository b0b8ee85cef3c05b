"""The axes of a sweep, found in the settings of its rows: no need to have been told that it was one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedgg.analysis.labels import short_names
from fedgg.runfolder.dotted_settings import differing, flat
from fedgg.runfolder.records import StudyRecord

CHOICES = (".name", ".rule", ".kind")  # settings that bring settings of their own with them
SWITCHES = ("robust.rule", "attack.kind")  # whose section is not there where they are off
FILLED = 0.5  # of the grid: with less, the rows are a choice of settings and no sweep


@dataclass(frozen=True)
class Axes:
    """Each axis with its values in order, and where on them each label stands."""

    values: dict[str, tuple[Any, ...]]
    places: dict[str, tuple[int, ...]]


def axes_of(study: StudyRecord) -> Axes | None:
    """None where the rows differ in more than a grid can show: other algorithms, or settings that only some have."""
    told = {label: flat(next(iter(by_seed.values())).config) for label, by_seed in study.runs.items() if by_seed}
    off = {key: "none" for key in SWITCHES if any(key in own for own in told.values())}
    settings = {label: {**off, **own} for label, own in told.items()}
    keys = _told_by_a_choice(differing(settings.values()), settings)
    if len(settings) < 2 or not keys or keys == ["algorithm.name"]:
        return None
    if not all(key in own for own in settings.values() for key in keys):
        return None
    values = {key: _ordered(settings, key) for key in keys}
    places = {label: tuple(values[key].index(_hashable(own[key])) for key in keys) for label, own in settings.items()}
    cells = 1
    for of_key in values.values():
        cells *= len(of_key)
    # Two settings that always change together fill a small part of their grid: that is no sweep over both.
    if len(set(places.values())) < len(places) or len(places) < FILLED * cells:
        return None
    return Axes({key: _shown(these) for key, these in values.items()}, places)


def _told_by_a_choice(keys: list[str], settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Without the settings of one choice of an axis: a trimmed mean's `robust.trim` is no axis beside `robust.rule`."""
    whole = [key for key in keys if all(key in own for own in settings.values())]
    choices = {key.rpartition(".")[0] for key in whole if key.endswith(CHOICES)}
    return [key for key in keys if key in whole or key.rpartition(".")[0] not in choices]


def _ordered(settings: Mapping[str, Mapping[str, Any]], key: str) -> tuple[Any, ...]:
    """Numbers by size, anything else in the order in which it comes."""
    found = tuple(dict.fromkeys(_hashable(own[key]) for own in settings.values()))
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in found):
        return tuple(sorted(found))
    return found


def _shown(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Classes by their names rather than by their files."""
    names = short_names(value for value in values if isinstance(value, str))
    return tuple(names[value] if isinstance(value, str) else value for value in values)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else repr(value)
