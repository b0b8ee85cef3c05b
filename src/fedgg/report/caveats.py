"""What a reader must know of a comparison before believing its numbers."""

from __future__ import annotations

from collections.abc import Mapping

from fedgg.report.folders import StudyRecord

SPLIT_APART = "the runs have different splits"


def caveats(study: StudyRecord, ends: Mapping[str, Mapping[int, int]]) -> tuple[str, ...]:
    """Runs that are in no mean, and means that are not like for like; `ends` are the last rounds of those that are."""
    notes = []
    for label in study.labels:
        diverged, damaged = study.diverged(label), study.damaged(label)
        unfinished = [seed for seed in study.seeds if seed not in {*ends[label], *diverged, *damaged}]
        if diverged:
            notes.append(f"{label}: {_seeds(diverged)} diverged and left out of the means.")
        if damaged:
            notes.append(f"{label}: {_seeds(damaged)} damaged (not whole, or unreadable) and left out of the means.")
        if unfinished:
            notes.append(f"{label}: {_seeds(unfinished)} not finished (or never evaluated) and left out of the means.")
    if not ends[study.reference]:
        notes.append(f"The reference {study.reference} has no finished run, so there is no target.")
    if len({last for by_seed in ends.values() for last in by_seed.values()}) > 1:
        notes.append("The runs end at different rounds, so their final accuracies are not like for like.")
    for seed in study.seeds:
        runs_of_seed = (study.runs[label].get(seed) for label in study.labels)
        hashes = {run.partition.get("hash") for run in runs_of_seed if run is not None and run.partition is not None}
        if len(hashes) > 1:
            notes.append(f"Seed {seed}: {SPLIT_APART}, so pairing them by seed does not hold.")
    return tuple(notes)


def _seeds(seeds: list[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
