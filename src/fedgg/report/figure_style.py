"""The common style of matplotlib figures (colours, lines, fonts), and writing them to files of reproducible bytes."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedgg.analysis.labels import shortened
from fedgg.errors import UserError
from fedgg.files import write_atomically, writing_output

Parameters = ParamSpec("Parameters")

# Okabe and Ito's colours without yellow, which is hard to see on white. Seven colours and four line styles have no
# common factor, so 28 labels have different pairs.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")
# The same for a dark background, where black and blue would be hard to see.
COLOURS_ON_DARK = ("#EDEDED", "#E69F00", "#3D97DB", "#00B386", "#EE7A3C", "#9AD3F5", "#DD9BC0")
LINE_STYLES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1.2)))
LEGEND_WIDTH = 26  # characters

SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "text.usetex": False,
    # Names come from users, and a "$" in a name is a dollar sign, not mathematics.
    "text.parse_math": False,
    # Without a salt the element identifiers of SVG files are random.
    "svg.hashsalt": "fedgg",
}


def legend_name(label: str, note: str = "") -> str:
    """A label broken into lines for a legend beside the axes, shortened to limit its height; the note is not."""
    return textwrap.fill(shortened(label, 4 * LEGEND_WIDTH) + note, LEGEND_WIDTH)


@contextmanager
def figure_style() -> Iterator[None]:
    """Set the style within the block; characters missing from the font (an emoji in a name) do not warn."""
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from")
        yield


def styled(draw: Callable[Parameters, Figure]) -> Callable[Parameters, Figure]:
    """Make a function draw in this style and leave the user's matplotlib settings unchanged."""

    @wraps(draw)
    def drawn(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Figure:
        with figure_style():
            return draw(*arguments, **keywords)

    return drawn


def blank(width: float, height: float) -> Figure:
    """An empty figure, in inches, that is not registered with pyplot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def mean_and_band(axes: Axes, rounds: Any, values: NDArray[np.float64], **style: Any) -> None:
    """A line for the mean of curves `[curves, rounds]`, and a band from their lowest to their highest value."""
    axes.plot(rounds, values.mean(axis=0), **style)
    if len(values) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        axes.fill_between(rounds, low, high, color=style["color"], alpha=0.13, linewidth=0)


def save(figure: Figure, path: str | Path, within: Path | None = None) -> Path:
    """Write a figure as .png (150 dpi) or .svg; the same figure gives the same bytes. `within` as in `write_output`."""
    file = Path(path)
    kind = file.suffix.lower()
    if kind not in {".png", ".svg"}:
        raise UserError(f"{file} cannot be written as a figure: give a name that ends in .png or .svg")
    metadata: dict[str, str | None] = {"Software": None} if kind == ".png" else {"Date": None, "Creator": None}
    content = io.BytesIO()
    with figure_style():
        figure.savefig(content, dpi=150, format=kind[1:], metadata=metadata)
    with writing_output(file, within):
        write_atomically(file, content.getvalue())
    return file
