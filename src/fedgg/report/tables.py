"""Comparisons as plain tables of strings, and the same tables as Markdown, CSV and LaTeX; table files of a study."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from fedgg.analysis.collect import study_parts
from fedgg.analysis.compare import (
    FEWEST_SEEDS,
    WINDOW,
    Comparison,
    ComparisonRow,
    PairedDifference,
    Reach,
    Spread,
    compare,
    spread,
)
from fedgg.analysis.run_environment import shown_megabytes
from fedgg.analysis.verdict import shown_spread
from fedgg.files import write_text
from fedgg.runfolder.measure import ACCURACY, Measure
from fedgg.runfolder.record_types import BYTES_PER_MEGABYTE, RunRecord, StudyRecord

NONE = "–"
TABLES = "tables.md"
VERDICTS = (
    '"higher" or "lower" if the 95 % confidence interval of the difference excludes zero; "perhaps higher" or "perhaps '
    'lower" if it includes zero but the mean difference exceeds one standard deviation of the differences (or all '
    'seeds differ by exactly the same amount), so that more seeds are needed to decide; "not distinguishable" if the '
    f'mean difference is within one standard deviation; "too few seeds" with fewer than {FEWEST_SEEDS}.'
)


@dataclass(frozen=True)
class Table:
    """A table ready to print: one string for each row and column, and notes to put under it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def comparison_tables(comparison: Comparison) -> tuple[Table, Table]:
    """The table of scores and the rounds-to-target table of a comparison."""
    return score_table(comparison), target_table(comparison)


def write_study_tables(study: StudyRecord, folder: Path, metric: str | None = None) -> list[Table]:
    """Write `tables.md`, `accuracy.csv` and `target.csv`; CSV files are numbered if the study has several parts.

    `metric` names another measure than the primary metric: `test_rmse.csv` instead of `accuracy.csv`.
    """
    tables = []
    measure = study.measure(metric)
    for number, part in enumerate(study_parts(study), start=1):
        for name, table in zip((measure.file, "target"), comparison_tables(compare(part.study, measure)), strict=True):
            titled = replace(table, title=f"{table.title}; {part.title}") if part.title else table
            tables.append(titled)
            write_text(folder / (f"{name}-{number}.csv" if part.title else f"{name}.csv"), as_csv(titled))
        if (by_client := clients_table(part.study)) is not None:
            tables.append(replace(by_client, title=f"{by_client.title}; {part.title}") if part.title else by_client)
            write_text(folder / (f"clients-{number}.csv" if part.title else "clients.csv"), as_csv(by_client))
    write_text(folder / TABLES, "\n".join(as_markdown(table) for table in tables))
    return tables


def score_table(comparison: Comparison) -> Table:
    """Final and best value of every label, and its difference from the reference and from the best label."""
    reference, best, measure = comparison.reference, comparison.best, comparison.measure
    scores = tuple(f"{word} %" if measure.percent else word for word in ("final", measure.best_word))
    private = bool(comparison.deltas)
    spent = ("epsilon",) if private else ()
    columns = ("algorithm", "runs", *scores, *spent, f"against {reference}", "against best")
    rows = tuple(
        (
            row.label,
            _runs(row, measure),
            _spread(row.final, measure),
            _spread(row.best, measure),
            *((shown_epsilon(row.epsilon),) if private else ()),
            "reference" if row.label == reference else shown_difference(row.against_reference, measure),
            "best" if row.label == best else _verdict(row.against_best),
        )
        for row in comparison.rows
    )
    lower = "" if measure.higher_is_better else " (lower is better)"
    seeds = f"seed{'s' if len(comparison.seeds) != 1 else ''} {_listed(comparison.seeds)}"
    title = f"{capital(measure.title)} over {seeds}{lower}"
    return Table(title, columns, rows, _score_notes(comparison))


def target_table(comparison: Comparison) -> Table:
    """Rounds and megabytes until the reference's final value, raw and smoothed."""
    columns = ("algorithm", "rounds", "MB", "speed-up", "rounds*", "MB*", "speed-up*")
    rows = tuple((row.label, *_reach(row.raw), *_reach(row.smoothed)) for row in comparison.rows)
    reference, measure = comparison.reference, comparison.measure
    notes = (
        f"Rounds and MB until the first evaluated round at which a run's {measure.title} is {_at_least(measure)} the "
        f"target: {reference}'s final {measure.title} with the same seed. Mean over the seeds that reach it; (2 of 3) "
        "means that two of three seeds do, and then no speed-up is given.",
        f"Speed-up: the number of rounds of {reference} divided by the rounds to the target. {reference} itself may "
        f"reach its final {measure.short} before its last round, so its own speed-up can exceed 1.0×; compare the "
        "others with it.",
        f"* the same with {values_word(measure)}, and the target, averaged over the last {WINDOW} evaluated rounds; "
        "not known with fewer.",
        *comparison.notes,
    )
    return Table(f"Rounds and traffic until {reference}'s final {measure.short}", columns, rows, notes)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def values_word(measure: Measure) -> str:
    """What its values are called."""
    return "accuracies" if measure == ACCURACY else "values"


