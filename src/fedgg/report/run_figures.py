"""Figures of runs: curves, diagnostics, clients, sweeps, trials. Matplotlib without its global state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FormatStrFormatter, MaxNLocator, NullFormatter, PercentFormatter

from fedgg.analysis.chart_data import HISTORIES, SweepGrid, client_columns, client_measures
from fedgg.analysis.compare import Spread, spread
from fedgg.analysis.labels import short_name, shortened
from fedgg.report.figure_style import COLOURS, LINE_STYLES, blank, legend_name, mean_and_band, styled
from fedgg.runfolder.measure import ACCURACY, Measure
from fedgg.runfolder.record_types import Floats, Ints, RunRecord, StudyRecord

MOST_ROWS = 100  # lines in a figure: more cannot be distinguished, and a legend of thousands takes minutes
MOST_BANDS = 8  # rows up to which lines have bands
MARKERS = ("o", "s", "D", "^", "P", "*", "v")
MOST_MARKED = len(MARKERS)  # rows whose markers can be distinguished
MOST_NAMED = 40  # clients whose names fit on the axis
# Of the places other than the server's test set: label, colour and style of the line.
_ELSEWHERE = {
    "holdout": ("clients' hold-out", COLOURS[4], LINE_STYLES[1]),
    "personal": ("personal models", COLOURS[1], LINE_STYLES[2]),
    "unseen": ("unseen clients", COLOURS[3], LINE_STYLES[3]),
}


@styled
def score_figure(study: StudyRecord, measure: Measure | None = None) -> Figure:
    """A measure, by default the primary metric, against rounds for every label of a study.

    Lines are means over seeds, bands from lowest to highest.
    """
    measure = measure or study.primary
    figure = blank(7.5, 4.0)
    axes = figure.subplots()
    handles, names, most_seeds = [], [], 0
    for position, label in enumerate(study.labels[:MOST_ROWS]):
        colour, line_style = COLOURS[position % len(COLOURS)], LINE_STYLES[position % len(LINE_STYLES)]
        rounds, values = common_rounds([run for run in study.runs[label].values() if run.sound], measure)
        diverged = sum(run.status == "diverged" for run in study.runs[label].values())
        most_seeds = max(most_seeds, len(values))
        if len(values):
            style = {"color": colour, "linestyle": line_style, "marker": _marker(rounds)}
            mean_and_band(axes, rounds, values, **style)
        handles.append(Line2D([], [], color=colour, linestyle=line_style))
        names.append(legend_name(label, _shortfall(len(values), len(study.seeds_of(label)), diverged)))
    _score_axis(axes, measure)
    title = "line: mean, band: lowest to highest over seeds" if most_seeds > 1 else "one seed, so no band"
    if len(study.labels) > MOST_ROWS:
        title += f"; the first {MOST_ROWS} of {len(study.labels):,} rows"
    axes.set_title(title, loc="left", fontsize=8, color="#555555")
    figure.legend(handles, names, loc="outside right upper", handlelength=2.8)
    return figure


def common_rounds(runs: Sequence[RunRecord], measure: Measure = ACCURACY) -> tuple[Ints, Floats]:
    """The rounds that every run has evaluated and the values there: [runs, rounds].

    Only common rounds, so that a mean does not change because one run ended earlier.
    """
    curves = [dict(zip(*map(np.ndarray.tolist, run.scores(measure)), strict=True)) for run in runs]
    curves = [curve for curve in curves if curve]
    if not curves:
        return np.empty(0, dtype=np.int64), np.empty((0, 0))
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return np.array(shared, dtype=np.int64), np.array([[curve[number] for number in shared] for curve in curves])


def _shortfall(used: int, seeds: int, diverged: int) -> str:
    if used == seeds:
        return ""
    return f" ({used} of {seeds} seeds{f', {diverged} diverged' if diverged else ''})"


@styled
def curves_figure(run: RunRecord) -> Figure:
    """The primary metric wherever it was measured, and the losses, against rounds for one run."""
    figure = blank(8.0, 3.4)
    left, right = figure.subplots(1, 2)
    primary = run.metrics[0]
    rounds, values = run.scores(primary)
    if len(rounds):  # a model with personal parts has no score on the server's test set
        left.plot(rounds, values, color=COLOURS[2], marker=_marker(rounds), label="server's test set")
    elsewhere = [(where, *run.scores(replace(primary, where=where))) for where in _ELSEWHERE]
    elsewhere = [curve for curve in elsewhere if len(curve[1])]
    for where, rounds, values in elsewhere:
        label, colour, line_style = _ELSEWHERE[where]
        left.plot(rounds, values, color=colour, linestyle=line_style, marker=_marker(rounds), label=label)
    _score_axis(left, primary)
    if elsewhere:
        left.legend(loc="lower right" if primary.higher_is_better else "upper right")
        left.set_ylabel(primary.title.removeprefix("test "))
    for position, (key, name) in enumerate((("train_loss", "training"), ("test_loss", "test"))):
        loss_rounds, losses = run.numbers(key)
        if len(loss_rounds):
            style = {"color": COLOURS[4 - 2 * position], "linestyle": LINE_STYLES[position]}
            right.plot(loss_rounds, losses, marker=_marker(loss_rounds), label=name, **style)
    _round_axis(right)
    right.set_ylabel("loss")
    if right.lines:
        right.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    algorithm = short_name(str(run.config.get("algorithm", {}).get("name", "")))
    title = run.config.get("name") or f"{algorithm} on {run.split_title()}"
    figure.suptitle(shortened(title, 120), x=0.01, ha="left", fontsize=10)
    return figure


@styled
def diagnostics_figure(study: StudyRecord) -> Figure:
    """One plot for each diagnostic: mean and, with few rows, band from lowest to highest over finished runs."""
    records = study.records
    names = list(dict.fromkeys(n for record in records for line in record.rounds for n in line.get("readings") or {}))
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    figure = blank(3.6 * columns + 1.6, 2.5 * rows + 0.2)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    drawn: set[str] = set()
    for name, axes in zip(names, panels, strict=False):
        shown_rows = study.labels[:MOST_ROWS]
        drawn |= {label for at, label in enumerate(shown_rows) if _diagnostic(axes, study, label, at, name)}
        axes.set_title(shortened(name, 40), loc="left")
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.grid(axis="y")
    for empty in panels:
        empty.set_visible(False)
    shown = [(at, label) for at, label in enumerate(study.labels) if label in drawn]
    handles = [Line2D([], [], **_line(at)) for at, _ in shown]
    figure.legend(handles, [legend_name(label) for _, label in shown], loc="outside right upper", handlelength=2.8)
    return figure


def _diagnostic(axes: Axes, study: StudyRecord, label: str, at: int, name: str) -> bool:
    ended = [run for run in study.runs[label].values() if run.complete]
    curves = [dict(zip(*map(np.ndarray.tolist, run.diagnostic(name)), strict=True)) for run in ended]
    curves = [curve for curve in curves if curve]
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    if not shared:
        return False
    values = np.array([[curve[number] for number in shared] for curve in curves])
    axes.plot(shared, values.mean(axis=0), **_line(at))
    if len(curves) > 1 and len(study.labels) <= MOST_BANDS:
        low, high = values.min(axis=0), values.max(axis=0)
        axes.fill_between(shared, low, high, color=COLOURS[at % len(COLOURS)], alpha=0.13, linewidth=0)
    return True


@styled
def clients_figure(study: StudyRecord, seed: int, measure: Measure | None = None) -> Figure:
    """Each client's last value of this measure, else of the first that is recorded by client, else its loss.

    One marker for each client and row; with more than `HISTORIES` clients, a line for each row over its sorted clients.
    """
    by_label = clients_by_label(study, seed)
    chosen = _client_measure(study, seed, measure)
    many = any(clients["of"] > HISTORIES for clients in by_label.values())
    figure = blank(7.5, 3.4)
    axes = figure.subplots()
    for at, (label, clients) in enumerate(list(by_label.items())[:MOST_MARKED]):
        column = clients["loss"] if chosen is None else clients["scores"].get(chosen.key, [])
        points = [(c, v) for c, v in zip(clients["client"], column, strict=False) if v is not None]
        if points and many:
            values = sorted((v for _, v in points), reverse=chosen is None or not chosen.higher_is_better)
            axes.plot(np.linspace(0, 100, len(values)), values, label=legend_name(label), **_line(at))
        elif points:
            colour, marker = COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)]
            x, y = zip(*points, strict=True)
            # Shifted, so that equal values do not hide each other.
            shift = (at - (min(len(by_label), MOST_MARKED) - 1) / 2) * 0.11
            axes.scatter(np.array(x) + shift, y, s=22, color=colour, marker=marker, label=legend_name(label))
    axes.set_xlabel("clients, worst to best (%)" if many else "client")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    here = [by_seed[seed] for by_seed in study.runs.values() if seed in by_seed]
    names = next((record.client_names for record in here if record.client_names), None)
    if names is not None and len(names) <= MOST_NAMED:
        axes.set_xticks(range(len(names)), [shortened(name, 16) for name in names], rotation=35, ha="right")
    axes.set_ylabel("training loss" if chosen is None else chosen.title)
    if chosen is not None and chosen.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    when = "last round of each client" if chosen is None else "last evaluation"
    unfinished = any(not study.runs[label][seed].complete for label in by_label)
    more = f"; first {MOST_MARKED} of {len(by_label)} rows" if len(by_label) > MOST_MARKED else ""
    title = f"seed {seed}, {when}{' so far (not all runs have finished)' if unfinished else ''}{more}"
    axes.set_title(title, loc="left", fontsize=8, color="#555555")
    figure.legend(loc="outside right upper")
    return figure


def _client_measure(study: StudyRecord, seed: int, measure: Measure | None) -> Measure | None:
    here = [by_seed[seed] for by_seed in study.runs.values() if seed in by_seed]
    recorded = list(dict.fromkeys(one for run in here for one in client_measures(run)))
    named = [one for one in recorded if measure is not None and one.recorded == measure.recorded]
    return next(iter([*named, *recorded]), None)


def clients_by_label(study: StudyRecord, seed: int) -> dict[str, dict[str, Any]]:
    """The clients' last values in the runs with this seed, by label."""
    clients = {label: client_columns(by_seed[seed]) for label, by_seed in study.runs.items() if seed in by_seed}
    return {label: columns for label, columns in clients.items() if columns is not None}


