"""Whether the rows of a study form a grid of settings, as in a sweep: its axes and the place of each row on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedgg.analysis.labels import short_names
from fedgg.runfolder.record_types import StudyRecord, differing, flat

CHOICES = (".name", ".rule", ".kind")  # settings on which other settings of their section depend
SWITCHES = ("robust.rule", "attack.kind")  # their section is absent if they are off
FILLED = 0.5  # share of the grid's cells that must have a row; otherwise it is not shown as a sweep


@dataclass(frozen=True)
class SweepGrid:
    """The values of each axis in order, and the position of each label on the axes."""

    values: dict[str, tuple[Any, ...]]
    places: dict[str, tuple[int, ...]]


def sweep_grid(study: StudyRecord) -> SweepGrid | None:
    """None if the rows do not form a grid: they differ in the algorithm alone, or in settings that only some have."""
    recorded = {label: flat(next(iter(by_seed.values())).config) for label, by_seed in study.runs.items() if by_seed}
    off = {key: "none" for key in SWITCHES if any(key in row for row in recorded.values())}
    settings = {label: {**off, **row} for label, row in recorded.items()}
    keys = _independent(differing(settings.values()), settings)
    if len(settings) < 2 or not keys or keys == ["algorithm.name"]:
        return None
    if not all(key in row for row in settings.values() for key in keys):
        return None
    values = {key: _ordered(settings, key) for key in keys}
    places = {label: tuple(values[key].index(_hashable(row[key])) for key in keys) for label, row in settings.items()}
    cells = math.prod(map(len, values.values()))
    # Two settings that always change together fill a small part of their grid: that is not a sweep over both.
    if len(set(places.values())) < len(places) or len(places) < FILLED * cells:
        return None
    return SweepGrid({key: _shown(these) for key, these in values.items()}, places)


def _independent(keys: list[str], settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Without the settings that only one value of an axis has: `robust.trim` is not an axis beside `robust.rule`."""
    whole = [key for key in keys if all(key in row for row in settings.values())]
    choices = {key.rpartition(".")[0] for key in whole if key.endswith(CHOICES)}
    return [key for key in keys if key in whole or key.rpartition(".")[0] not in choices]


def _ordered(settings: Mapping[str, Mapping[str, Any]], key: str) -> tuple[Any, ...]:
    """Numbers by size, other values in the order of the rows."""
    values = tuple(dict.fromkeys(_hashable(row[key]) for row in settings.values()))
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return tuple(sorted(values))
    return values


def _shown(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Classes by their names rather than by their files."""
    names = short_names(value for value in values if isinstance(value, str))
    return tuple(names[value] if isinstance(value, str) else value for value in values)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else repr(value)
