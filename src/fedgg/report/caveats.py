"""Notes under a comparison: which runs are excluded, and which values are not directly comparable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedgg.report.folders import StudyRecord

SPLIT_APART = "the runs have different splits"


def caveats(study: StudyRecord, ends: Mapping[str, Mapping[int, int]]) -> tuple[str, ...]:
    """Runs that are excluded from the averages, and averages that are not directly comparable.

    `ends` are the last evaluated rounds of the runs that are averaged.
    """
    begun = [label for label in study.labels if study.runs[label] or study.damaged(label)]
    excluded: dict[str, list[str]] = {}  # labels by what is true of them
    for label in begun:
        diverged, damaged = study.diverged(label), study.damaged(label)
        unfinished = [seed for seed in study.seeds_of(label) if seed not in {*ends[label], *diverged, *damaged}]
        for seeds, why in (
            (diverged, "diverged"),
            (damaged, "damaged: incomplete or unreadable"),
            (unfinished, "not finished, or never evaluated"),
        ):
            if seeds:
                excluded.setdefault(f"{_seeds(seeds)} excluded from the averages ({why})", []).append(label)
    notes = [f"{'; '.join(labels)}: {what}." for what, labels in excluded.items()]
    if absent := [label for label in study.labels if label not in begun]:
        notes.append(f"Not run yet: {'; '.join(absent)}.")
    if not ends[study.reference] and len(study.labels) > 1:
        notes.append(f"The reference {study.reference} has no finished run, so there is no target.")
    if ragged := _different_seeds(study):
        notes.append(f"Rows have different seeds, so their means are not over the same splits: {ragged}.")
    if len({last for by_seed in ends.values() for last in by_seed.values()}) > 1:
        notes.append("The runs end at different rounds, so their final accuracies are not directly comparable.")
    if apart := [seed for seed in study.seeds if splits_of(study, seed, study.labels) > 1]:
        notes.append(
            f"{_seeds(apart).capitalize()}: {SPLIT_APART}; differences between them are not paired by seed and use "
            f"Welch's interval."
        )
    return tuple(notes)


def splits_of(study: StudyRecord, seed: int, labels: Sequence[str]) -> int:
    """How many different splits some rows' runs of a seed have."""
    runs = (study.runs[label].get(seed) for label in labels)
    return len({run.partition.get("hash") for run in runs if run is not None and run.partition is not None})


def _different_seeds(study: StudyRecord) -> str:
    """Which seeds rows have, where they have not all the same."""
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for label in study.labels:
        by_seeds.setdefault(tuple(sorted(study.seeds_of(label))), []).append(label)
    if len(by_seeds) == 1:
        return ""
    return "; ".join(f"{', '.join(labels)} {_seeds([*seeds])}" for seeds, labels in by_seeds.items())


def _seeds(seeds: list[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
