"""Figures of several panels: accuracy curves, other curves and splits, one panel for each data set and beta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedgg.report.data_figures import compact
from fedgg.report.figure_style import COLOURS, LINE_STYLES, blank, styled
from fedgg.report.run_figures import common_rounds
from fedgg.runfolder.run_records import Floats, RunRecord


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


@dataclass(frozen=True)
class SplitPanel:
    """Examples of each class (columns) at each client (rows)."""

    title: str
    counts: list[list[int]]


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
                rounds = np.arange(shared) + panel.first
                here.plot(rounds, values.mean(axis=0), **styles[label])
                here.fill_between(rounds, values.min(axis=0), values.max(axis=0), alpha=0.13, linewidth=0,
                                  color=styles[label]["color"])  # fmt: skip
            here.set_title(panel.title, loc="left")
            here.grid(axis="y")
            if at == rows - 1:
                here.set_xlabel("round")
    _legend(figure, styles, loc="outside lower center")
    return figure


@styled
def split_panels(grid: Sequence[Sequence[SplitPanel]]) -> Figure:
    """Heat maps of examples by client and class; each panel has its own colour scale."""
    rows, columns = len(grid), max(map(len, grid))
    figure = blank(max(4.0, 3.4 * columns), 2.5 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for at, row in enumerate(grid):
        for place, panel in enumerate(row):
            heat = axes[at][place]
            counts = np.asarray(panel.counts)
            norm = PowerNorm(0.5, 0, max(1, int(counts.max())))
            image = heat.imshow(counts, aspect="auto", cmap="Blues", norm=norm, interpolation="nearest")
            heat.set_title(panel.title, loc="left")
            heat.spines[:].set_visible(False)
            heat.tick_params(length=0)
            heat.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
            heat.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
            bar = figure.colorbar(image, ax=heat, pad=0.02, fraction=0.05, ticks=[0, int(counts.max())])
            bar.ax.set_yticklabels(["0", compact(int(counts.max()))], fontsize=7)
            bar.outline.set_visible(False)
            if at == rows - 1:
                heat.set_xlabel("class")
        axes[at][0].set_ylabel("client")
        for empty in axes[at][len(row) :]:
            empty.set_visible(False)
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
        style = styles[label]
        axes.plot(rounds, accuracies.mean(axis=0), marker="o" if len(rounds) == 1 else "", **style)
        if len(accuracies) > 1:
            low, high = accuracies.min(axis=0), accuracies.max(axis=0)
            axes.fill_between(rounds, low, high, color=style["color"], alpha=0.13, linewidth=0)
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
