"""What a person sees: progress bars, tables and one-line complaints."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from fedgg.report.tables import Table

IN_A_FILE = 140  # columns where no terminal says how many it has


def _wide() -> int | None:
    """As wide as the terminal; in a pipe or a file wide enough for every table, unless COLUMNS says otherwise."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else IN_A_FILE


console = Console(highlight=False, width=_wide())
errors = Console(stderr=True, highlight=False)


def complain(sentence: str) -> None:
    """One line on standard error, never wrapped, so that it can be searched and quoted."""
    line = " ".join(sentence.split())
    errors.print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)


def note(sentence: str) -> None:
    errors.print(f"[yellow]note:[/] {escape(sentence)}", soft_wrap=True)


def confirm(question: str) -> bool:
    """Answered with y on a terminal; everything else is no."""
    return typer.confirm(question, default=False, err=True)


def say(sentence: str) -> None:
    console.print(escape(sentence), soft_wrap=True)


LONGEST = 15  # letters of a word that are kept together: distinguishable


def print_table(table: Table, *, numbers: bool = True, names: int = 1) -> None:
    """Columns after the first `names` stand to the right if they are numbers."""
    grid = RichTable(
        title=escape(table.title), title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD
    )
    for number, column in enumerate(table.columns):
        words = " ".join([column, *(row[number] for row in table.rows)]).split()
        right = number >= names and numbers
        # No word is broken as long as that is possible at all.
        whole = min(max(map(len, words), default=1), LONGEST)
        grid.add_column(escape(column), justify="right" if right else "left", overflow="fold", min_width=whole)
    for row in table.rows:
        grid.add_row(*(escape(cell) for cell in row))
    console.print(grid)
    for sentence in table.notes:
        console.print(Padding(f"[dim]{escape(sentence)}[/]", (0, 0, 0, 2)))
    console.print()


def progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TextColumn("[dim]{task.fields[within]}"),
        TimeRemainingColumn(compact=True),
        console=errors,
        transient=True,  # what remains to be seen is printed; after a mistake only the mistake stays
        disable=not errors.is_terminal,
    )


class Heartbeat:
    """A line now and then where there is no terminal to draw bars on: a log shows that work goes on."""

    def __init__(self, seconds: float = 10.0):
        self._seconds, self._last = seconds, time.monotonic()

    def __call__(self, sentence: str) -> None:
        if not errors.is_terminal and time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            errors.print(escape(sentence), soft_wrap=True)


def ending(summary: dict[str, Any]) -> str | None:
    """Why a run ended before its last round, if it did."""
    word = {"diverged": "diverged", "spent": "stopped"}.get(summary["status"])
    return None if word is None else f"{word} after {counted(summary['rounds_done'], 'round')}: {summary['why']}"


def counted(number: int, thing: str) -> str:
    """`1 epoch`, `2 epochs`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def shown_epsilon(record: dict[str, Any]) -> str:
    """The privacy spent, of a round or a whole run."""
    epsilon = "infinite" if record["epsilon"] is None else f"{record['epsilon']:.2f}"
    return f"epsilon {epsilon} at delta {record['delta']:g}"


def news(record: dict[str, Any], lost: str = "") -> str:
    """A round in a few words: which accuracy this is stands beside it; `lost` says who was left out."""
    parts = []
    if record.get("test_accuracy") is not None:
        parts.append(f"test accuracy {100 * record['test_accuracy']:.1f}%")
    if record.get("train_loss") is not None:
        parts.append(f"train loss {record['train_loss']:.3f}")
    if "epsilon" in record:
        parts.append(shown_epsilon(record))
    return ", ".join([*parts, *filter(None, [lost])])