@styled
def sweep_figure(study: StudyRecord, grid: SweepGrid, measure: Measure | None = None) -> Figure:
    """Final values over one setting as a line, over two as a heat map."""
    measure = measure or study.primary
    finals = {label: _final(list(by_seed.values()), measure) for label, by_seed in study.runs.items()}
    keys = list(grid.values)
    at = {place: finals.get(label) for label, place in grid.places.items()}
    across = grid.values[keys[-1]]
    if len(keys) == 1:
        figure = blank(6.0, 3.4)
        axes = figure.subplots()
        spreads = [(x, at.get((x,))) for x in range(len(across))]
        line = [(x, one.mean, one.sd or 0.0) for x, one in spreads if one is not None]
        if line:
            x, y, sd = zip(*line, strict=True)
            between = "none" if any(isinstance(value, str) for value in across) else "-"  # no line between names
            axes.errorbar(x, y, yerr=sd, color=COLOURS[2], marker="o", capsize=3, linestyle=between)
            axes.margins(x=0.12)
        _value_axis(axes, measure)
        axes.set_ylabel(f"final {measure.title}")
        axes.grid(axis="y")
    else:
        down = grid.values[keys[0]]
        named = any(isinstance(value, str) for value in across)
        figure = blank(max(4.6, 2.2 + (1.05 if named else 0.75) * len(across)), 1.2 + 0.42 * len(down))
        axes = figure.subplots()
        _heat_map(axes, [[at.get((y, x)) for x in range(len(across))] for y in range(len(down))], measure)
        axes.set_yticks(range(len(down)), [shortened(value, 22) for value in down])
        axes.set_ylabel(shortened(keys[0], 40))
    axes.set_xticks(range(len(across)), [shortened(value, 14) for value in across])
    axes.set_xlabel(shortened(keys[-1], 40))
    axes.set_title(f"final {measure.title}, mean over seeds", loc="left", fontsize=8, color="#555555")
    return figure