def _at_least(measure: Measure) -> str:
    return "at least" if measure.higher_is_better else "at most"


def clients_table(study: StudyRecord) -> Table | None:
    """The last scores on clients' held-out examples; None where no run has personal models or unseen clients."""
    scores, metric = ("holdout", "personal", "unseen"), replace(study.primary, where="test", over=None)
    finals: dict[str, dict[str, list[float]]] = {label: {name: [] for name in scores} for label in study.runs}
    for label, name in product(finals, scores):
        for run in study.runs[label].values():
            _, values = run.scores(replace(metric, where=name))
            if run.complete and len(values):
                finals[label][name].append(float(values[-1]))
    if not any(by_name[name] for by_name in finals.values() for name in ("personal", "unseen")):
        return None
    rows = tuple(
        (label, *(NONE if (one := spread(by_name[name])) is None else shown_spread(one, metric) for name in scores))
        for label, by_name in finals.items()
    )
    notes = (
        f"{capital(metric.metric_title)} at the last evaluated round, mean over clients weighted by their held-out "
        "examples, over finished runs. holdout: the global model on clients' held-out examples; personal: each "
        "client's own model on its own; unseen: clients that take part in no round, by the global model or, where "
        "parts are personal, with a personal part trained on their own examples.",
    )
    unit, title = " %" if metric.percent else "", f"{capital(metric.metric_title)} on clients' held-out examples"
    return Table(title, ("algorithm", *(f"{name}{unit}" for name in scores)), rows, notes)


def runs_table(study: StudyRecord, measure: Measure | None = None) -> Table:
    """Every run, with unrounded values for further calculations."""
    measure = measure or study.primary
    runs = [(label, seed, run) for label, by_seed in study.runs.items() for seed, run in sorted(by_seed.items())]
    private = any(run.epsilon is not None for _, _, run in runs)
    spent = ("epsilon", "delta") if private else ()
    scores = ("final", measure.best_word)
    columns = ("algorithm", "seed", "status", "rounds", *scores, *spent, "MB", "seconds", "split", "folder")
    rows = tuple(_run_cells(label, seed, run, measure, private) for label, seed, run in runs)
    fraction = ", as a fraction" if measure.percent else ""
    notes = [
        f"final and {measure.best_word}: {measure.title} on {measure.place}{fraction}; MB: sent and received together."
    ]
    if private:
        notes.append("epsilon and delta: the privacy spent up to the last recorded round; infinite without noise.")
    notes += [f"{label}, seed {seed}: {fault.why}." for label, seed, run in runs for fault in run.faults]
    return Table("Every run", columns, rows, tuple(notes))


def _run_cells(label: str, seed: int, run: RunRecord, measure: Measure, private: bool) -> tuple[str, ...]:
    values = run.scores(measure)[1].tolist()
    traffic = sum(int(line.get(key) or 0) for line in run.rounds for key in ("bytes_up", "bytes_down"))
    scores = (repr(values[-1]), repr(measure.best(values))) if values else (NONE, NONE)
    last = str(run.rounds[-1]["round"]) if run.rounds else "0"
    split = str((run.partition or {}).get("hash", NONE))
    megabytes = f"{traffic / BYTES_PER_MEGABYTE:.3f}"
    spent = (_number(run.epsilon), _number(run.delta)) if private else ()
    return (label, str(seed), run.status, last, *scores, *spent, megabytes, f"{run.seconds:.1f}", split, str(run.path))


def shown_epsilon(epsilon: float | None) -> str:
    """Two decimals, as in the terminal; a dash for a run without privacy."""
    return NONE if epsilon is None else "infinite" if math.isinf(epsilon) else f"{epsilon:.2f}"


def _number(value: float | None) -> str:
    return NONE if value is None else "infinite" if math.isinf(value) else repr(value)


