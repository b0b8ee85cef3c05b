"""Figures of several panels: learning curves and splits, one panel for each data set and degree of skew."""

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

from fedgg.report.figures import common_rounds, compact
from fedgg.report.folders import RunRecord
from fedgg.report.style import COLOURS, LINE_STYLES, blank, styled


@dataclass(frozen=True)
class Panel:
    """Curves under one title: the runs of each label, one run a seed."""

    title: str
    lines: dict[str, list[RunRecord]]


@dataclass(frozen=True)
class SplitPanel:
    """Examples of each class (columns) at each client (rows)."""

    title: str
    counts: list[list[int]]


@styled
def curve_panels(grid: Sequence[Sequence[Panel]], reference: str | None = None) -> Figure:
    """Rows of panels; mean line and band from lowest to highest over seeds. The reference is drawn thin and grey."""
    rows, columns = len(grid), max(map(len, grid))
    figure = blank(max(5.2, 3.1 * columns + 1.9), 2.5 * rows + 0.5)
    axes = figure.subplots(rows, columns, squeeze=False)
    labels = list(dict.fromkeys(label for row in grid for panel in row for label in panel.lines))
    styles = _styles(labels, reference)
    for at, row in enumerate(grid):
        for place, panel in enumerate(row):
            _curves(axes[at][place], panel, styles)
            if at == rows - 1:
                axes[at][place].set_xlabel("round")
        axes[at][0].set_ylabel("test accuracy")
        for empty in axes[at][len(row) :]:
            empty.set_visible(False)
    handles = [Line2D([], [], **styles[label]) for label in labels]
    figure.legend(handles, labels, loc="outside right upper", handlelength=2.8)
    return figure


@styled
def split_panels(grid: Sequence[Sequence[SplitPanel]]) -> Figure:
    """Heat maps of clients by classes, darker for more examples; the scale is each panel's own."""
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


def _styles(labels: Sequence[str], reference: str | None) -> dict[str, dict[str, Any]]:
    """A colour and a line style for each label, the same in every panel."""
    others = [label for label in labels if label != reference]
    offset = 0 if reference is None else 1  # black is near the reference's grey
    styles: dict[str, dict[str, Any]] = {
        label: {"color": COLOURS[(at + offset) % len(COLOURS)], "linestyle": LINE_STYLES[at % len(LINE_STYLES)]}
        for at, label in enumerate(others)
    }
    if reference in labels:
        styles[str(reference)] = {"color": "#888888", "linestyle": "-", "linewidth": 1.0}
    return styles


def _curves(axes: Axes, panel: Panel, styles: dict[str, dict[str, Any]]) -> None:
    for label, runs in panel.lines.items():
        rounds, accuracies = common_rounds([run for run in runs if run.status != "diverged"])
        if not len(accuracies):
            continue
        style = styles[label]
        axes.plot(rounds, accuracies.mean(axis=0), marker="o" if len(rounds) == 1 else "", **style)
        if len(accuracies) > 1:
            low, high = accuracies.min(axis=0), accuracies.max(axis=0)
            axes.fill_between(rounds, low, high, color=style["color"], alpha=0.13, linewidth=0)
    if not axes.lines:
        axes.text(0.5, 0.5, "no finished run", transform=axes.transAxes, ha="center", color="#888888")
    axes.set_title(panel.title, loc="left")
    axes.grid(axis="y")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
