"""Figures of splits, learning curves and sample images, as free-standing matplotlib figures without global state."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from fedgg.errors import UserError
from fedgg.report.folders import Floats, Ints, RunRecord, StudyRecord
from fedgg.report.labels import short_name
from fedgg.report.style import COLOURS, LINE_STYLES, blank, legend_name, save, short, styled

MOST_ROWS = 100  # of a picture: more lines cannot be distinguished, and a legend of thousands takes minutes

__all__ = ["accuracy_figure", "curves_figure", "samples_figure", "save", "split_figure"]


@styled
def split_figure(
    counts: NDArray[Any] | Sequence[Sequence[int]],
    classes: Sequence[str],
    title: str,
    names: Sequence[str] | None = None,
) -> Figure:
    """Who holds what: a heat map of clients by classes, with the total of each client at its right."""
    table = np.asarray(counts, dtype=np.int64)
    if table.ndim != 2 or table.shape[1] != len(classes) or not table.size:
        raise UserError(f"a split of shape {table.shape} does not suit {len(classes)} classes; give [clients, classes]")
    clients, width = table.shape
    written = clients <= 12 and width <= 12
    inches = float(np.clip(2.2 + 0.5 * width, 5.0, 11.5))
    figure = blank(inches, float(np.clip(1.6 + (0.32 if written else 0.2) * clients, 2.6, 9.0)))
    heat, bars = figure.subplots(1, 2, sharey=True, width_ratios=[1, max(0.08, min(0.2, 1.6 / width))])
    image = heat.imshow(table, aspect="auto", cmap="Blues", norm=PowerNorm(0.5, 0, max(1, int(table.max()))))
    heat.spines[:].set_visible(False)
    heat.tick_params(length=0)
    _class_ticks(heat, classes, room=0.75 * inches / width)
    heat.set_ylabel("client")
    if names is not None and clients <= 40:
        heat.set_yticks(range(clients), [short(name, 24) for name in names])
    else:
        heat.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=40 if clients <= 40 else 10))
    _title(heat, title, inches)
    if written:
        for (client, label), count in np.ndenumerate(table):
            colour = "white" if image.norm(count) > 0.6 else ("#aaaaaa" if count == 0 else "#222222")
            heat.text(label, client, compact(int(count)), ha="center", va="center", fontsize=7.5, color=colour)
    else:
        figure.colorbar(
            image, ax=[heat, bars], label="examples", pad=0.02, fraction=0.03, aspect=35
        ).outline.set_visible(False)
    _total_bars(bars, table.sum(axis=1))
    return figure


@styled
def accuracy_figure(study: StudyRecord) -> Figure:
    """Test accuracy against rounds for every label of a study: mean line and min–max band over its seeds."""
    figure = blank(7.5, 4.0)
    axes = figure.subplots()
    handles, names, most_seeds = [], [], 0
    for position, label in enumerate(study.labels[:MOST_ROWS]):
        colour, line_style = COLOURS[position % len(COLOURS)], LINE_STYLES[position % len(LINE_STYLES)]
        rounds, accuracies = common_rounds([run for run in study.runs[label].values() if run.sound])
        diverged = sum(run.status == "diverged" for run in study.runs[label].values())
        most_seeds = max(most_seeds, len(accuracies))
        if len(accuracies):
            axes.plot(rounds, accuracies.mean(axis=0), color=colour, linestyle=line_style, marker=_marker(rounds))
        if len(accuracies) > 1:
            low, high = accuracies.min(axis=0), accuracies.max(axis=0)
            axes.fill_between(rounds, low, high, color=colour, alpha=0.13, linewidth=0)
        handles.append(Line2D([], [], color=colour, linestyle=line_style))
        names.append(legend_name(label, _shortfall(len(accuracies), len(study.seeds_of(label)), diverged)))
    _accuracy_axis(axes)
    told = "line: mean, band: lowest to highest over seeds" if most_seeds > 1 else "one seed, so no band"
    if len(study.labels) > MOST_ROWS:
        told += f"; the first {MOST_ROWS} of {len(study.labels):,} rows"
    axes.set_title(told, loc="left", fontsize=8, color="#555555")
    figure.legend(handles, names, loc="outside right upper", handlelength=2.8)
    return figure


@styled
def curves_figure(run: RunRecord) -> Figure:
    """Test accuracy and losses against rounds for one run."""
    figure = blank(8.0, 3.4)
    left, right = figure.subplots(1, 2)
    rounds, accuracy = run.accuracy()
    left.plot(rounds, accuracy, color=COLOURS[2], marker=_marker(rounds), label="server's test set")
    looked, kept_back = run.numbers("holdout_accuracy")
    if len(looked):
        left.plot(looked, kept_back, color=COLOURS[4], linestyle=LINE_STYLES[1], label="clients' hold-out")
        left.legend(loc="lower right")
    _accuracy_axis(left)
    if len(looked):
        left.set_ylabel("accuracy")
    for position, (key, name) in enumerate((("train_loss", "training"), ("test_loss", "test"))):
        told, losses = run.numbers(key)
        if len(told):
            style = {"color": COLOURS[4 - 2 * position], "linestyle": LINE_STYLES[position]}
            right.plot(told, losses, marker=_marker(told), label=name, **style)
    _round_axis(right)
    right.set_ylabel("loss")
    if right.lines:
        right.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    algorithm = short_name(str(run.config.get("algorithm", {}).get("name", "")))
    title = run.config.get("name") or f"{algorithm} on {run.split_title()}"
    figure.suptitle(short(title, 120), x=0.01, ha="left", fontsize=10)
    return figure


@styled
def samples_figure(
    images: NDArray[Any], labels: NDArray[Any] | Sequence[int], classes: Sequence[str], title: str, columns: int = 10
) -> Figure:
    """A grid of sample images, one row a class for the first ten classes that have any."""
    if images.ndim != 4 or images.shape[1] not in (1, 3) or not len(images):
        raise UserError(
            f"images of shape {images.shape} cannot be shown; give [examples, 1 or 3 channels, height, width]"
        )
    numbers = np.asarray(labels, dtype=np.int64)
    if numbers.shape != (len(images),) or numbers.min() < 0 or numbers.max() >= len(classes):
        raise UserError(f"the labels do not suit {len(images)} images of {len(classes)} classes; give one class each")
    present = np.unique(numbers)
    shown = present[:10]
    height, width = images.shape[2:]
    gap = max(1, width // 14)
    chosen = [np.flatnonzero(numbers == label)[:columns] for label in shown]
    columns = max(map(len, chosen))
    canvas = np.ones((len(shown) * (height + gap) - gap, columns * (width + gap) - gap, 3))
    unit = _unit_scale(images[np.concatenate(chosen)])
    place = iter(np.moveaxis(unit, 1, -1))
    for row, members in enumerate(chosen):
        for column in range(len(members)):
            top, side = row * (height + gap), column * (width + gap)
            canvas[top : top + height, side : side + width] = next(place)
    inches = 1.6 + 0.6 * columns
    figure = blank(inches, 0.6 + (inches - 1.0) * canvas.shape[0] / canvas.shape[1])
    axes = figure.subplots()
    axes.imshow(canvas, interpolation="nearest")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks([])
    names = [short(classes[label], 20) for label in shown]
    axes.set_yticks(np.arange(len(shown)) * (height + gap) + height / 2, names)
    more = f" (first {len(shown)} of {len(present)} classes)" if len(present) > len(shown) else ""
    _title(axes, title + more, inches)
    return figure


def common_rounds(runs: Sequence[RunRecord]) -> tuple[Ints, Floats]:
    """The rounds that every run has evaluated and the accuracies there: [runs, rounds].

    Only common rounds, so that a mean never changes because one run ended earlier.
    """
    curves = [dict(zip(*map(np.ndarray.tolist, run.accuracy()), strict=True)) for run in runs]
    curves = [curve for curve in curves if curve]
    if not curves:
        return np.empty(0, dtype=np.int64), np.empty((0, 0))
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return np.array(shared, dtype=np.int64), np.array([[curve[number] for number in shared] for curve in curves])


def compact(count: int) -> str:
    """A count in at most four signs: 950, 1.2k, 12k, 3.4M."""
    for size, sign in ((1_000_000, "M"), (1_000, "k")):
        # From half a unit of the last shown digit below the size, rounding would give "1000" or "1000k".
        if count >= size * (1 if sign == "k" else 0.9995):
            scaled = count / size
            return f"{scaled:.1f}{sign}" if scaled < 9.95 else f"{scaled:.0f}{sign}"
    return str(count)


def _marker(rounds: Ints) -> str:
    return "o" if len(rounds) == 1 else ""


def _round_axis(axes: Axes) -> None:
    axes.set_xlabel("round")
    low, high = axes.get_xlim()
    if high - low < 1:  # a single round
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y")
    axes.margins(x=0.02)


def _accuracy_axis(axes: Axes) -> None:
    _round_axis(axes)
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _title(axes: Axes, text: str, inches: float) -> None:
    axes.set_title(textwrap.fill(text, int(11 * inches)), loc="left")


def _shortfall(used: int, seeds: int, diverged: int) -> str:
    if used == seeds:
        return ""
    return f" ({used} of {seeds} seeds{f', {diverged} diverged' if diverged else ''})"


def _class_ticks(axes: Axes, classes: Sequence[str], room: float) -> None:
    """Every class by name while the names fit, slanted or upright if need be; otherwise every tenth or so.

    `room` is the width of one class in inches.
    """
    names = [short(name, 18) or " " for name in classes]
    longest = max(map(len, names))
    fits_level = 0.085 * longest + 0.05 <= room
    step = 1 if fits_level or (longest > 3 and room > 0.08) else int(np.ceil(len(names) / 200) * 10)
    shown = range(0, len(names), step)
    slant: dict[str, Any] = {"rotation": 90}
    if fits_level or step > 1:
        slant = {"rotation": 0}
    elif room > 0.3:
        slant = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks([*shown], [names[label] for label in shown], fontsize=8 if room > 0.15 or step > 1 else 6, **slant)
    axes.set_xlabel("class")


def _total_bars(axes: Axes, totals: Ints) -> None:
    """The size of each client as a bar, with its number or, where numbers would overlap, a scale."""
    if len(totals) <= 200:
        axes.barh(np.arange(len(totals)), totals, color="#dddddd", height=0.7)
    else:  # one shape instead of thousands, which no picture could tell apart
        axes.fill_betweenx(np.arange(len(totals)), totals, color="#dddddd", step="mid", linewidth=0)
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False, labelleft=False, length=0, labelsize=7.5)
    axes.set_title("total", fontsize=8, color="#555555")
    if len(totals) > 40:
        axes.set_xticks([0, totals.max()], ["0", compact(int(totals.max()))])
        return
    axes.set_xticks([])
    for client, total in enumerate(totals):
        axes.text(0, client, f" {total:,}", va="center", fontsize=7.5)


def _unit_scale(images: NDArray[Any]) -> Floats:
    """Images in [0, 1] and three channels; floats outside that range (normalised ones) are stretched into it."""
    scaled = np.nan_to_num(images.astype(np.float64)) / (255.0 if images.dtype == np.uint8 else 1.0)
    low, high = scaled.min(), scaled.max()
    if low < 0 or high > 1:
        scaled = (scaled - low) / (high - low)
    return np.broadcast_to(scaled, (len(scaled), 3, *scaled.shape[2:]))
