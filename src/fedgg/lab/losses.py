"""Clients that a round went on without, in words: a client and its reason are named once, the history has all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


def client_name(entry: Mapping[str, Any]) -> str:
    """The client of an entry in the history: by the name that the data give it, else by its number."""
    return str(entry.get("name", entry["client"]))


def by_reason(lost: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Each reason with everybody it concerns."""
    reasons: dict[str, list[str]] = {}
    for entry in lost:
        reasons.setdefault(entry["why"], []).append(client_name(entry))
    return reasons


@dataclass(frozen=True)
class NamedOnce:
    """Says of a round's lost clients what has not been said yet."""

    said: set[tuple[int, str]] = field(default_factory=set)

    def sentences(self, round_: int, lost: Iterable[Mapping[str, Any]]) -> list[str]:
        """`lost` as the history has it."""
        new = [entry for entry in lost if (entry["client"], entry["why"]) not in self.said]
        self.said.update((entry["client"], entry["why"]) for entry in new)
        return [
            f"round {round_}: client{'s' if len(clients) > 1 else ''} {', '.join(clients)} dropped ({why}); "
            "further rounds are only counted"
            for why, clients in by_reason(new).items()
        ]