@dataclass(frozen=True)
class TrialPanel:
    """The trials of an algorithm over one of its settings."""

    label: str
    key: str
    log: bool
    choices: Sequence[Any]  # of a setting that has no range; otherwise empty
    trials: Sequence[tuple[Any, float, bool]]  # value, score, whether it finished


MOST_PANELS = 60  # in the figure of a search


@styled
def trials_figure(panels: Sequence[TrialPanel], measure: Measure) -> Figure:
    """The trials' scores over each setting that was searched, one row of panels for each algorithm."""
    panels = panels[:MOST_PANELS]
    rows = {
        label: [panel for panel in panels if panel.label == label] for label in dict.fromkeys(p.label for p in panels)
    }
    columns = max((len(row) for row in rows.values()), default=1)
    figure = blank(3.2 * columns + 0.6, 2.3 * max(len(rows), 1) + 0.4)
    grid = figure.subplots(max(len(rows), 1), columns, squeeze=False, sharey=True)
    for axes in grid.flat:
        axes.set_visible(False)
    for at, (label, row) in enumerate(rows.items()):
        for axes, panel in zip(grid[at], row, strict=False):
            axes.set_visible(True)
            values = [panel.choices.index(one[0]) if panel.choices else one[0] for one in panel.trials]
            for finished, marker in ((True, "o"), (False, "x")):
                chosen = [place for place, trial in enumerate(panel.trials) if trial[2] == finished]
                scores = [panel.trials[place][1] for place in chosen]
                axes.plot(
                    [values[place] for place in chosen], scores, marker, color=COLOURS[2], markersize=4, alpha=0.8
                )
            if panel.log:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
                axes.xaxis.set_minor_formatter(NullFormatter())
            if panel.choices:
                axes.set_xticks(range(len(panel.choices)), [shortened(str(one), 12) for one in panel.choices])
                axes.set_xlim(-0.5, len(panel.choices) - 0.5)
            axes.set_xlabel(panel.key)
            if measure.percent:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        first_axes = grid[at][0]
        first_axes.set_ylabel(measure.title)
        first_axes.set_title(shortened(label, 40), loc="left")
    figure.suptitle("points: finished trials, crosses: pruned or diverged ones", fontsize=8, color="#555555")
    return figure


