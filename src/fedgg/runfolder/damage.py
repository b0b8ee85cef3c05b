"""What can be wrong with a run folder that can still be shown: rounds or files that are missing, unreadable or changed.

Missing or unreadable rounds, and settings or a split that do not match their checksums, make a run "damaged": its curve
is shown, and it is excluded from averages. Other faults (an unreadable summary or versions.json) are listed, and the
run counts with what could be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedgg.runfolder.checksums import FILE, HISTORY, LineChecksums, Manifest

MOST_LISTED = 3  # of a kind; the rest are counted
# Files with a checksum, and whether a change of the file damages the run.
CHECKED_FILES = {"config.toml": True, "partition.json": True, "versions.json": False}


@dataclass(frozen=True)
class Fault:
    """What is wrong with which file; `damages`: the run is then excluded from averages."""

    why: str
    damages: bool = False


def history_faults(rounds: Sequence[dict[str, Any]], summary: dict[str, Any] | None) -> tuple[Fault, ...]:
    """Rounds that are missing in between, or at the end by the summary's count."""
    faults = []
    if gaps := _gaps(rounds):
        faults.append(Fault(f"rounds.jsonl lacks {_listed(gaps)}", damages=True))
    last = rounds[-1]["round"] if rounds else 0
    finished = (summary or {}).get("rounds_done")
    if type(finished) is int and last < finished:
        ends = f"ends at round {last}" if last else "has no round"
        faults.append(Fault(f"rounds.jsonl {ends}, but summary.json counts {finished} rounds", damages=True))
    elif type(finished) is int and last > finished:
        faults.append(Fault(f"rounds.jsonl ends at round {last}, but summary.json counts {finished} rounds"))
    return tuple(faults)


def checksum_faults(
    folder: Path,
    manifest: Manifest | None,
    digests: Mapping[str, str | None],
    lines: LineChecksums,
    resumes: Sequence[dict[str, Any]] | None,
) -> Iterator[Fault]:
    """Files that differ from what the run wrote. `digests`: SHA-256 of the files that were read, None if missing."""
    resume = f"fedgg resume {folder}"
    if manifest is None:
        if lines.present:
            yield Fault(f"{FILE} is missing: restore it, or run `{resume}`, which writes it again", damages=True)
        return
    if manifest.fault is not None:
        unknown = "" if manifest.files else ", and no other file lists the checksums"
        why = f"{FILE} cannot be used ({manifest.fault}){unknown}: `{resume}` writes it again"
        yield Fault(why, damages=not manifest.files)
    for name, damages in CHECKED_FILES.items():
        if name in digests and name in manifest.files:
            digest = digests[name]
            if digest is None:
                yield Fault(f"{name} is missing: restore it or run again into a new folder", damages)
            elif not manifest.fits(name, digest):
                way = f"`{resume}` says what can be done" if name == "config.toml" else "restore it or run again"
                why = f"{name} was changed after the run wrote it (by its SHA-256 in {manifest.source}); {way}"
                yield Fault(why, damages)
    if resumes is not None and len(resumes) < manifest.resumes:
        why = f"resumes.jsonl has {len(resumes)} of {manifest.resumes} lines: some resumes are not listed"
        yield Fault(why)


def history_checksum_faults(
    lines: LineChecksums, rounds: Sequence[dict[str, Any]], summary: Mapping[str, Any] | None,
    recorded: Mapping[str, str], checkpoint: int
) -> Iterator[Fault]:  # fmt: skip
    """Rounds that do not match their own checksums, the summary's, or the newest checkpoint."""
    if lines.complaint is not None:
        yield Fault(f"{HISTORY} is damaged: {lines.complaint}; restore it, or resume the run", damages=True)
    elif summary is not None and summary.get("rounds_done") == len(rounds) and HISTORY in recorded:
        if recorded[HISTORY] != lines.sha256.hexdigest():
            yield Fault(f"{HISTORY} does not match its SHA-256 in summary.json", damages=True)
    elif lines.present and summary is None and len(rounds) < checkpoint:
        why = f"{HISTORY} has {len(rounds)} rounds, but there is a checkpoint of round {checkpoint}"
        yield Fault(why, damages=True)


def event_faults(lines: Mapping[str, LineChecksums]) -> Iterator[Fault]:
    for name, checksums in lines.items():
        if checksums.complaint is not None:
            yield Fault(f"{name} is damaged: {checksums.complaint}, so its events are not certain")


def line_faults(complaints: Sequence[str]) -> tuple[Fault, ...]:
    """Lines of rounds.jsonl that cannot be read."""
    if not complaints:
        return ()
    more = f"; {len(complaints) - MOST_LISTED} more lines are" if len(complaints) > MOST_LISTED else ""
    return (Fault(f"rounds.jsonl is broken: {'; '.join(complaints[:MOST_LISTED])}{more}", damages=True),)


def summary_by_history(config: dict[str, Any], rounds: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """In place of a summary that cannot be read: a run that has all rounds of its settings counts as finished."""
    planned = config.get("rounds")
    if rounds and not _gaps(rounds) and rounds[-1]["round"] == planned:
        return {"status": "finished", "rounds_done": planned}
    return None


def summary_fault(why: str, counted: dict[str, Any] | None) -> Fault:
    """A summary that cannot be read, and how the run counts without it."""
    status = "finished, since rounds.jsonl has all rounds" if counted else "unfinished"
    way_out = "delete the file and resume the run to write it again"
    return Fault(f"summary.json is broken ({why}), so the run counts as {status}; {way_out}")


def _gaps(rounds: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """First and last round of each gap before the last recorded round."""
    numbers = [0, *(line["round"] for line in rounds)]
    return [(before + 1, after - 1) for before, after in pairwise(numbers) if after > before + 1]


def _listed(gaps: Sequence[tuple[int, int]]) -> str:
    named = [f"round {a}" if a == b else f"rounds {a} to {b}" for a, b in gaps[:MOST_LISTED]]
    return ", ".join(named) + (f" and {len(gaps) - MOST_LISTED} more gaps" if len(gaps) > MOST_LISTED else "")
