"""Terminal output: progress bars, tables, one-line errors, and the description of an experiment.

Labels, error texts and file names are untrusted. Strings are printed without interpreting rich markup (styled text is
passed as `Text`), and control characters, which a terminal would execute, are replaced.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import sys
import time
import unicodedata
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from fedgg.errors import UserError
from fedgg.report.tables import Table
from fedgg.runfolder.measure import Measure, first_score
from fedgg.runfolder.record_types import split_words

if TYPE_CHECKING:
    from fedgg.lab.config import Experiment


def described(experiment: Experiment, swept: Collection[str] = ()) -> str:
    """The main settings in one line, without those that are swept over."""
    split, data, local = experiment.split, experiment.data, experiment.local
    words = {
        "data.source": data.source,
        "data.augment": "" if data.augment == "none" else data.augment,
        "split.clients": counted(split.clients, "client") if experiment.clients_are_known else "clients of the data",
        "split.scheme": split_words(split.model_dump(), swept),
        "model.name": experiment.model.name,
        "rounds": counted(experiment.rounds, "round"),
        "local.epochs": f"{counted(local.epochs, 'epoch')} a round" if local.steps is None else "",
        "local.steps": f"{counted(local.steps, 'step')} a round" if local.steps is not None else "",
        "local.part": f"of which each client does {local.part:g} to 1" if local.part < 1 else "",
    }
    return ", ".join(text for key, text in words.items() if text and key not in swept)


LONGEST_LINE = 2000  # characters: an invalid value may be as long as a file
IN_A_FILE = 140  # columns if standard output is not a terminal
# C0 except tabs and line breaks, C1, marks of writing direction, line separators, unpaired surrogates
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class OutputLost(UserError):
    """Standard output cannot be written; `quiet` if its reader has closed it (`| head`)."""

    def __init__(self, error: OSError):
        self.quiet = error.errno == errno.EPIPE
        reason = error.strerror or error
        super().__init__(f"standard output cannot be written: {reason}; send it to a place with room, or to /dev/null")


def printable(text: str) -> str:
    """The text with control characters replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class Screen(Console):
    """A console for untrusted text: see the module's docstring."""

    def __init__(self, **settings: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **how: Any) -> Text:
        shown = printable(text)
        if not self.encoding.startswith("utf"):  # before tables are laid out: replacements may be longer
            shown = shown.encode(self.encoding, "fedgg.spelled").decode(self.encoding)
        return super().render_str(shown, **how)

    def print(self, *things: Any, **how: Any) -> None:
        try:
            super().print(*things, **how)
        except OSError as error:
            if not self.stderr:
                raise OutputLost(error) from error  # failed writes to standard error are ignored

    def on_broken_pipe(self) -> None:
        if not self.stderr:
            raise OutputLost(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))


def _width() -> int | None:
    """The terminal's width; IN_A_FILE for a pipe or a file, unless COLUMNS is set."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return None if terminal or "COLUMNS" in os.environ else IN_A_FILE


console = Screen(width=_width())
errors = Screen(stderr=True)

_SPELLED = dict(zip("−–—×↑↓≈·•\N{REPLACEMENT CHARACTER}", "---x^v~**?", strict=True)) | {
    "±": "+-", "…": "...", "→": "->", "≥": ">=", "≤": "<=", "β": "beta", "ε": "epsilon", "δ": "delta", "μ": "mu"
}  # fmt: skip


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """For `codecs`: characters that the output's encoding lacks, replaced by ones that it has."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = (_SPELLED.get(sign) or _plain(sign) for sign in error.object[error.start : error.end])
    return "".join(letters), error.end


def _plain(sign: str) -> str:
    return unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode() or "?"


codecs.register_error("fedgg.spelled", _spelled)


