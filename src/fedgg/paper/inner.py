"""FedGG's diagnostics over the rounds: cosine, weight, drift and step, each as the mean over clients."""

from __future__ import annotations

import numpy as np

from fedgg.paper.drawn import Drawn
from fedgg.paper.items import Item, shown_dataset
from fedgg.paper.plan import Line, Plan
from fedgg.paper.results import Results
from fedgg.paper.tables import MISSING, about_runs, titled
from fedgg.report.conditions import conditions
from fedgg.report.folders import Floats, RunRecord
from fedgg.report.panels import ValuePanel, value_panels
from fedgg.report.tables import Table

DIAGNOSTICS = ("cosine", "weight", "drift", "step")
EARLY, LATE = slice(0, 10), slice(-10, None)  # of the rounds from the second on


def inner_figure(plan: Plan, item: Item, results: Results) -> Drawn | None:
    """A panel for each diagnostic and split; as a summary, how they change from the first rounds to the last."""
    lines = plan.lines(item)
    records = {line: _finished(plan, line, results) for line in lines}
    everybody = [record for found in records.values() for record in found]
    if not everybody:
        return None
    betas = [beta for beta in item.betas if any(found for line, found in records.items() if line.beta == beta)]
    grid = [
        [
            ValuePanel(
                f"{'weight, relative' if name == 'weight' else name}, beta {beta:g}",
                {line.label: _diagnostic_values(found, name) for line, found in records.items() if line.beta == beta and found},
                first=2,
            )
            for name in DIAGNOSTICS
        ]
        for beta in betas
    ]
    notes = (
        "Mean over clients after their last local step: cosine of drift and last global update, weight lambda, length "
        "of the drift |u| and of the last local step |s|. The picture shows the weight relative to its mean over "
        "rounds 2 to 11. Line: mean over seeds, band: lowest to highest.",
        *about_runs(plan, item),
        *conditions(everybody),
    )
    shows = "Cosine, weight, drift and step of FedGG's clients against rounds."
    return Drawn(value_panels(grid), shows, notes, _numbers(item, records), _summary(plan, item, records))


def _finished(plan: Plan, line: Line, results: Results) -> list[RunRecord]:
    found = (results.record(line, seed) for seed in plan.seeds)
    return [record for record in found if record is not None and record.status == "finished"]


def _curves(records: list[RunRecord], name: str) -> list[Floats]:
    """From the second round on: in the first there is no last global update."""
    return [record.reading(name)[1][1:] for record in records]


def _diagnostic_values(records: list[RunRecord], name: str) -> list[Floats]:
    """Weights lie decades apart: what is to be seen of them is whether they rise or fall."""
    curves = _curves(records, name)
    return [curve / curve[EARLY].mean() for curve in curves] if name == "weight" else curves


def _summary(plan: Plan, item: Item, records: dict[Line, list[RunRecord]]) -> Table:
    rows = []
    for line, found in records.items():
        cells: list[str] = []
        for name in DIAGNOSTICS:
            early, late = (_mean(found, name, part) for part in (EARLY, LATE))
            cells.append(MISSING if early is None or late is None else f"{early:.3g} → {late:.3g}")
        rows.append((f"{line.beta:g}", line.label, *cells))
    where = ", ".join(map(shown_dataset, plan.datasets_of(item)))
    title = f"{titled(plan, item)}; {where}: mean of rounds 2 to 11 → of the last ten"
    return Table(title, ("beta", "method", *DIAGNOSTICS), tuple(rows))


def _mean(records: list[RunRecord], name: str, part: slice) -> float | None:
    values = [curve[part] for curve in _curves(records, name)]
    return float(np.mean([value.mean() for value in values])) if values and all(map(len, values)) else None


def _numbers(item: Item, records: dict[Line, list[RunRecord]]) -> Table:
    rows = []
    for line, found in records.items():
        for record in found:
            for name in DIAGNOSTICS:
                for number, value in zip(*record.reading(name), strict=True):
                    cells = (f"{line.beta:g}", line.label, str(record.config.get("seed")), name)
                    rows.append((*cells, str(number), f"{value:.6g}"))
    return Table(item.title, ("beta", "method", "seed", "diagnostic", "round", "mean over clients"), tuple(rows))
