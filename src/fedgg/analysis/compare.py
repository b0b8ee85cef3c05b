"""Compare the rows of a study over seeds by one measure: rounds to a target, paired differences, verdicts.

The measure is test accuracy, or any other that the runs have recorded (`fedgg.runfolder.measure`).

**Averages** are over finished runs and those that have spent their privacy budget. Diverged, unfinished and damaged
runs (incomplete or unreadable) are counted and excluded, and so are runs that have not recorded the measure.

**Rounds to the target.** The target of a seed is the reference's value at its last evaluated round with that seed. A
run reaches it at the first evaluated round that is at least as good: not below it, or not above it where lower is
better. Smoothed, both are trailing averages over `WINDOW` evaluated rounds.

**Differences** of final values are paired by seed, since a seed fixes the split, the initial weights and the batch
order for every row. If two rows have different splits they are not paired, and the interval is Welch's. A row is
"higher" or "lower" if the 95 % confidence interval of the mean difference (Student's t with n - 1 degrees of freedom)
excludes zero. Otherwise it is "not distinguishable" if the mean difference is within one standard deviation of the
differences, and "perhaps" higher or lower beyond it: with three seeds, pure noise gets that far more than one time in
five, so more seeds are needed to decide. There is no verdict from fewer than three seeds. Seeds that all differ by
exactly the same amount, which happens on a small test set, are "perhaps", too: an interval of zero width would claim
certainty. Several rows are compared without a correction for multiple comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedgg.runfolder.measure import ACCURACY, Measure
from fedgg.runfolder.record_types import Floats, Ints, RunRecord, StudyRecord

WINDOW = 5  # evaluated rounds in a trailing average
FEWEST_SEEDS = 3  # for a verdict: two may differ by the same test image, and then their interval is empty
ROUNDING = 1e-9  # a standard deviation of differences below it, times their size, is rounding error
SPLIT_APART = "the runs have different splits"
Verdict = Literal["higher", "lower", "perhaps higher", "perhaps lower", "not distinguishable", "too few seeds"]

# Two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom; beyond the last one the interval is too wide.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over n runs; the deviation is None for fewer than two."""

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Reach:
    """When the runs of a label reached the target: means over those that did, `reached` of `seeds`."""

    reached: int
    seeds: int
    rounds: float | None
    megabytes: float | None
    speed_up: float | None
    megabytes_up: float | None = None  # the part that clients sent
    seconds: float | None = None


@dataclass(frozen=True)
class PairedDifference:
    """Final value of `label` minus that of `other`, with the half width of its 95 % interval."""

    label: str
    other: str
    n: int
    mean: float
    half_width: float | None
    verdict: Verdict
    paired: bool = True  # by seed


@dataclass(frozen=True)
class ComparisonRow:
    """The results of one label."""

    label: str
    finished: int
    diverged: int
    damaged: int  # incomplete or unreadable
    unfinished: int
    lacking: int  # of the finished ones, without the measure
    final: Spread | None
    best: Spread | None  # of the evaluated rounds: the highest, or the lowest where lower is better
    raw: Reach
    smoothed: Reach
    against_reference: PairedDifference | None
    against_best: PairedDifference | None
    epsilon: float | None = None  # the largest of the finished runs; infinite without noise


@dataclass(frozen=True)
class Comparison:
    """The rows in the study's order; `best` has the best mean final value (None if no run has finished)."""

    measure: Measure
    reference: str
    seeds: tuple[int, ...]
    best: str | None
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...]
    deltas: tuple[float, ...] = ()  # of the private runs; epsilon is a column if there are any
    accountants: tuple[str, ...] = ()  # by which their epsilons are bounded


@dataclass(frozen=True, eq=False)
class Curve:
    """The measure, and megabytes and seconds so far, at the evaluated rounds of one run."""

    rounds: Ints
    values: Floats
    megabytes: Floats
    megabytes_up: Floats
    seconds: Floats