def as_markdown(table: Table) -> str:
    """The table in Markdown, with its title above and its notes below."""
    head = [_markdown_text(column) for column in table.columns]
    lines = [f"**{_markdown_text(table.title)}**", "", _bars(head), _bars(["---"] * len(head))]
    lines += [_bars([_markdown_text(cell) for cell in row]) for row in table.rows]
    if table.notes:
        lines += ["", *(f"- {_markdown_text(note)}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def as_csv(table: Table) -> str:
    """The columns and rows as CSV, without title and notes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return text.getvalue()


def as_latex(table: Table) -> str:
    """The table as a LaTeX table environment that needs no package."""
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex_text(table.title)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        r"\hline",
        " & ".join(map(_latex_text, table.columns)) + r" \\",
        r"\hline",
        *(" & ".join(map(_latex_text, row)) + r" \\" for row in table.rows),
        r"\hline",
        r"\end{tabular}",
        *(rf"\par\footnotesize {_latex_text(note)}" for note in table.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def deviation_rule(measure: Measure) -> str:
    """What ± means after a score."""
    return f"± after {'an accuracy' if measure == ACCURACY else 'a value'} is the sample standard deviation over seeds."


def _score_notes(comparison: Comparison) -> tuple[str, ...]:
    rules = [deviation_rule(comparison.measure)]
    if len(comparison.rows) > 1:
        rules = [f"{rules[0]} {difference_rule(comparison)}", f"Verdict: {VERDICTS}"]
    alike = [
        row.label
        for row in comparison.rows
        if row.against_best is not None and row.against_best.verdict == "not distinguishable"
    ]
    best = (f"Not distinguishable from the best row, {comparison.best}: {', '.join(alike)}.",) if alike else ()
    return (*rules, *best, *privacy_notes(comparison), *comparison.notes)


def difference_rule(comparison: Comparison) -> str:
    """How rows are compared."""
    against = [(row.against_reference, row.against_best) for row in comparison.rows]
    all_paired = all(difference.paired for pair in against for difference in pair if difference)
    condition = "" if all_paired else " if the splits are the same"
    measure = comparison.measure
    unit = "in percentage points of" if measure.percent else "of the"
    return (
        f"Differences are {unit} final {measure.title}, paired by seed{condition}, ± half the width of the 95 % "
        "confidence interval (Student's t)."
    )


def privacy_notes(comparison: Comparison) -> tuple[str, ...]:
    """The note on the column of epsilons, if there is one."""
    if not comparison.deltas:
        return ()
    at = " and ".join(f"{delta:g}" for delta in comparison.deltas)
    return (
        f"epsilon: the privacy spent over the whole run, at delta {at}; the largest of a row's finished runs. "
        f"infinite: no noise was added; {NONE}: the run is not private. Accountant: {_accountants(comparison)}.",
    )


def _accountants(comparison: Comparison) -> str:
    """The accountants of the runs, with a warning if there are several: their bounds cannot be compared."""
    names = comparison.accountants
    warning = " (bounds of different tightness: compare rows of one accountant only)" if len(names) > 1 else ""
    return (" and ".join(names) or "none") + warning


def _runs(row: ComparisonRow, measure: Measure) -> str:
    parts = [str(row.finished)]
    parts += [f"{row.diverged} diverged"] if row.diverged else []
    parts += [f"{row.damaged} damaged"] if row.damaged else []
    parts += [f"{row.unfinished} unfinished"] if row.unfinished else []
    parts += [f"{row.lacking} without {measure.title}"] if row.lacking else []
    return ", ".join(parts)


def _spread(spread: Spread | None, measure: Measure) -> str:
    return NONE if spread is None else shown_spread(spread, measure)


def shown_difference(difference: PairedDifference | None, measure: Measure = ACCURACY) -> str:
    """The difference (of shares in percentage points), half the width of its interval, and the verdict."""
    if difference is None:
        return NONE
    return f"{measure.difference(difference.mean, difference.half_width)} {_verdict(difference)}"


def _verdict(difference: PairedDifference | None) -> str:
    return NONE if difference is None else difference.verdict


def _reach(reach: Reach) -> tuple[str, str, str]:
    if reach.rounds is None or reach.megabytes is None or reach.speed_up is None:
        return ("never" if reach.seeds else NONE), NONE, NONE
    some = "" if reach.reached == reach.seeds else f" ({reach.reached} of {reach.seeds})"
    # A mean over the seeds that reach the target does not include those that do not.
    faster = NONE if some else f"{reach.speed_up:.1f}×"
    return f"{reach.rounds:.1f}{some}", shown_megabytes(reach.megabytes), faster


def _listed(seeds: tuple[int, ...]) -> str:
    return ", ".join(map(str, seeds))


def _bars(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|&#$~])", r"\\\1", " ".join(text.split()))


_LATEX = {
    **{sign: "\\" + sign for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≈": r"$\approx$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "–": "--",
}


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