def _heat_map(axes: Axes, spreads: list[list[Spread | None]], measure: Measure) -> None:
    values = np.array([[np.nan if one is None else one.mean for one in row] for row in spreads])
    image = axes.imshow(values, aspect="auto", cmap="Blues")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    shade: Any = image.norm(values)
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "white" if shade[y, x] > 0.6 else "#222222"
            axes.text(x, y, measure.number(value), ha="center", va="center", fontsize=8, color=colour)


def _final(runs: list[RunRecord], measure: Measure) -> Spread | None:
    curves = [run.scores(measure)[1] for run in runs if run.complete]
    return spread([float(curve[-1]) for curve in curves if len(curve)])


def _line(at: int) -> dict[str, Any]:
    return {"color": COLOURS[at % len(COLOURS)], "linestyle": LINE_STYLES[at % len(LINE_STYLES)]}


def _marker(rounds: Ints) -> str:
    return "o" if len(rounds) == 1 else ""


def _score_axis(axes: Axes, measure: Measure) -> None:
    _round_axis(axes)
    axes.set_ylabel(measure.title)
    _value_axis(axes, measure)


def _value_axis(axes: Axes, measure: Measure) -> None:
    if measure.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _round_axis(axes: Axes) -> None:
    axes.set_xlabel("round")
    low, high = axes.get_xlim()
    if high - low < 1:  # a single round
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y")
    axes.margins(x=0.02)