def compare(study: StudyRecord, measure: Measure | None = None) -> Comparison:
    """Compare each label of a study with its reference and with its best label, by default by its primary metric."""
    measure = measure or study.primary
    curves = {label: _finished_curves(study.runs[label], measure) for label in study.labels}
    finals = {label: {seed: float(curve.values[-1]) for seed, curve in curves[label].items()} for label in curves}
    smooth = {label: {seed: _smoothed(curve) for seed, curve in curves[label].items()} for label in curves}
    means = {label: float(np.mean(list(values.values()))) for label, values in finals.items() if values}
    best_mean = measure.best(means.values()) if means else None
    best = next((label for label, mean in means.items() if mean == best_mean), None)
    ends = {label: {seed: int(curve.rounds[-1]) for seed, curve in curves[label].items()} for label in curves}
    rows = []
    for label in study.labels:
        best_values = [measure.best(curve.values.tolist()) for curve in curves[label].values()]
        lacking = _lacking(study, label, measure)
        diverged, damaged = study.diverged(label), study.damaged(label)
        rows.append(
            ComparisonRow(
                label=label,
                finished=len(curves[label]) + len(lacking),
                diverged=len(diverged),
                damaged=len(damaged),
                unfinished=len(study.seeds_of(label)) - sum(map(len, (curves[label], diverged, damaged, lacking))),
                lacking=len(lacking),
                final=spread(list(finals[label].values())),
                best=spread(best_values),
                raw=reach(curves[label], curves[study.reference], set(diverged), measure),
                smoothed=reach(smooth[label], smooth[study.reference], set(diverged), measure),
                against_reference=_against(study, label, study.reference, finals, measure),
                against_best=None if best is None else _against(study, label, best, finals, measure),
                epsilon=_largest_epsilon(study.runs[label]),
            )
        )
    notes = caveats(study, ends, measure)
    return Comparison(
        measure, study.reference, study.seeds, best, tuple(rows), notes, _deltas(study), _accountants(study)
    )


def _finished_curves(runs: dict[int, RunRecord], measure: Measure) -> dict[int, Curve]:
    finished = {seed: run for seed, run in runs.items() if run.complete}
    curves = {
        seed: Curve(
            *run.scores(measure),
            run.megabytes(measure=measure),
            run.megabytes(("up",), measure),
            run.seconds_until(measure),
        )
        for seed, run in finished.items()
    }
    return {seed: curve for seed, curve in curves.items() if len(curve.rounds)}


def _lacking(study: StudyRecord, label: str, measure: Measure) -> list[int]:
    """The seeds whose run has finished and been evaluated, without this measure."""
    return [
        seed
        for seed, run in study.runs[label].items()
        if run.complete and any(key != "train_loss" for key in run.measures) and not len(run.scores(measure)[0])
    ]


def _smoothed(curve: Curve) -> Curve:
    averages = trailing_average(curve.values)
    start = len(curve.values) - len(averages)
    traffic = (curve.megabytes[start:], curve.megabytes_up[start:])
    return Curve(curve.rounds[start:], averages, *traffic, curve.seconds[start:])


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and sample standard deviation (ddof = 1) of some values; None of none."""
    if not values:
        return None
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(float(np.mean(values)), sd, len(values))


def _largest_epsilon(runs: dict[int, RunRecord]) -> float | None:
    """The guarantee of a row is that of its weakest run."""
    return max((run.epsilon for run in runs.values() if run.complete and run.epsilon is not None), default=None)


def _deltas(study: StudyRecord) -> tuple[float, ...]:
    deltas = (run.delta for run in study.records)
    return tuple(sorted({delta for delta in deltas if delta is not None}))


def _accountants(study: StudyRecord) -> tuple[str, ...]:
    names = (run.accountant for run in study.records)
    return tuple(sorted({name for name in names if name is not None}))


# Rounds to the target -------------------------------------------------------------------------------------------------


def reach(
    curves: dict[int, Curve], reference: dict[int, Curve], diverged: set[int], measure: Measure = ACCURACY
) -> Reach:
    """When each seed reaches the reference's final value; a diverged run counts as not reaching it."""
    targets = {seed: curve for seed, curve in reference.items() if len(curve.values)}
    seeds = [seed for seed in targets if seed in curves or seed in diverged]
    rounds, megabytes, sent, seconds, totals = [], [], [], [], []
    for seed in seeds:
        curve = curves.get(seed)
        at = None if curve is None else first_reaching(curve.values, float(targets[seed].values[-1]), measure)
        if curve is not None and at is not None:
            rounds.append(int(curve.rounds[at]))
            megabytes.append(float(curve.megabytes[at]))
            sent.append(float(curve.megabytes_up[at]))
            seconds.append(float(curve.seconds[at]))
            totals.append(int(targets[seed].rounds[-1]))
    if not rounds:
        return Reach(0, len(seeds), None, None, None)
    mean_rounds, speed_up = float(np.mean(rounds)), float(np.mean(totals) / np.mean(rounds))
    traffic = (float(np.mean(megabytes)), speed_up, float(np.mean(sent)))
    return Reach(len(rounds), len(seeds), mean_rounds, *traffic, seconds=float(np.mean(seconds)))


