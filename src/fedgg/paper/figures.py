"""The paper's figures from our runs, and FedGG's diagnostics over rounds, each with notes and its numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedgg.analysis.compare import Spread, shown_seeds
from fedgg.analysis.run_environment import conditions
from fedgg.analysis.verdict import shown_spread
from fedgg.lab.federated_data import splits_alone
from fedgg.paper.find_or_run import Results
from fedgg.paper.items import REFERENCE, Item, shown_dataset
from fedgg.paper.plan import PlannedMethod, ReproductionPlan
from fedgg.paper.tables import MISSING, about_runs, spread_of, titled
from fedgg.report.data_figures import SplitPanel, split_panels
from fedgg.report.figure_style import COLOURS, LINE_STYLES, blank, mean_and_band, styled
from fedgg.report.run_figures import common_rounds
from fedgg.report.tables import Table
from fedgg.runfolder.record_types import Floats, RunRecord

BAND = "Line: mean over seeds, band: lowest to highest; diverged runs are not shown."
DIAGNOSTICS = ("cosine", "weight", "drift", "step")
EARLY, LATE = slice(0, 10), slice(-10, None)  # of the rounds from the second on

_P = TypeVar("_P")


@dataclass(frozen=True)
class PaperFigure:
    """A figure, its description, the notes under it, and every number in it."""

    figure: Figure
    shows: str
    notes: tuple[str, ...]
    numbers: Table
    summary: Table | None = None  # a table to show beside the figure


def paper_figure(
    plan: ReproductionPlan, item: Item, results: Results, data_folder: Path | None = None, run: bool = True
) -> PaperFigure | None:
    """The figure of an item; None if none of its runs is there. Without `run` no data set is opened."""
    if item.kind == "split":
        return _split_figure(plan, item, results, data_folder, run)
    if item.kind == "inner":
        return _diagnostics_figure(plan, item, results)
    return _weights_figure(plan, item, results) if item.kind == "weights" else _accuracy_figure(plan, item, results)


def _records(plan: ReproductionPlan, method: PlannedMethod, results: Results) -> list[RunRecord]:
    records = (results.record(method, seed) for seed in plan.seeds)
    return [record for record in records if record is not None]


def _grid(panels: dict[tuple[str, str], _P]) -> list[list[_P]]:
    """As in the paper: a row for each split, a column for each data set; a single data set takes one row."""
    if len({dataset for _, dataset in panels}) == 1:
        return [list(panels.values())]
    splits = dict.fromkeys(split for split, _ in panels)
    return [[panel for (at, _), panel in panels.items() if at == split] for split in splits]


# Splits ---------------------------------------------------------------------------------------------------------------


def _split_figure(
    plan: ReproductionPlan, item: Item, results: Results, data_folder: Path | None, run: bool
) -> PaperFigure | None:
    panels, rows = {}, []
    for dataset in plan.datasets_of(item):
        for split, partition in _partitions(plan, item, dataset, results, data_folder, run).items():
            panels[split, dataset] = SplitPanel(f"{shown_dataset(dataset)}, {split}", partition["counts"])
            for client, counts in enumerate(partition["counts"]):
                for name, count in zip(partition["classes"], counts, strict=True):
                    cells = (shown_dataset(dataset), item.split_cell(split), str(client), str(name), str(count))
                    rows.append(cells)
    if not panels:
        return None
    shows = "Examples of each class (across) that each client (down) holds; the stronger the colour, the more."
    notes = (f"Seed {plan.seeds[0]}; the paper shows beta 0.5 only.", *about_runs(plan, item)[: int(plan.quick)])
    table = Table(item.title, ("data set", item.split_column, "client", "class", "examples"), tuple(rows))
    return PaperFigure(split_panels(_grid(panels)), shows, notes, table)


def _partitions(
    plan: ReproductionPlan, item: Item, dataset: str, results: Results, data_folder: Path | None, run: bool
) -> dict[str, dict[str, Any]]:
    """By split: from a run that recorded it, or else computed, which takes the data set but no training."""
    partitions: dict[str, dict[str, Any] | None] = {}
    for split in item.splits:
        records = (results.record(method, plan.seeds[0]) for method in plan.table_methods(dataset, split))
        partitions[split] = next((record.partition for record in records if record and record.partition), None)
    missing = [split for split, partition in partitions.items() if partition is None]
    if missing and run:
        experiments = [plan.table_methods(dataset, split)[0].experiment(plan.seeds[0]) for split in missing]
        partitions |= dict(zip(missing, splits_alone(experiments, data_folder), strict=True))
    return {split: partition for split, partition in partitions.items() if partition is not None}


# Accuracy against rounds ----------------------------------------------------------------------------------------------


def _accuracy_figure(plan: ReproductionPlan, item: Item, results: Results) -> PaperFigure | None:
    methods = plan.methods_of(item)
    panels = {}
    for split, dataset in itertools.product(item.splits, plan.datasets_of(item)):
        here = [method for method in methods if (method.dataset, method.split) == (dataset, split)]
        curves = {method.label: _records(plan, method, results) for method in here}
        panels[split, dataset] = Panel(f"{shown_dataset(dataset)}, {split}", curves)
    return _curves_figure(plan, item, _grid(panels), methods, results)


def _weights_figure(plan: ReproductionPlan, item: Item, results: Results) -> PaperFigure | None:
    """Adaptive weights in one panel, fixed ones in another for each reading of the first step."""
    methods = plan.methods_of(item)
    if not methods:
        return None
    parts = {"adaptive weight": "", "fixed weight, first step skipped": " skip", "fixed weight, epsilon": " epsilon"}
    panels = []
    for title, end in parts.items():
        shown = [method for method in methods if method.label == REFERENCE or _first_step(method.label) == end]
        names = {method: method.label.removeprefix("FedGG ").removesuffix(end) for method in shown}
        panels.append(Panel(title, {names[method]: _records(plan, method, results) for method in shown}))
    return _curves_figure(plan, item, [panels], methods, results, REFERENCE)


def _first_step(label: str) -> str:
    """How a method of fixed weight treats the first step; empty for the adaptive weight."""
    return next((end for end in (" skip", " epsilon") if label.endswith(end)), "")


def _curves_figure(
    plan: ReproductionPlan,
    item: Item,
    grid: list[list[Panel]],
    methods: list[PlannedMethod],
    results: Results,
    reference: str | None = None,
) -> PaperFigure | None:
    records = [record for method in methods for record in _records(plan, method, results)]
    if not records:
        return None
    numbers = Table(item.title, ("panel", "line", "round", "mean %", "lowest %", "highest %"), _points(grid))
    missing = _missing(plan, methods, results)
    notes = (BAND, *about_runs(plan, item), *conditions(records), *_diverged(plan, methods, results), *missing)
    summary = _accuracies(plan, item, methods, results) if item.kind == "weights" else None
    figure = curve_panels(grid, reference, own_legends=reference is not None)
    return PaperFigure(figure, "Test accuracy against rounds.", notes, numbers, summary)


def _points(grid: list[list[Panel]]) -> tuple[tuple[str, ...], ...]:
    rows = []
    for panel in (panel for row in grid for panel in row):
        for label, runs in panel.curves.items():
            rounds, accuracies = common_rounds([run for run in runs if run.sound])
            if not len(accuracies):
                continue
            for at, number in enumerate(rounds):
                column = 100 * accuracies[:, at]
                cells = (f"{value:.2f}" for value in (np.mean(column), column.min(), column.max()))
                rows.append((panel.title, label, str(number), *cells))
    return tuple(rows)


def _accuracies(plan: ReproductionPlan, item: Item, methods: list[PlannedMethod], results: Results) -> Table:
    rows = []
    for method in methods:
        records = _records(plan, method, results)
        cells = (_cell(spread_of(records, "highest")), _cell(spread_of(records, "final")))
        rows.append((method.label, *cells, str(sum(record.status == "diverged" for record in records))))
    where = f"{shown_dataset(methods[0].dataset)}, {methods[0].split}"
    return Table(f"{titled(plan, item)}; {where}", ("weight", "highest %", "final %", "diverged"), tuple(rows))


def _cell(accuracy: Spread | None) -> str:
    return MISSING if accuracy is None else shown_spread(accuracy)


def _missing(plan: ReproductionPlan, methods: list[PlannedMethod], results: Results) -> list[str]:
    """Data sets that were run with some of the seeds, and their methods that were not run at all."""
    notes = []
    for dataset in dict.fromkeys(method.dataset for method in methods):
        seeds_run = {
            method: [seed for seed in plan.seeds if results.record(method, seed) is not None]
            for method in methods
            if method.dataset == dataset
        }
        seeds = [seed for seed in plan.seeds if any(seed in some for some in seeds_run.values())]
        absent = [f"{method.label} at {method.split}" for method, some in seeds_run.items() if not some]
        if seeds and seeds != list(plan.seeds):
            notes.append(f"{shown_dataset(dataset)}: {shown_seeds(seeds)} only.")
        if absent:
            what = "none of its runs is there" if len(absent) == len(seeds_run) else f"not run yet: {'; '.join(absent)}"
            notes.append(f"{shown_dataset(dataset)}: {what}.")
    return notes


def _diverged(plan: ReproductionPlan, methods: list[PlannedMethod], results: Results) -> list[str]:
    notes = []
    for method in methods:
        records = {seed: results.record(method, seed) for seed in plan.seeds}
        seeds = [str(seed) for seed, record in records.items() if record is not None and record.status == "diverged"]
        if seeds:
            where = f"{shown_dataset(method.dataset)}, {method.label}, {method.split}"
            notes.append(f"{where}: seed {', '.join(seeds)} diverged.")
    return notes


# FedGG's diagnostics --------------------------------------------------------------------------------------------------


def _diagnostics_figure(plan: ReproductionPlan, item: Item, results: Results) -> PaperFigure | None:
    """A panel for each diagnostic and split; the summary has their mean over the first rounds and over the last."""
    finished = {
        method: [record for record in _records(plan, method, results) if record.status == "finished"]
        for method in plan.methods_of(item)
    }
    all_records = [record for records in finished.values() for record in records]
    if not all_records:
        return None
    splits = [name for name in item.splits if any(some for method, some in finished.items() if method.split == name)]
    grid = [
        [
            ValuePanel(
                f"{'weight, relative' if name == 'weight' else name}, {split}",
                {
                    method.label: _diagnostic_values(records, name)
                    for method, records in finished.items()
                    if method.split == split and records
                },
                first=2,
            )
            for name in DIAGNOSTICS
        ]
        for split in splits
    ]
    notes = (
        "Mean over clients after their last local step: cosine of drift and last global update, weight lambda, length "
        "of the drift |u| and of the last local step |s|. The picture shows the weight relative to its mean over "
        "rounds 2 to 11. Line: mean over seeds, band: lowest to highest.",
        *about_runs(plan, item),
        *conditions(all_records),
    )
    shows = "Cosine, weight, drift and step of FedGG's clients against rounds."
    numbers, summary = _diagnostics_numbers(item, finished), _diagnostics_summary(plan, item, finished)
    return PaperFigure(value_panels(grid), shows, notes, numbers, summary)


def _diagnostic_values(records: list[RunRecord], name: str) -> list[Floats]:
    """Weights of different methods are orders of magnitude apart, so each is relative to its own first rounds."""
    curves = _diagnostic_curves(records, name)
    return [curve / curve[EARLY].mean() for curve in curves] if name == "weight" else curves


def _diagnostic_curves(records: list[RunRecord], name: str) -> list[Floats]:
    """From the second round on: in the first there is no last global update."""
    return [record.diagnostic(name)[1][1:] for record in records]


def _diagnostics_summary(plan: ReproductionPlan, item: Item, finished: dict[PlannedMethod, list[RunRecord]]) -> Table:
    rows = []
    for method, records in finished.items():
        cells: list[str] = []
        for name in DIAGNOSTICS:
            early, late = (_mean(records, name, part) for part in (EARLY, LATE))
            cells.append(MISSING if early is None or late is None else f"{early:.3g} → {late:.3g}")
        rows.append((item.split_cell(method.split), method.label, *cells))
    where = ", ".join(map(shown_dataset, plan.datasets_of(item)))
    title = f"{titled(plan, item)}; {where}: mean of rounds 2 to 11 → of the last ten"
    return Table(title, (item.split_column, "method", *DIAGNOSTICS), tuple(rows))


def _mean(records: list[RunRecord], name: str, part: slice) -> float | None:
    values = [curve[part] for curve in _diagnostic_curves(records, name)]
    return float(np.mean([value.mean() for value in values])) if values and all(map(len, values)) else None


def _diagnostics_numbers(item: Item, finished: dict[PlannedMethod, list[RunRecord]]) -> Table:
    rows = []
    for method, records in finished.items():
        for record in records:
            for name in DIAGNOSTICS:
                for number, value in zip(*record.diagnostic(name), strict=True):
                    cells = (item.split_cell(method.split), method.label, str(record.config.get("seed")), name)
                    rows.append((*cells, str(number), f"{value:.6g}"))
    return Table(
        item.title, (item.split_column, "method", "seed", "diagnostic", "round", "mean over clients"), tuple(rows)
    )


@dataclass(frozen=True)
class Panel:
    """Accuracy curves under one title: the runs of each label, one for each seed."""

    title: str
    curves: dict[str, list[RunRecord]]


@dataclass(frozen=True, eq=False)
class ValuePanel:
    """Curves of another number under one title, for each label one curve a seed."""

    title: str
    curves: dict[str, list[Floats]]
    first: int = 1  # round


@styled
def curve_panels(grid: Sequence[Sequence[Panel]], reference: str | None = None, own_legends: bool = False) -> Figure:
    """Rows of panels; mean line and band from lowest to highest over seeds. The reference is drawn thin and grey.

    One legend for all panels, or, with `own_legends`, one in each and a shared scale.
    """
    rows, columns = len(grid), max(map(len, grid))
    figure = blank(max(5.2, 3.1 * columns + (0 if own_legends else 1.5)), 2.5 * rows + 0.5)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=own_legends)
    labels = list(dict.fromkeys(label for row in grid for panel in row for label in panel.curves))
    drawn = {label for row in grid for panel in row for label, runs in panel.curves.items() if _finished(runs)}
    for at, row in enumerate(grid):
        for place, panel in enumerate(row):
            styles = _styles(list(panel.curves) if own_legends else labels, reference)
            _curves(axes[at][place], panel, styles)
            if own_legends:
                _legend(axes[at][place], {k: v for k, v in styles.items() if k in drawn}, loc="lower right")
            if at == rows - 1:
                axes[at][place].set_xlabel("round")
        axes[at][0].set_ylabel("test accuracy")
        for empty in axes[at][len(row) :]:
            empty.set_visible(False)
    if not own_legends:
        styles = _styles(labels, reference)
        _legend(figure, {k: v for k, v in styles.items() if k in drawn}, loc="outside right upper")
    return figure


@styled
def value_panels(grid: Sequence[Sequence[ValuePanel]]) -> Figure:
    """Rows of panels of any number against rounds; mean and band over seeds, one legend for all."""
    rows, columns = len(grid), max(map(len, grid))
    figure = blank(3.0 * columns, 2.4 * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False)
    labels = list(dict.fromkeys(label for row in grid for panel in row for label in panel.curves))
    styles = _styles(labels, None)
    for at, row in enumerate(grid):
        for place, panel in enumerate(row):
            here = axes[at][place]
            for label, curves in panel.curves.items():
                shared = min(map(len, curves))
                values = np.array([curve[:shared] for curve in curves])
                mean_and_band(here, np.arange(shared) + panel.first, values, **styles[label])
            here.set_title(panel.title, loc="left")
            here.grid(axis="y")
            if at == rows - 1:
                here.set_xlabel("round")
    _legend(figure, styles, loc="outside lower center")
    return figure


def _legend(place: Axes | Figure, styles: dict[str, dict[str, Any]], loc: Any) -> None:
    handles = [Line2D([], [], **style) for style in styles.values()]
    place.legend(handles, list(styles), loc=loc, handlelength=2.8)


def _styles(labels: Sequence[str], reference: str | None) -> dict[str, dict[str, Any]]:
    """A colour and a line style for each label, the same in every panel."""
    styles: dict[str, dict[str, Any]] = {}
    for label in labels:
        at = len(styles)  # a reference is grey, and black, which is similar, is skipped
        styles[label] = {"color": COLOURS[at % len(COLOURS)], "linestyle": LINE_STYLES[at % len(LINE_STYLES)]}
        if label == reference:
            styles[label] = {"color": "#888888", "linestyle": "-", "linewidth": 1.0}
    return styles


def _finished(runs: list[RunRecord]) -> list[RunRecord]:
    return [run for run in runs if run.sound]


def _curves(axes: Axes, panel: Panel, styles: dict[str, dict[str, Any]]) -> None:
    for label, runs in panel.curves.items():
        rounds, accuracies = common_rounds(_finished(runs))
        if not len(accuracies):
            continue
        mean_and_band(axes, rounds, accuracies, marker="o" if len(rounds) == 1 else "", **styles[label])
    axes.set_title(panel.title, loc="left")
    if not axes.lines:
        axes.text(0.5, 0.5, "no finished run", transform=axes.transAxes, ha="center", color="#888888")
        axes.set(xticks=[], yticks=[])
        return
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