def prepare_output() -> None:
    """Make every character printable, and open the descriptors 0 to 2 if they are closed."""
    closed = sys.stdout is None
    for descriptor in (0, 1, 2):  # otherwise the next opened file would become standard output
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if closed:
        raise OutputLost(OSError(errno.EBADF, "it is closed"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="fedgg.spelled")


def close_output() -> None:
    """Discard buffered output, which Python would otherwise try to write, and fail, at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        sys.stdout = None


def complain(sentence: str) -> None:
    """Print an error in one line on standard error, not wrapped, so that it can be searched and quoted."""
    line = " ".join(sentence.split())
    errors.print(Text.assemble(("error:", "bold red"), " ", printable(_cut(line))), soft_wrap=True)


def note(sentence: str) -> None:
    errors.print(Text.assemble(("note:", "yellow"), " ", printable(_cut(sentence))), soft_wrap=True)


def _cut(sentence: str) -> str:
    return sentence if len(sentence) <= LONGEST_LINE else f"{sentence[: LONGEST_LINE - 1]}…"


def confirm(question: str) -> bool:
    """Ask on the terminal; only y means yes."""
    return typer.confirm(question, default=False, err=True)


def say(sentence: str) -> None:
    console.print(sentence, soft_wrap=True)


LONGEST = 15  # characters of a word that are not broken across lines
BETWEEN_COLUMNS = 3


def print_table(table: Table, *, numbers: bool = True, names: int = 1) -> None:
    """`numbers`: the columns after the first `names` are aligned to the right.

    Of a table that is wider than the terminal the last columns are left out by name; elsewhere it is as wide as it is.
    """
    columns = [[_unbroken(text) for text in texts] for texts in zip(table.columns, *table.rows, strict=True)]
    least = [
        min(max(cell_len(word) for text in texts for word in (*text.split(" "), "")), LONGEST) for texts in columns
    ]
    ends = [end + BETWEEN_COLUMNS * number + 1 for number, end in enumerate(accumulate(least), 1)]
    shown = len(ends)
    if console.is_terminal:
        shown = min(max(sum(end <= console.width for end in ends), names + 1), len(ends))
    room = max(console.width, ends[shown - 1])
    grid = RichTable(
        title=table.title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD
    )
    longest_cells = [max(map(cell_len, texts[1:]), default=0) for texts in columns[:shown]]
    total = room - BETWEEN_COLUMNS * shown - 1
    headers = [cell_len(texts[0]) for texts in columns[:shown]]
    widths = _grown(_grown(least[:shown], longest_cells, total), headers, total)
    for number, (width, texts) in enumerate(zip(widths, columns, strict=False)):
        right = number >= names and numbers
        grid.add_column(
            texts[0], justify="right" if right else "left", overflow="fold", min_width=width, max_width=width
        )
    for cells in zip(*(texts[1:] for texts in columns[:shown]), strict=True):
        grid.add_row(*cells)
    console.print(grid, width=room, crop=False)
    notes = table.notes
    if left_out := table.columns[shown:]:
        notes = (f"Not shown in a terminal of {console.width} columns: {', '.join(left_out)}.", *notes)
    for sentence in notes:
        console.print(Padding(Text(printable(sentence), style="dim"), (0, 0, 0, 2)))
    console.print()


def _unbroken(text: str) -> str:
    """As it is printed, in this output's encoding; in a terminal a value and its spread stay on one line."""
    joined = text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}") if console.is_terminal else text
    return console.render_str(joined).plain


def _grown(widths: Sequence[int], wanted: Sequence[int], total: int) -> list[int]:
    """The widths, where `total` has room for it as large as they are wanted: the narrowest ones grow first."""
    grown = list(widths)
    while sum(grown) < total and (growing := [number for number, width in enumerate(grown) if width < wanted[number]]):
        grown[min(growing, key=grown.__getitem__)] += 1
    return grown


class Words(TextColumn):
    """A column of untrusted text."""

    def render(self, task: Task) -> Text:
        return Text(printable(self.text_format.format(task=task)), style=self.style, justify=self.justify)


class ProgressBar(Progress):
    """rich before 14.3 ends a bar that is disabled with an empty line."""

    def stop(self) -> None:
        if not self.disable:
            super().stop()


def progress() -> Progress:
    return ProgressBar(
        SpinnerColumn(),
        Words("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        Words("{task.fields[news]}"),
        Words("{task.fields[within]}", style="dim"),
        TimeRemainingColumn(compact=True),
        console=errors,
        transient=True,  # the bar disappears at the end; results are printed
        disable=not errors.is_terminal,
    )


class Heartbeat:
    """Prints progress lines at intervals if standard error is not a terminal, for example into a log."""

    def __init__(self, seconds: float = 10.0):
        self._seconds, self._last = seconds, time.monotonic()

    def __call__(self, sentence: str) -> None:
        if not errors.is_terminal and time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            errors.print(sentence, soft_wrap=True)


def ending(summary: dict[str, Any]) -> str | None:
    """The reason if a run ended before its last round, otherwise None."""
    word = {"diverged": "diverged", "spent": "stopped", "stopped_early": "stopped"}.get(summary["status"])
    return None if word is None else f"{word} after {counted(summary['rounds_done'], 'round')}: {summary['why']}"


def counted(number: int, thing: str) -> str:
    """`1 epoch`, `2 epochs`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def shown_epsilon(record: dict[str, Any]) -> str:
    """The privacy spent, of a round or a whole run."""
    epsilon = "infinite" if record["epsilon"] is None else f"{record['epsilon']:.2f}"
    return f"epsilon {epsilon} at delta {record['delta']:g}"


def shown_score(measure: Measure, value: float, decimals: int = 1) -> str:
    """`test accuracy 62.5%`, `test RMSE 0.341`."""
    return f"{measure.title} {measure.number(value, decimals)}{'%' if measure.percent else ''}"


def news(record: dict[str, Any], lost: str = "") -> str:
    """One line on a round; `lost` names its dropped clients."""
    parts = []
    if (score := first_score(record)) is not None:
        parts.append(shown_score(*score))
    if record.get("train_loss") is not None:
        parts.append(f"train loss {record['train_loss']:.3f}")
    if "epsilon" in record:
        parts.append(shown_epsilon(record))
    return ", ".join([*parts, *filter(None, [lost])])
