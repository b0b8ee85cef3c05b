"""Settings under dotted keys (`local.lr`): to and from nested tables, shared and differing ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PER_RUN = ("name", "seed")  # keys that differ between runs of the same row


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
            if not isinstance(place, dict):  # a value and a table of the same name: not a setting of fedgg
                place, last = content, key
                break
        place[last] = value
    return content


def common(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that all of them have with the same value."""
    if not settings:
        return {}
    first, *others = settings
    return {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}


def differing(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys with different values, or that only some have, in the order of their first appearance."""
    all_settings = list(settings)
    shared = common(all_settings)
    keys = dict.fromkeys(key for one in all_settings for key in one)
    return [key for key in keys if key not in shared and key not in PER_RUN]
