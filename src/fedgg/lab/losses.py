"""Clients that a round went on without, in words: a client and its reason are named once, the history has all of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fedgg.core.server import Lost


def by_reason(lost: Iterable[Lost]) -> dict[str, list[int]]:
    """Each reason with everybody it concerns."""
    reasons: dict[str, list[int]] = {}
    for gone in lost:
        reasons.setdefault(gone.why, []).append(gone.client)
    return reasons


@dataclass(frozen=True)
class NamedOnce:
    """Says of a round's lost clients what has not been said yet."""

    said: set[Lost] = field(default_factory=set)

    def sentences(self, round_: int, lost: Iterable[Lost]) -> list[str]:
        new = [gone for gone in lost if gone not in self.said]
        self.said.update(new)
        return [
            f"round {round_}: client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))} dropped ({why}); "
            "further rounds are only counted"
            for why, clients in by_reason(new).items()
        ]
