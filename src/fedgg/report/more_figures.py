"""Figures of the algorithms' diagnostics, of the clients, and of a sweep."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedgg.report.axes import Axes as SweepAxes
from fedgg.report.compare import Spread, spread
from fedgg.report.figures import MOST_ROWS
from fedgg.report.folders import RunRecord, StudyRecord
from fedgg.report.page_runs import FOLLOWED, clients_data
from fedgg.report.style import COLOURS, LINE_STYLES, blank, legend_name, short, styled

MARKERS = ("o", "s", "D", "^", "P", "*", "v")
SEEN = 7  # rows whose dots can be told apart
NAMED = 40  # clients whose names there is room for
BANDS = 8  # rows whose bands do not bury the lines


@styled
def diagnostics_figure(study: StudyRecord) -> Figure:
    """A panel for each diagnostic: mean line and, where rows are few, a band over the finished seeds."""
    records = [record for by_seed in study.runs.values() for record in by_seed.values()]
    names = list(dict.fromkeys(n for record in records for line in record.rounds for n in line.get("readings") or {}))
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    figure = blank(3.6 * columns + 1.6, 2.5 * rows + 0.2)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    drawn: set[str] = set()
    for name, axes in zip(names, panels, strict=False):
        shown_rows = study.labels[:MOST_ROWS]
        drawn |= {label for at, label in enumerate(shown_rows) if _diagnostic(axes, study, label, at, name)}
        axes.set_title(short(name, 40), loc="left")
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.grid(axis="y")
    for empty in panels:
        empty.set_visible(False)
    shown = [(at, label) for at, label in enumerate(study.labels) if label in drawn]
    handles = [Line2D([], [], **_line(at)) for at, _ in shown]
    figure.legend(handles, [legend_name(label) for _, label in shown], loc="outside right upper", handlelength=2.8)
    return figure


@styled
def clients_figure(study: StudyRecord, seed: int) -> Figure:
    """Each client's last hold-out accuracy, or its loss where there are no hold-out examples.

    One marker for each client and row; of more than `FOLLOWED` clients a line for each row, its clients sorted.
    """
    having = clients_told(study, seed)
    key = "holdout" if any(one["holdout"] for one in having.values()) else "loss"
    many = any(one["of"] > FOLLOWED for one in having.values())
    figure = blank(7.5, 3.4)
    axes = figure.subplots()
    for at, (label, one) in enumerate(list(having.items())[:SEEN]):
        points = [(c, v) for c, v in zip(one["client"], one[key] or [], strict=False) if v is not None]
        if points and many:
            values = sorted((v for _, v in points), reverse=key == "loss")
            axes.plot(np.linspace(0, 100, len(values)), values, label=legend_name(label), **_line(at))
        elif points:
            colour, marker = COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)]
            x, y = zip(*points, strict=True)
            # Side by side, so that equal values do not hide each other.
            beside = (at - (min(len(having), SEEN) - 1) / 2) * 0.11
            axes.scatter(np.array(x) + beside, y, s=22, color=colour, marker=marker, label=legend_name(label))
    axes.set_xlabel("clients, worst to best (%)" if many else "client")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    here = [by_seed[seed] for by_seed in study.runs.values() if seed in by_seed]
    names = next((record.client_names for record in here if record.client_names), None)
    if names is not None and len(names) <= NAMED:
        axes.set_xticks(range(len(names)), [short(name, 16) for name in names], rotation=35, ha="right")
    axes.set_ylabel("hold-out accuracy" if key == "holdout" else "training loss")
    if key == "holdout":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    when = "last evaluation" if key == "holdout" else "last round of each client"
    unfinished = any(not study.runs[label][seed].complete for label in having)
    more = f"; first {SEEN} of {len(having)} rows" if len(having) > SEEN else ""
    title = f"seed {seed}, {when}{' so far (not all runs have finished)' if unfinished else ''}{more}"
    axes.set_title(title, loc="left", fontsize=8, color="#555555")
    figure.legend(loc="outside right upper")
    return figure


@styled
def sweep_figure(study: StudyRecord, sweep: SweepAxes) -> Figure:
    """Final test accuracy over one axis as a line, over two as a map with its values."""
    finals = {label: _final(list(by_seed.values())) for label, by_seed in study.runs.items()}
    keys = list(sweep.values)
    at = {place: finals.get(label) for label, place in sweep.places.items()}
    across = sweep.values[keys[-1]]
    if len(keys) == 1:
        figure = blank(6.0, 3.4)
        axes = figure.subplots()
        found = [(x, at.get((x,))) for x in range(len(across))]
        line = [(x, one.mean, one.sd or 0.0) for x, one in found if one is not None]
        if line:
            x, y, sd = zip(*line, strict=True)
            between = "none" if any(isinstance(value, str) for value in across) else "-"  # names have nothing between
            axes.errorbar(x, y, yerr=sd, color=COLOURS[2], marker="o", capsize=3, linestyle=between)
            axes.margins(x=0.12)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylabel("final test accuracy")
        axes.grid(axis="y")
    else:
        down = sweep.values[keys[0]]
        named = any(isinstance(value, str) for value in across)
        figure = blank(max(4.6, 2.2 + (1.05 if named else 0.75) * len(across)), 1.2 + 0.42 * len(down))
        axes = figure.subplots()
        _map(axes, [[at.get((y, x)) for x in range(len(across))] for y in range(len(down))])
        axes.set_yticks(range(len(down)), [short(value, 22) for value in down])
        axes.set_ylabel(short(keys[0], 40))
    axes.set_xticks(range(len(across)), [short(value, 14) for value in across])
    axes.set_xlabel(short(keys[-1], 40))
    axes.set_title("final test accuracy, mean over seeds", loc="left", fontsize=8, color="#555555")
    return figure


def clients_told(study: StudyRecord, seed: int) -> dict[str, dict[str, Any]]:
    """The clients of this seed with their last values, by label."""
    told = {label: clients_data(by_seed[seed]) for label, by_seed in study.runs.items() if seed in by_seed}
    return {label: one for label, one in told.items() if one is not None}


def _map(axes: Axes, grid: list[list[Spread | None]]) -> None:
    values = np.array([[np.nan if one is None else one.mean for one in row] for row in grid])
    image = axes.imshow(values, aspect="auto", cmap="Blues")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    shade: Any = image.norm(values)
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "white" if shade[y, x] > 0.6 else "#222222"
            axes.text(x, y, f"{100 * value:.1f}", ha="center", va="center", fontsize=8, color=colour)


def _diagnostic(axes: Axes, study: StudyRecord, label: str, at: int, name: str) -> bool:
    ended = [run for run in study.runs[label].values() if run.complete]
    curves = [dict(zip(*map(np.ndarray.tolist, run.reading(name)), strict=True)) for run in ended]
    curves = [curve for curve in curves if curve]
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    if not shared:
        return False
    values = np.array([[curve[number] for number in shared] for curve in curves])
    axes.plot(shared, values.mean(axis=0), **_line(at))
    if len(curves) > 1 and len(study.labels) <= BANDS:
        low, high = values.min(axis=0), values.max(axis=0)
        axes.fill_between(shared, low, high, color=COLOURS[at % len(COLOURS)], alpha=0.13, linewidth=0)
    return True


def _line(at: int) -> dict[str, Any]:
    return {"color": COLOURS[at % len(COLOURS)], "linestyle": LINE_STYLES[at % len(LINE_STYLES)]}


def _final(runs: list[RunRecord]) -> Spread | None:
    curves = [run.accuracy()[1] for run in runs if run.complete]
    return spread([float(curve[-1]) for curve in curves if len(curve)])