def first_reaching(values: Floats, target: float, measure: Measure = ACCURACY) -> int | None:
    """The position of the first value that is at least as good as the target."""
    hits = np.flatnonzero(measure.reaches(values, target))
    return int(hits[0]) if len(hits) else None


def trailing_average(values: Floats, window: int = WINDOW) -> Floats:
    """The mean of each value and the `window - 1` before it; the first `window - 1` values have none."""
    if len(values) < window:
        return np.empty(0, dtype=np.float64)
    averages: Floats = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
    return averages


# Differences ----------------------------------------------------------------------------------------------------------


def _against(
    study: StudyRecord, label: str, other: str, finals: dict[str, dict[int, float]], measure: Measure
) -> PairedDifference | None:
    ours, theirs = finals[label], finals[other]
    both = [seed for seed in ours if seed in theirs]
    if label == other or not both:
        return None
    rounding = ROUNDING * (1.0 if measure.percent else max(map(abs, (*ours.values(), *theirs.values()))))
    if any(splits_of(study, seed, (label, other)) > 1 for seed in both):
        return unpaired_difference(label, other, list(ours.values()), list(theirs.values()), rounding)
    return paired_difference(label, other, ours, theirs, rounding)


def splits_of(study: StudyRecord, seed: int, labels: Sequence[str]) -> int:
    """The number of different splits among the runs of these rows with this seed."""
    runs = (study.runs[label].get(seed) for label in labels)
    return len({run.partition.get("hash") for run in runs if run is not None and run.partition is not None})


def paired_difference(
    label: str, other: str, ours: dict[int, float], theirs: dict[int, float], rounding: float = ROUNDING
) -> PairedDifference:
    """Compare two rows over the seeds that both have; there must be at least one."""
    differences = np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
    n, mean = len(differences), float(np.mean(differences))
    if n < FEWEST_SEEDS:
        return PairedDifference(label, other, n, mean, None, "too few seeds")
    sd = float(np.std(differences, ddof=1))
    half_width = _t95(n - 1) * sd / math.sqrt(n)
    if mean != 0 and sd < rounding:
        return PairedDifference(label, other, n, mean, None, "perhaps higher" if mean > 0 else "perhaps lower")
    return PairedDifference(label, other, n, mean, half_width, _verdict(mean, sd, half_width))


