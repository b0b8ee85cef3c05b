"""The result of a comparison in one or two sentences, with the verdicts of `fedgg.analysis.compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedgg.analysis.compare import SPLIT_APART, Comparison, ComparisonRow, PairedDifference, Spread
from fedgg.runfolder.measure import ACCURACY, Measure
from fedgg.runfolder.record_types import RunRecord, StudyRecord

MOST_NAMED = 3  # rows of a verdict; the rest are counted


@dataclass(frozen=True)
class Conclusion:
    """The result, and how it was measured."""

    text: str
    method: str = ""


def conclude(study: StudyRecord, comparison: Comparison) -> Conclusion:
    """The result of the finished runs; without one, the reason why there is no result."""
    rows = [row for row in comparison.rows if row.final is not None]
    if not rows:
        return Conclusion(_no_result(study, comparison))
    result = (
        _single_row(rows[0], study, comparison.measure) if len(study.labels) == 1 else _several_rows(rows, comparison)
    )
    sentences = (
        _preliminary(study, comparison) + result.text,
        _excluded(comparison, "diverged"),
        _excluded(comparison, "damaged"),
        _excluded(comparison, "lacking"),
    )
    return Conclusion(" ".join(filter(None, sentences)), result.method)


def shown_spread(spread: Spread, measure: Measure = ACCURACY) -> str:
    """Mean and, from two seeds on, standard deviation; accuracies in per cent, with one decimal, without the unit."""
    return measure.with_deviation(spread.mean, spread.sd)


def _no_result(study: StudyRecord, comparison: Comparison) -> str:
    records = study.records
    diverged = sum(record.status == "diverged" for record in records)
    planned = study.size
    if diverged == planned:
        return "The run diverged." if planned == 1 else f"All {planned} runs diverged."
    damaged = sum(row.damaged for row in comparison.rows)
    if damaged:
        verb = "is" if damaged == 1 else "are"
        several = f"{damaged} of {planned} runs {verb} damaged and no other has finished"
        return f"{'The run is damaged' if planned == 1 else several}, so there is no result."
    if any(record.complete for record in records):
        if comparison.measure == ACCURACY and not any(row.lacking for row in comparison.rows):
            return "No finished run was evaluated on the test set, so there is no accuracy to report."
        return f"No finished run has recorded its {comparison.measure.title}, so there is no result."
    if planned > 1:
        started = f"{len(records)} of {planned} runs {'has' if len(records) == 1 else 'have'} started"
        return f"{started} and none has finished, so there is no result yet."
    return f"The run has {_progress(records[0]) if records else 'not started'}, so there is no result yet."


def _progress(record: RunRecord) -> str:
    last = record.rounds[-1]["round"] if record.rounds else 0
    return f"not finished (round {last} of {record.config.get('rounds', '?')})"


def _preliminary(study: StudyRecord, comparison: Comparison) -> str:
    planned = study.size
    ended = sum(run.complete or run.status == "diverged" for run in study.records)
    damaged = sum(row.damaged for row in comparison.rows)  # nothing to wait for
    return "" if ended + damaged == planned else f"Preliminary, with {ended} of {planned} runs finished: "


def _single_row(row: ComparisonRow, study: StudyRecord, measure: Measure) -> Conclusion:
    assert row.final is not None
    assert row.best is not None
    evaluated_rounds = [run.scores(measure)[0] for run in study.runs[row.label].values() if run.complete]
    rounds = max(evaluated[-1] for evaluated in evaluated_rounds if len(evaluated))
    end = shown_spread(row.final, measure) + measure.unit
    scored = f"{end} {measure.title}" if measure.percent and not measure.over else f"a {measure.title} of {end}"
    text = f"{row.label} ends at {scored} after {rounds} round{'' if rounds == 1 else 's'}"
    if row.final.n == 1:
        best = f"its {measure.best_word} was {shown_spread(row.best, measure)}{measure.unit}"
        return Conclusion(f"{text}; {best}.", "One seed, so the spread over seeds is unknown.")
    return Conclusion(f"{text}.", f"Mean and standard deviation over {row.final.n} seeds.")


def _several_rows(rows: Sequence[ComparisonRow], comparison: Comparison) -> Conclusion:
    measure = comparison.measure
    differences = [row.against_reference for row in rows if row.against_reference is not None]
    if not differences:
        best = next(row for row in rows if row.label == comparison.best)
        assert best.final is not None
        end = f"{shown_spread(best.final, measure)}{measure.unit}"
        leader = f"{quoted(best.label)} has the {measure.best_word} final {measure.short}, {end}"
        if best.label == comparison.reference:
            return Conclusion(f"{leader}; no other row has finished with the same seeds yet.")
        lacking = any(row.label == comparison.reference and row.lacking for row in comparison.rows)
        reason = f"has no {measure.short}" if lacking else "has not finished with the same seeds yet"
        return Conclusion(f"{leader}; the reference {quoted(comparison.reference)} {reason}.")
    verdicts = _verdicts(differences, comparison)
    seeds = {difference.n for difference in differences}
    over = f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else str(max(seeds))
    over += " seed" if seeds == {1} else " seeds"
    method = f"Final {measure.title} over {over}, {_pairing(differences)}"
    if any(difference.half_width is not None for difference in differences):
        method += "; ± is half the width of the 95 % confidence interval of the difference"
    if not measure.higher_is_better:
        method += "; lower is better"
    if len(differences) > 4:
        method += f". Not corrected for {len(differences)} comparisons"
    return Conclusion(_best(rows, comparison) + _sentence("; ".join(verdicts)), f"{method}.")


def _pairing(differences: Sequence[PairedDifference]) -> str:
    if all(difference.paired for difference in differences):
        return "paired by seed"
    if any(difference.paired for difference in differences):
        return f"paired by seed, except rows whose split differs from that of {quoted(differences[0].other)}"
    return f"not paired by seed, because {SPLIT_APART}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text.startswith("against ") else f"{text}."


def _best(rows: Sequence[ComparisonRow], comparison: Comparison) -> str:
    """For many rows, the best one by name, with a warning: it was selected by its result."""
    best = next((row for row in rows if row.label == comparison.best), None)
    if len(rows) <= 6 or best is None or best.final is None:
        return ""
    seeds = f"{best.final.n} seed{'s' if best.final.n > 1 else ''}"
    measure = comparison.measure
    value = f"{shown_spread(best.final, measure)}{measure.unit}"
    end = f"{value} ({seeds}; selected by this result, so the value is optimistic)."
    return f"{quoted(best.label)} has the {measure.best_word} final {measure.short} of {len(rows)} rows, {end} "


def _verdicts(differences: Sequence[PairedDifference], comparison: Comparison) -> list[str]:
    measure, reference = comparison.measure, quoted(comparison.reference)
    by_verdict: dict[str, list[PairedDifference]] = {}
    for difference in differences:
        by_verdict.setdefault(difference.verdict, []).append(difference)
    sentences = []
    for verdict in ("higher", "lower"):
        if these := by_verdict.get(verdict, []):
            rows = [f"{quoted(d.label)} is {_size(d, measure)}{measure.points}" for d in _largest(these)]
            sentences.append(f"{listed(rows, len(these))} {_judged(verdict, measure)} than {reference}")
    for verdict in ("perhaps higher", "perhaps lower"):
        if these := by_verdict.get(verdict, []):
            rows = [f"{quoted(d.label)} ({_signed(d, measure)}{measure.points})" for d in _largest(these)]
            sentences.append(
                f"{listed(rows, len(these))} {_are(these)} {_judged(verdict, measure)} than {reference} "
                "(more seeds are needed to decide)"
            )
    if alike := by_verdict.get("not distinguishable", []):
        names = listed([quoted(d.label) for d in alike[:MOST_NAMED]], len(alike))
        sentences.append(f"{names} {_are(alike)} not distinguishable from {reference}")
    if few := by_verdict.get("too few seeds", []):
        ends = [
            f"{quoted(d.label)} ends at {_signed(d, measure)}{measure.points}{_worse(d, measure)}"
            for d in _largest(few)
        ]
        seeds = max(d.n for d in few)
        too_few = f"{seeds} seeds are" if seeds > 1 else "one seed is"
        sentences.append(f"against {reference}, {listed(ends, len(few))}, but {too_few} too few for a verdict")
    return sentences


def _judged(verdict: str, measure: Measure) -> str:
    """Where lower is better, a verdict says which of the two is."""
    if measure.higher_is_better:
        return verdict
    return f"{verdict} ({'better' if verdict.endswith('lower') else 'worse'})"


def _worse(difference: PairedDifference, measure: Measure) -> str:
    """The same of a difference without a verdict."""
    if measure.higher_is_better or difference.mean == 0:
        return ""
    return " (better)" if difference.mean < 0 else " (worse)"


def _are(these: Sequence[PairedDifference]) -> str:
    return "are" if len(these) > 1 else "is"


def _largest(these: Sequence[PairedDifference]) -> list[PairedDifference]:
    return sorted(these, key=lambda difference: -abs(difference.mean))[:MOST_NAMED]


def _size(difference: PairedDifference, measure: Measure) -> str:
    return measure.with_deviation(abs(difference.mean), difference.half_width)


def _signed(difference: PairedDifference, measure: Measure) -> str:
    return measure.difference(difference.mean, difference.half_width).replace("-", "−", 1)


def quoted(label: str) -> str:
    """In quotation marks if a comma or semicolon in the label would break the sentence."""
    return f"“{label}”" if "," in label or ";" in label else label


def listed(names: Sequence[str], total: int = 0) -> str:
    """Names in a sentence; of a larger total, the others are counted."""
    if total > len(names):
        return f"{', '.join(names)} and {total - len(names)} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _excluded(comparison: Comparison, which: Literal["diverged", "damaged", "lacking"]) -> str:
    counts = {row.label: getattr(row, which) for row in comparison.rows if getattr(row, which)}
    if not counts:
        return ""
    runs = sum(counts.values())
    are = "are" if runs > 1 else "is"
    names = listed([quoted(label) for label in list(counts)[:MOST_NAMED]], len(counts))
    reasons = {
        "diverged": f"diverged and {are}",
        "damaged": f"{are} damaged and",
        "lacking": f"{'have' if runs > 1 else 'has'} no {comparison.measure.title} and {are}",
    }
    return f"{runs} run{'s' if runs > 1 else ''} of {names} {reasons[which]} excluded from the averages."
