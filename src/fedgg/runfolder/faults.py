"""What is wrong with a run folder that still has something to show.

A history that is not whole, and settings or a split that do not fit their checksums, damage a run: its curve is shown,
and it is excluded from averages. Anything else (a summary or versions that cannot be read) is named, and the run counts
by what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedgg.runfolder.checksums import FILE, HISTORY, LineChecksums, Manifest

NAMED = 3  # of a kind; more are counted
LISTED = {"config.toml": True, "partition.json": True, "versions.json": False}  # whether damage makes numbers uncertain


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


def checksum_faults(
    folder: Path,
    known: Manifest | None,
    digests: Mapping[str, str | None],
    lines: LineChecksums,
    resumes: Sequence[dict[str, Any]] | None,
) -> Iterator[Fault]:
    """Files that are not what the run has written. `digests`: SHA-256 of those that were read, None if not there."""
    resume = f"fedgg resume {folder}"
    if known is None:
        if lines.present:
            yield Fault(f"{FILE} is missing: restore it, or {resume} writes it again", damages=True)
        return
    if known.fault is not None:
        lost = "" if known.files else ", and nothing else says what its files were"
        yield Fault(f"{FILE} cannot be used ({known.fault}){lost}: {resume} writes it again", damages=not known.files)
    for name, damages in LISTED.items():
        if name in digests and name in known.files:
            digest = digests[name]
            if digest is None:
                yield Fault(f"{name} is missing: restore it or run again into a new folder", damages)
            elif not known.fits(name, digest):
                way = f"; {resume} says what can be done" if name == "config.toml" else "; restore it or run again"
                yield Fault(f"{name} is not as the run wrote it (by its SHA-256 in {known.source}){way}", damages)
    if resumes is not None and len(resumes) < known.resumes:
        yield Fault(f"resumes.jsonl has {len(resumes)} whole lines of {known.resumes}: some resumes are not known")


def history_checksum_faults(
    lines: LineChecksums, rounds: Sequence[dict[str, Any]], summary: Mapping[str, Any] | None,
    recorded: Mapping[str, str], checkpoint: int
) -> Iterator[Fault]:  # fmt: skip
    """A history that does not fit its own checksums, the summary's, or the newest checkpoint."""
    if lines.complaint is not None:
        yield Fault(f"{HISTORY} is damaged: {lines.complaint}; restore it, or resume the run", damages=True)
    elif summary is not None and summary.get("rounds_done") == len(rounds) and HISTORY in recorded:
        if recorded[HISTORY] != lines.hexdigest():
            yield Fault(f"{HISTORY} is not the history that summary.json was written for", damages=True)
    elif lines.present and summary is None and len(rounds) < checkpoint:
        yield Fault(f"{HISTORY} has {len(rounds)} rounds, and there is a checkpoint of {checkpoint}", damages=True)


def event_faults(lines: Mapping[str, LineChecksums]) -> Iterator[Fault]:
    for name, checksums in lines.items():
        if checksums.complaint is not None:
            yield Fault(f"{name} is damaged: {checksums.complaint}, so that what it tells is not certain")


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
