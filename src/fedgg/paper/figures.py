"""The paper's figures from our runs, and FedGG's diagnostics over the rounds, each with a caption and a table."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure

from fedgg.analysis.compare import Spread
from fedgg.analysis.conditions import conditions
from fedgg.lab.build import splits_alone
from fedgg.paper.items import REFERENCE, Item, shown_dataset
from fedgg.paper.panels import Panel, SplitPanel, ValuePanel, curve_panels, split_panels, value_panels
from fedgg.paper.plan import Line, Plan
from fedgg.paper.results import Results
from fedgg.paper.tables import MISSING, about_runs, spread_of, titled
from fedgg.report.figures import common_rounds
from fedgg.report.tables import Table
from fedgg.runfolder.records import Floats, RunRecord


@dataclass(frozen=True)
class Drawn:
    """A figure, what it shows, what belongs under it, and every number in it."""

    figure: Figure
    shows: str
    notes: tuple[str, ...]
    numbers: Table
    summary: Table | None = None  # what is worth reading as a table


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
                {
                    line.label: _diagnostic_values(found, name)
                    for line, found in records.items()
                    if line.beta == beta and found
                },
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
    return [record.diagnostic(name)[1][1:] for record in records]


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
                for number, value in zip(*record.diagnostic(name), strict=True):
                    cells = (f"{line.beta:g}", line.label, str(record.config.get("seed")), name)
                    rows.append((*cells, str(number), f"{value:.6g}"))
    return Table(item.title, ("beta", "method", "seed", "diagnostic", "round", "mean over clients"), tuple(rows))


_P = TypeVar("_P")
BAND = "Line: mean over seeds, band: lowest to highest; diverged runs are not shown."


def drawn(plan: Plan, item: Item, results: Results, data_folder: Path | None = None, run: bool = True) -> Drawn | None:
    """The figure, or None where there is nothing to draw. Without `run` no data set is opened."""
    if item.kind == "split":
        return _splits(plan, item, results, data_folder, run)
    if item.kind == "inner":
        return inner_figure(plan, item, results)
    return _weights(plan, item, results) if item.kind == "weights" else _accuracy(plan, item, results)


def _splits(plan: Plan, item: Item, results: Results, data_folder: Path | None, run: bool) -> Drawn | None:
    panels, rows = {}, []
    for dataset in plan.datasets_of(item):
        for beta, split in _dealt(plan, item, dataset, results, data_folder, run).items():
            panels[beta, dataset] = SplitPanel(f"{shown_dataset(dataset)}, beta {beta:g}", split["counts"])
            for client, counts in enumerate(split["counts"]):
                for name, count in zip(split["classes"], counts, strict=True):
                    rows.append((shown_dataset(dataset), f"{beta:g}", str(client), str(name), str(count)))
    if not panels:
        return None
    shows = "Examples of each class (across) that each client (down) holds; the stronger the colour, the more."
    notes = (f"Seed {plan.seeds[0]}; the paper shows beta 0.5 only.", *about_runs(plan, item)[: int(plan.quick)])
    table = Table(item.title, ("data set", "beta", "client", "class", "examples"), tuple(rows))
    return Drawn(split_panels(_laid_out(panels)), shows, notes, table)


def _laid_out(panels: dict[tuple[float, str], _P]) -> list[list[_P]]:
    """As in the paper: a row for each beta, a column for each data set; one data set alone takes one row."""
    if len({dataset for _, dataset in panels}) == 1:
        return [list(panels.values())]
    betas = dict.fromkeys(beta for beta, _ in panels)
    return [[panel for (at, _), panel in panels.items() if at == beta] for beta in betas]


def _dealt(
    plan: Plan, item: Item, dataset: str, results: Results, data_folder: Path | None, run: bool
) -> dict[float, dict[str, Any]]:
    """By beta, as a run wrote it down, or else dealt again: that takes the data set, but no training."""
    found: dict[float, dict[str, Any] | None] = {}
    for beta in item.betas:
        records = (results.record(line, plan.seeds[0]) for line in plan.methods(dataset, beta))
        found[beta] = next((record.partition for record in records if record and record.partition), None)
    lacking = [beta for beta, split in found.items() if split is None]
    if lacking and run:
        again = [plan.methods(dataset, beta)[0].experiment(plan.seeds[0]) for beta in lacking]
        found |= dict(zip(lacking, splits_alone(again, data_folder), strict=True))
    return {beta: split for beta, split in found.items() if split is not None}


def _accuracy(plan: Plan, item: Item, results: Results) -> Drawn | None:
    lines = plan.lines(item)
    panels = {}
    for beta, dataset in itertools.product(item.betas, plan.datasets_of(item)):
        here = [line for line in lines if (line.dataset, line.beta) == (dataset, beta)]
        curves = {line.label: _records(plan, line, results) for line in here}
        panels[beta, dataset] = Panel(f"{shown_dataset(dataset)}, beta {beta:g}", curves)
    return _drawn(plan, item, _laid_out(panels), lines, results)


def _weights(plan: Plan, item: Item, results: Results) -> Drawn | None:
    """Adaptive on one side, fixed on the other, the latter under both readings of the first step."""
    lines = plan.lines(item)
    if not lines:
        return None
    parts = {"adaptive weight": "", "fixed weight, first step skipped": " skip", "fixed weight, epsilon": " epsilon"}
    panels = []
    for title, end in parts.items():
        shown = [line for line in lines if line.label == REFERENCE or _part(line.label) == end]
        curves = {line.label.removeprefix("FedGG ").removesuffix(end): _records(plan, line, results) for line in shown}
        panels.append(Panel(title, curves))
    return _drawn(plan, item, [panels], lines, results, REFERENCE)


def _part(label: str) -> str:
    """How a line of fixed weight treats the first step; nothing for the adaptive weight."""
    return next((end for end in (" skip", " epsilon") if label.endswith(end)), "")


def _drawn(
    plan: Plan,
    item: Item,
    grid: list[list[Panel]],
    lines: list[Line],
    results: Results,
    reference: str | None = None,
) -> Drawn | None:
    records = [record for line in lines for record in _records(plan, line, results)]
    if not records:
        return None
    numbers = Table(item.title, ("panel", "line", "round", "mean %", "lowest %", "highest %"), _points(grid))
    missing = _missing(plan, lines, results)
    notes = (BAND, *about_runs(plan, item), *conditions(records), *_diverged(plan, lines, results), *missing)
    summary = _ends(plan, item, lines, results) if item.kind == "weights" else None
    figure = curve_panels(grid, reference, own_legends=reference is not None)
    return Drawn(figure, "Test accuracy against rounds.", notes, numbers, summary)


def _missing(plan: Plan, lines: list[Line], results: Results) -> list[str]:
    """Data sets of which some seeds were run only, and lines of them that were not run at all."""
    notes = []
    for dataset in dict.fromkeys(line.dataset for line in lines):
        own = [line for line in lines if line.dataset == dataset]
        by_line = {line: [seed for seed in plan.seeds if results.record(line, seed) is not None] for line in own}
        seeds = [seed for seed in plan.seeds if any(seed in there for there in by_line.values())]
        absent = [f"{line.label} at beta {line.beta:g}" for line, there in by_line.items() if not there]
        if seeds and seeds != list(plan.seeds):
            notes.append(f"{shown_dataset(dataset)}: seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))} only.")
        if absent:
            what = "none of its runs is there" if len(absent) == len(own) else f"not run yet: {'; '.join(absent)}"
            notes.append(f"{shown_dataset(dataset)}: {what}.")
    return notes


def _ends(plan: Plan, item: Item, lines: list[Line], results: Results) -> Table:
    rows = []
    for line in lines:
        records = _records(plan, line, results)
        cells = (_cell(spread_of(records, "highest")), _cell(spread_of(records, "final")))
        rows.append((line.label, *cells, str(sum(record.status == "diverged" for record in records))))
    where = f"{shown_dataset(lines[0].dataset)}, beta {lines[0].beta:g}"
    return Table(f"{titled(plan, item)}; {where}", ("weight", "highest %", "final %", "diverged"), tuple(rows))


def _cell(found: Spread | None) -> str:
    if found is None:
        return MISSING
    return f"{100 * found.mean:.1f}" + ("" if found.sd is None else f" ± {100 * found.sd:.1f}")


def _points(grid: list[list[Panel]]) -> tuple[tuple[str, ...], ...]:
    rows = []
    for panel in (panel for row in grid for panel in row):
        for label, runs in panel.lines.items():
            rounds, accuracies = common_rounds([run for run in runs if run.sound])
            if not len(accuracies):
                continue
            for at, number in enumerate(rounds):
                column = 100 * accuracies[:, at]
                cells = (f"{value:.2f}" for value in (np.mean(column), column.min(), column.max()))
                rows.append((panel.title, label, str(number), *cells))
    return tuple(rows)


def _records(plan: Plan, line: Line, results: Results) -> list[RunRecord]:
    found = (results.record(line, seed) for seed in plan.seeds)
    return [record for record in found if record is not None]


def _diverged(plan: Plan, lines: list[Line], results: Results) -> list[str]:
    told = []
    for line in lines:
        records = {seed: results.record(line, seed) for seed in plan.seeds}
        gone = [str(seed) for seed, record in records.items() if record is not None and record.status == "diverged"]
        if gone:
            told.append(
                f"{shown_dataset(line.dataset)}, {line.label}, beta {line.beta:g}: seed {', '.join(gone)} diverged."
            )
    return told