def unpaired_difference(
    label: str, other: str, ours: Sequence[float], theirs: Sequence[float], rounding: float = ROUNDING
) -> PairedDifference:
    """Compare two rows whose runs have different splits, by Welch's interval; each must have at least one run."""
    n, mean = min(len(ours), len(theirs)), float(np.mean(ours) - np.mean(theirs))
    if n < FEWEST_SEEDS:
        return PairedDifference(label, other, n, mean, None, "too few seeds", paired=False)
    variance, other_variance = (float(np.var(values, ddof=1)) for values in (ours, theirs))
    a, b = variance / len(ours), other_variance / len(theirs)  # variances of the means
    if a + b < rounding**2:
        verdict: Verdict = "not distinguishable" if mean == 0 else "perhaps higher" if mean > 0 else "perhaps lower"
        return PairedDifference(label, other, n, mean, None, verdict, paired=False)
    freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(theirs) - 1))  # Welch and Satterthwaite
    half_width = _t95(int(freedom)) * math.sqrt(a + b)
    verdict = _verdict(mean, math.sqrt(variance + other_variance), half_width)
    return PairedDifference(label, other, n, mean, half_width, verdict, paired=False)


def _t95(freedom: int) -> float:
    return _T95[min(freedom, len(_T95)) - 1]


def _verdict(mean: float, sd: float, half_width: float) -> Verdict:
    if abs(mean) > half_width:
        return "higher" if mean > 0 else "lower"
    if abs(mean) > sd:
        return "perhaps higher" if mean > 0 else "perhaps lower"
    return "not distinguishable"


# Caveats --------------------------------------------------------------------------------------------------------------


def caveats(study: StudyRecord, ends: Mapping[str, Mapping[int, int]], measure: Measure = ACCURACY) -> tuple[str, ...]:
    """Runs that are excluded from the averages, and averages that are not directly comparable.

    `ends` are the last evaluated rounds of the runs that are averaged.
    """
    started = [label for label in study.labels if study.runs[label] or study.damaged(label)]
    excluded: dict[str, list[str]] = {}  # labels by the sentence about them
    for label in started:
        diverged, damaged = study.diverged(label), study.damaged(label)
        lacking = _lacking(study, label, measure)
        named = {*ends[label], *diverged, *damaged, *lacking}
        unfinished = [seed for seed in study.seeds_of(label) if seed not in named]
        for seeds, why in (
            (diverged, "diverged"),
            (damaged, "damaged: incomplete or unreadable"),
            (unfinished, "not finished, or never evaluated"),
            (lacking, f"no {measure.title} was recorded"),
        ):
            if seeds:
                excluded.setdefault(f"{shown_seeds(seeds)} excluded from the averages ({why})", []).append(label)
    notes = [f"{'; '.join(labels)}: {what}." for what, labels in excluded.items()]
    if absent := [label for label in study.labels if label not in started]:
        notes.append(f"Not run yet: {'; '.join(absent)}.")
    if not ends[study.reference] and len(study.labels) > 1:
        notes.append(
            f"The reference {study.reference} has no finished run{_with(study, measure)}, so there is no target."
        )
    if ragged := _different_seeds(study):
        notes.append(f"Rows have different seeds, so their means are not over the same splits: {ragged}.")
    if len({last for by_seed in ends.values() for last in by_seed.values()}) > 1:
        notes.append(
            f"The runs end at different rounds, so their final {_values(measure)} are not directly comparable."
        )
    if apart := [seed for seed in study.seeds if splits_of(study, seed, study.labels) > 1]:
        notes.append(
            f"{shown_seeds(apart).capitalize()}: {SPLIT_APART}; differences between them are not paired by seed and "
            f"use Welch's interval."
        )
    return tuple(notes)


def _with(study: StudyRecord, measure: Measure) -> str:
    return f" with a {measure.title}" if _lacking(study, study.reference, measure) else ""


def _values(measure: Measure) -> str:
    return "accuracies" if measure == ACCURACY else "values"


def _different_seeds(study: StudyRecord) -> str:
    """The seeds of each row if they differ between rows; otherwise empty."""
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for label in study.labels:
        by_seeds.setdefault(tuple(sorted(study.seeds_of(label))), []).append(label)
    if len(by_seeds) == 1:
        return ""
    return "; ".join(f"{', '.join(labels)} {shown_seeds(seeds)}" for seeds, labels in by_seeds.items())


def shown_seeds(seeds: Sequence[int]) -> str:
    """`seed 0`, `seeds 0, 1`."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
