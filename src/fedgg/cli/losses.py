"""How often clients were dropped: the first time they are named, further rounds are only counted."""

from __future__ import annotations

from typing import Any

from fedgg.cli.screen import counted

NAMED = 5  # lines at the end of a run


class LostClients:
    """Counts the rounds that a run went on without a client, as far as this process has played them."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, str], int] = {}
        self._with_losses = 0

    def heard(self, record: dict[str, Any]) -> str:
        """The round's part of the line that goes on; nothing where nobody was lost."""
        from fedgg.lab.losses import client_name

        lost = [(client_name(gone), gone["why"]) for gone in record["lost"]]
        for gone in lost:
            self._rounds[gone] = self._rounds.get(gone, 0) + 1
        self._with_losses += bool(lost)
        if len(lost) == 1:
            return f"{_named([lost[0][0]], lost[0][1])}, {counted(self._rounds[lost[0]], 'round')} so far"
        rounds = counted(self._with_losses, "round")
        return f"{len(lost)} clients dropped, {rounds} with dropped clients so far" if lost else ""

    def ended(self) -> list[str]:
        """What stays to be said at the end of a run, for those that were lost more than once: most often first."""
        alike: dict[tuple[int, str], list[str]] = {}
        for (client, why), count in self._rounds.items():
            if count > 1:
                alike.setdefault((count, why), []).append(client)
        often_first = sorted(alike.items(), reverse=True)
        told = [f"{_named(who, why)}, {counted(count, 'round')} in all" for (count, why), who in often_first]
        more = ["more clients were dropped, less often: rounds.jsonl has them all"] if len(told) > NAMED else []
        return told[:NAMED] + more


def _named(clients: list[str], why: str) -> str:
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(clients)} dropped ({why})"
