"""A run's settings under dotted keys: what some runs share, and what tells them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OWN = ("name", "seed")  # of a run, not of what it trains


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    dotted: dict[str, Any] = {}
    for key, value in content.items():
        dotted |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return dotted


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in dotted.items():
        *path, last = key.split(".")
        place: Any = content
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):  # a value and a table of one name, which is no setting of ours
                place, last = content, key
                break
        place[last] = value
    return content


def common(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all have alike."""
    if not settings:
        return {}
    first, *others = settings
    return {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}


def differing(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys in which some differ, or that only some have; in the order of their first appearance."""
    these = list(settings)
    shared = common(these)
    keys = dict.fromkeys(key for one in these for key in one)
    return [key for key in keys if key not in shared and key not in OWN]
