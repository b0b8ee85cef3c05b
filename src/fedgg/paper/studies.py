"""Studies of ours as tables: every variant of a preset beside FedAvg of the same split."""

from __future__ import annotations

from fedgg.lab.parts import extra_work
from fedgg.paper.items import REFERENCE, Item, shown_dataset
from fedgg.paper.plan import Line, Plan
from fedgg.paper.results import Results
from fedgg.paper.tables import (
    MISSING,
    PAIRED,
    about_runs,
    as_study,
    notes_of,
    over_reference,
    reached,
    rounds_rule,
    titled,
)
from fedgg.report.compare import WINDOW, Row, Spread, compare
from fedgg.report.conditions import conditions, shown_megabytes
from fedgg.report.folders import RunRecord
from fedgg.report.tables import NONE, Table

COLUMNS = ("beta", "method", "highest %", "over FedAvg", "final %", "worst final %", "rounds", "rounds*", "diverged")
COSTS = ("setting", "MB a round", "arithmetic")


def study_table(plan: Plan, item: Item, results: Results) -> Table:
    """Accuracies, their distance to FedAvg's, and the rounds to its last accuracy; one block for each split."""
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    entered: list[RunRecord] = []
    lines = plan.lines(item)
    for beta in item.betas:
        own = [line for line in lines if line.beta == beta]
        study = as_study(plan, own, results)
        comparison = compare(study)
        for line, row in zip(own, comparison.rows, strict=True):
            if not study.runs[line.label]:
                continue  # the notes name those that have not been run
            over = "reference" if line.label == REFERENCE else over_reference(line, study, "highest")
            accuracies = (_shown(row.highest, row), over, _shown(row.final, row), _worst(study.runs[line.label]))
            costs = _costs(line, study.runs[line.label]) if item.costs else ()
            rows.append((f"{beta:g}", line.label, *accuracies, *_ends(row), *costs))
        notes += [f"beta {beta:g}: {note}" for note in notes_of(comparison, study)]
        entered += [record for by_seed in study.runs.values() for record in by_seed.values()]
    where = ", ".join(map(shown_dataset, plan.datasets_of(item)))
    about = (
        "Highest and final test accuracy, ± the sample standard deviation over seeds; means are over the seeds that "
        f"did not diverge. Over FedAvg: highest accuracy, {PAIRED}",
        *rounds_rule()[:1],
        f"* the same with accuracies, and the target, averaged over the last {WINDOW} rounds.",
        *([ABOUT_COSTS] if item.costs else []),
        *about_runs(plan, item),
    )
    columns = (*COLUMNS, *COSTS) if item.costs else COLUMNS
    return Table(f"{titled(plan, item)}; {where}", columns, tuple(rows), (*about, *conditions(entered), *notes))


ABOUT_COSTS = (
    "MB a round: what all clients send and receive, in 10^6 bytes. Arithmetic: local work in forward and backward "
    "passes, as many times FedAvg's."
)


def _costs(line: Line, runs: dict[int, RunRecord]) -> tuple[str, str, str]:
    settings = ", ".join(f"{key} {value}" for key, value in line.base.algorithm.settings.items()) or "none"
    bytes_a_round = [float(run.megabytes()[-1]) / len(run.rounds) for run in runs.values() if len(run.megabytes())]
    traffic = shown_megabytes(sum(bytes_a_round) / len(bytes_a_round)) if bytes_a_round else NONE
    return settings, traffic, f"{extra_work(line.base):.2f}"


def _shown(found: Spread | None, row: Row) -> str:
    if found is None:
        return NONE if row.diverged else MISSING
    return f"{100 * found.mean:.1f}" + ("" if found.sd is None else f" ± {100 * found.sd:.1f}")


def _worst(runs: dict[int, RunRecord]) -> str:
    """The final accuracy of the seed that ends lowest: a run can be lost without diverging."""
    finals = [run.accuracy()[1][-1] for run in runs.values() if run.status == "finished" and len(run.rounds)]
    return f"{100 * min(finals):.1f}" if finals else NONE


def _ends(row: Row) -> tuple[str, str, str]:
    ran = row.finished + row.diverged
    gone = f"{row.diverged} of {ran}" if row.diverged else "0" if ran else NONE
    return reached(row.raw), reached(row.smoothed), gone
