"""A figure with everything that goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from fedgg.report.tables import Table


@dataclass(frozen=True)
class Drawn:
    """A figure, what it shows, what belongs under it, and every number in it."""

    figure: Figure
    shows: str
    notes: tuple[str, ...]
    numbers: Table
    summary: Table | None = None  # what is worth reading as a table
