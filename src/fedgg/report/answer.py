"""What came out, in one or two sentences; never more than the seeds can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedgg.report.caveats import SPLIT_APART
from fedgg.report.compare import Comparison, PairedDifference, Row, Spread
from fedgg.report.folders import StudyRecord

NAMED = 3  # of each kind; more are counted


@dataclass(frozen=True)
class Answer:
    """The result, and how it was measured."""

    said: str
    method: str = ""


def answer(study: StudyRecord, comparison: Comparison) -> Answer:
    rows = [row for row in comparison.rows if row.final is not None]
    if not rows:
        return Answer(_nothing_yet(study, comparison))
    found = _alone(rows[0], study) if len(study.labels) == 1 else _side_by_side(rows, comparison)
    said = (
        _so_far(study, comparison) + found.said,
        _in_no_mean(comparison, "diverged"),
        _in_no_mean(comparison, "damaged"),
    )
    return Answer(" ".join(filter(None, said)), found.method)


def shown_percent(spread: Spread) -> str:
    """One decimal, as everywhere; the deviation where there are seeds to have one."""
    deviation = "" if spread.sd is None else f" ± {100 * spread.sd:.1f}"
    return f"{100 * spread.mean:.1f}{deviation} %"


def _nothing_yet(study: StudyRecord, comparison: Comparison) -> str:
    records = [record for by_seed in study.runs.values() for record in by_seed.values()]
    diverged = sum(record.status == "diverged" for record in records)
    of = study.size
    if diverged == of:
        return "The run diverged." if of == 1 else f"All {of} runs diverged."
    damaged = sum(row.damaged for row in comparison.rows)
    if damaged:
        verb = "is" if damaged == 1 else "are"
        what = "The run is damaged" if of == 1 else f"Of {of} runs {damaged} {verb} damaged and none has finished whole"
        return f"{what}, so there is nothing to conclude."
    if any(record.complete for record in records):
        return "No finished run was ever evaluated on the test set, so there is no accuracy to tell."
    begun = (
        f"{len(records)} of {of} runs have begun" if of > 1 else f"The run has {'begun' if records else 'not begun'}"
    )
    return f"{begun}; none has finished yet, so there is nothing to conclude."


def _so_far(study: StudyRecord, comparison: Comparison) -> str:
    of = study.size
    ended = sum(run.complete or run.status == "diverged" for by_seed in study.runs.values() for run in by_seed.values())
    damaged = sum(row.damaged for row in comparison.rows)  # nobody waits for them
    return "" if ended + damaged == of else f"So far, with {ended} of {of} runs ended: "


def _alone(row: Row, study: StudyRecord) -> Answer:
    assert row.final is not None
    assert row.highest is not None
    told = [run.accuracy()[0] for run in study.runs[row.label].values() if run.complete]
    rounds = max(evaluated[-1] for evaluated in told if len(evaluated))
    said = f"{row.label} ends at {shown_percent(row.final)} test accuracy after {rounds} rounds"
    if row.final.n == 1:
        highest = shown_percent(row.highest)
        return Answer(f"{said}; its highest was {highest}.", "One seed says nothing about the spread.")
    return Answer(f"{said}.", f"Mean and standard deviation over {row.final.n} seeds.")


def _side_by_side(rows: Sequence[Row], comparison: Comparison) -> Answer:
    differences = [row.against_reference for row in rows if row.against_reference is not None]
    if not differences:
        best = next(row for row in rows if row.label == comparison.best)
        assert best.final is not None
        stands = f"{quoted(best.label)} stands highest, at {shown_percent(best.final)}"
        if best.label == comparison.reference:
            return Answer(f"{stands}; no other row has finished with the same seeds yet.")
        late = f"{quoted(comparison.reference)}, which the others are measured against"
        return Answer(f"{stands}; {late}, has no finished run of the same seeds yet.")
    told = _verdicts(differences, comparison.reference)
    seeds = {difference.n for difference in differences}
    over = f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else str(max(seeds))
    over += " seed" if seeds == {1} else " seeds"
    method = f"Final test accuracy over {over}, {_pairing(differences)}"
    if any(difference.half_width is not None for difference in differences):
        method += "; ± is half of the 95 % confidence interval of the difference"
    if len(differences) > 4:
        method += f". No correction is made for looking at {len(differences)} differences"
    return Answer(_highest(rows, comparison) + _sentence("; ".join(told)), f"{method}.")


def _pairing(differences: Sequence[PairedDifference]) -> str:
    if all(difference.paired for difference in differences):
        return "paired by seed"
    if any(difference.paired for difference in differences):
        return f"paired by seed, but for rows of another split than {quoted(differences[0].other)}'s"
    return f"not paired by seed, since {SPLIT_APART}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text.startswith("against ") else f"{text}."


def _highest(rows: Sequence[Row], comparison: Comparison) -> str:
    """Of many rows, the best one by name; being chosen for its result, it flatters itself."""
    best = next((row for row in rows if row.label == comparison.best), None)
    if len(rows) <= 6 or best is None or best.final is None:
        return ""
    seeds = f"{best.final.n} seed{'s' if best.final.n > 1 else ''}"
    end = f"{shown_percent(best.final)} ({seeds}; picked after the fact, so expect less of it next time)."
    return f"{quoted(best.label)} ends highest of {len(rows)} rows, at {end} "


def _verdicts(differences: Sequence[PairedDifference], reference: str) -> list[str]:
    by = {verdict: [d for d in differences if d.verdict == verdict] for verdict in {d.verdict for d in differences}}
    told = []
    for verdict, side in (("higher", "above"), ("lower", "below")):
        if these := by.get(verdict, []):  # type: ignore[call-overload]
            told.append(listed([f"{quoted(d.label)} is {_size(d)} points" for d in _largest(these)], len(these))
                        + f" {side} {quoted(reference)}")  # fmt: skip
    perhaps = [*by.get("perhaps higher", []), *by.get("perhaps lower", [])]
    if perhaps:
        names = listed([f"{quoted(d.label)} ({_signed(d)})" for d in _largest(perhaps)], len(perhaps))
        told.append(f"{names} may differ from {quoted(reference)}, but so few seeds cannot say")
    if alike := by.get("not distinguishable", []):
        names = listed([quoted(d.label) for d in alike[:NAMED]], len(alike))
        told.append(f"{names} cannot be told from {quoted(reference)}")
    if few := by.get("too few seeds", []):
        ends = [f"{quoted(d.label)} ended at {_signed(d)} points" for d in _largest(few)]
        seeds = max(d.n for d in few)
        says = f"{seeds} seeds say" if seeds > 1 else "one seed says"
        told.append(
            f"against {quoted(reference)}, {listed(ends, len(few))}, but {says} nothing about what others would show"
        )
    return told


def _largest(these: Sequence[PairedDifference]) -> list[PairedDifference]:
    return sorted(these, key=lambda difference: -abs(difference.mean))[:NAMED]


def _size(difference: PairedDifference) -> str:
    width = "" if difference.half_width is None else f" ± {100 * difference.half_width:.1f}"
    return f"{100 * abs(difference.mean):.1f}{width}"


def _signed(difference: PairedDifference) -> str:
    width = "" if difference.half_width is None else f" ± {100 * difference.half_width:.1f}"
    return f"{100 * difference.mean:+.1f}{width}".replace("-", "−")


def quoted(label: str) -> str:
    """In quotes where its own comma would break the sentence."""
    return f"“{label}”" if "," in label or ";" in label else label


def listed(names: Sequence[str], of: int = 0) -> str:
    """Names in a sentence; `of` more of them than are named are counted."""
    if of > len(names):
        return f"{', '.join(names)} and {of - len(names)} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _in_no_mean(comparison: Comparison, which: Literal["diverged", "damaged"]) -> str:
    counts = {row.label: getattr(row, which) for row in comparison.rows if getattr(row, which)}
    if not counts:
        return ""
    runs = sum(counts.values())
    are = "are" if runs > 1 else "is"
    names = listed([quoted(label) for label in list(counts)[:NAMED]], len(counts))
    said = f"diverged and {are}" if which == "diverged" else f"{are} damaged and"
    return f"{runs} run{'s' if runs > 1 else ''} of {names} {said} in no mean."
