"""Figures of data: which client holds which classes, and sample images."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedgg.analysis.labels import shortened
from fedgg.errors import UserError
from fedgg.files import file_name
from fedgg.report.figure_style import COLOURS, blank, styled
from fedgg.runfolder.record_types import Floats, Ints, RunRecord, StudyRecord, unseen_in

WITHOUT_CLASSES = ("examples",)  # in the place of classes in partition.json, where targets are not classes


def split_figures(study: StudyRecord) -> Iterator[tuple[str, Figure]]:
    """Each split of a study with its file name: `split-seed-N`, and `split-seed-N-2-LABEL` for that of another row."""
    seen: dict[int, list[str]] = {}
    for label, by_seed in study.runs.items():
        for seed, record in by_seed.items():
            split = record.partition or {}
            if not (split.get("counts") and split.get("classes")) or split.get("hash", "") in seen.get(seed, []):
                continue
            seen.setdefault(seed, []).append(split.get("hash", ""))
            number = len(seen[seed])  # two labels may be the same as file names
            name = f"split-seed-{seed}" + (f"-{number}-{file_name(label)}" if number > 1 else "")
            yield name, figure_of_partition(record)


def figure_of_partition(record: RunRecord) -> Figure:
    """The split of a run whose partition.json has one."""
    split = record.partition or {}
    unseen = unseen_in(split)
    return split_figure(split["counts"], split["classes"], record.split_title(), record.client_names, unseen)


@styled
def split_figure(
    counts: NDArray[Any] | Sequence[Sequence[int]],
    classes: Sequence[str],
    title: str,
    names: Sequence[str] | None = None,
    unseen: Sequence[int] = (),
) -> Figure:
    """A heat map of examples by client and class, with the total of each client on the right.

    The totals of `unseen` clients, which never train, have a colour of their own.
    """
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
        heat.set_yticks(range(clients), [shortened(name, 24) for name in names])
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
    _total_bars(bars, table.sum(axis=1), unseen)
    return figure


@styled
def samples_figure(
    images: NDArray[Any],
    labels: NDArray[Any] | Sequence[int],
    classes: Sequence[str],
    title: str,
    columns: int = 10,
    kind: str = "classes",
) -> Figure:
    """A grid of sample images, one row for each of the first ten classes.

    Labels may number something else, such as clients, which `kind` names: ten of them are then chosen, from first to
    last.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or not len(images):
        raise UserError(
            f"images of shape {images.shape} cannot be shown; give [examples, 1 or 3 channels, height, width]"
        )
    numbers = np.asarray(labels, dtype=np.int64)
    if numbers.shape != (len(images),) or numbers.min() < 0 or numbers.max() >= len(classes):
        raise UserError(f"the labels do not suit {len(images)} images of {len(classes)} classes; give one class each")
    present = np.unique(numbers)
    shown = present[:10]
    if kind != "classes":
        shown = present[np.linspace(0, len(present) - 1, min(10, len(present))).astype(int)]
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
    names = [shortened(classes[label], 20) for label in shown]
    axes.set_yticks(np.arange(len(shown)) * (height + gap) + height / 2, names)
    which = "first " if kind == "classes" else ""
    more = f" ({which}{len(shown)} of {len(present)} {kind})" if len(present) > len(shown) else ""
    _title(axes, title + more, inches)
    return figure


def compact(count: int) -> str:
    """A count in at most four characters: 950, 1.2k, 12k, 3.4M."""
    for size, sign in ((1_000_000, "M"), (1_000, "k")):
        # From half a unit of the last shown digit below the size, rounding would give "1000" or "1000k".
        if count >= size * (1 if sign == "k" else 0.9995):
            scaled = count / size
            return f"{scaled:.1f}{sign}" if scaled < 9.95 else f"{scaled:.0f}{sign}"
    return str(count)


def _title(axes: Axes, text: str, inches: float) -> None:
    axes.set_title(textwrap.fill(text, int(11 * inches)), loc="left")


def _class_ticks(axes: Axes, classes: Sequence[str], room: float) -> None:
    """Every class by name while the names fit, rotated if necessary; otherwise every tenth or so.

    `room` is the width of one class in inches.
    """
    names = [shortened(name, 18) or " " for name in classes]
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
    if tuple(classes) == WITHOUT_CLASSES:
        axes.set_xticks([])
        axes.set_xlabel("examples (the data have no classes)")


def _total_bars(axes: Axes, totals: Ints, unseen: Sequence[int]) -> None:
    """The size of each client as a bar, with its number or, if numbers would overlap, a scale."""
    if len(totals) <= 200:
        axes.barh(np.arange(len(totals)), totals, color="#dddddd", height=0.7)
    else:  # one shape instead of thousands of bars
        axes.fill_betweenx(np.arange(len(totals)), totals, color="#dddddd", step="mid", linewidth=0)
    if unseen:
        chosen = np.asarray(unseen)
        axes.barh(chosen, totals[chosen], color=COLOURS[1], height=0.7, label="never trains (unseen)")
        legend = axes.legend(loc="upper right", bbox_to_anchor=(1, -0.02), fontsize=7.5, frameon=False, handlelength=1)
        legend.set_in_layout(False)  # it is wider than the bars, and beside the names of the classes there is room
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
    """Images in [0, 1] with three channels; floats outside that range (normalised images) are rescaled to it."""
    scaled = np.nan_to_num(images.astype(np.float64)) / (255.0 if images.dtype == np.uint8 else 1.0)
    low, high = scaled.min(), scaled.max()
    if low < 0 or high > 1:
        scaled = (scaled - low) / (high - low)
    return np.broadcast_to(scaled, (len(scaled), 3, *scaled.shape[2:]))


@dataclass(frozen=True)
class SplitPanel:
    """Examples of each class (columns) at each client (rows)."""

    title: str
    counts: list[list[int]]


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
