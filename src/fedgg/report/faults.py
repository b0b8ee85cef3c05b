"""What is wrong with a run folder that still has something to show.

A history that is not whole damages a run: its curve is shown, and its numbers are in no mean. Anything else (a summary,
a split or versions that cannot be read) is said, and the run counts by what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

NAMED = 3  # of a kind; more are counted


@dataclass(frozen=True)
class Fault:
    """Which file, and what is wrong with it; whether the numbers of the run can no longer stand for a whole run."""

    why: str
    damages: bool = False


def history_faults(rounds: Sequence[dict[str, Any]], summary: dict[str, Any] | None) -> tuple[Fault, ...]:
    """Rounds that are missing in between, or at the end, where the summary says that there were more."""
    found = []
    if gaps := _gaps(rounds):
        found.append(Fault(f"rounds.jsonl lacks {_listed(gaps)}", damages=True))
    last = rounds[-1]["round"] if rounds else 0
    done = (summary or {}).get("rounds_done")
    if type(done) is int and last < done:
        ends = f"ends at round {last}" if last else "has no round"
        found.append(Fault(f"rounds.jsonl {ends}, but summary.json says that {done} were done", damages=True))
    elif type(done) is int and last > done:
        found.append(Fault(f"rounds.jsonl goes on to round {last}, but summary.json knows of {done} only"))
    return tuple(found)


def line_faults(complaints: Sequence[str]) -> tuple[Fault, ...]:
    """Lines of the history that cannot be read."""
    if not complaints:
        return ()
    more = f"; {len(complaints) - NAMED} more lines are" if len(complaints) > NAMED else ""
    return (Fault(f"rounds.jsonl is broken: {'; '.join(complaints[:NAMED])}{more}", damages=True),)


def summary_by_history(config: dict[str, Any], rounds: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """In place of a summary that cannot be read: a history of all rounds asked for is that of a finished run."""
    asked = config.get("rounds")
    if rounds and not _gaps(rounds) and rounds[-1]["round"] == asked:
        return {"status": "finished", "rounds_done": asked}
    return None


def summary_fault(why: str, counted: dict[str, Any] | None) -> Fault:
    """What came of a summary that cannot be read."""
    as_what = "finished, since its history has all rounds" if counted else "unfinished"
    return Fault(f"summary.json is broken ({why}), so the run counts as {as_what}; delete the file and resume the run, "
                 "and it is written again")  # fmt: skip


def _gaps(rounds: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """First and last of the rounds that are missing before the last one told."""
    numbers = [0, *(line["round"] for line in rounds)]
    return [(before + 1, after - 1) for before, after in pairwise(numbers) if after > before + 1]


def _listed(gaps: Sequence[tuple[int, int]]) -> str:
    named = [f"round {a}" if a == b else f"rounds {a} to {b}" for a, b in gaps[:NAMED]]
    return ", ".join(named) + (f" and {len(gaps) - NAMED} more pieces" if len(gaps) > NAMED else "")
