"""Terminal output: progress bars, tables, one-line errors, and the description of an experiment.

Labels, reasons and names of files come from elsewhere. Strings are printed as they are, without markup of their own
(styles are given as `Text`), and without what a terminal would obey: control characters are replaced here, for all.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import sys
import time
import unicodedata
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from fedgg.errors import UserError
from fedgg.report.tables import Table

if TYPE_CHECKING:
    from fedgg.lab.config import Experiment


def described(experiment: Experiment, swept: Collection[str] = ()) -> str:
    """Without the settings that are swept over, which differ from run to run."""
    split, data = experiment.split, experiment.data
    beta = f" {split.beta:g}" if split.scheme.startswith("dirichlet") and "split.beta" not in swept else ""
    words = {
        "data.source": data.source,
        "data.augment": "" if data.augment == "none" else data.augment,
        "split.clients": counted(split.clients, "client") if experiment.clients_are_known else "clients of the data",
        "split.scheme": f"{split.scheme}{beta}",
        "model.name": experiment.model.name,
        "rounds": counted(experiment.rounds, "round"),
        "local.epochs": f"{counted(experiment.local.epochs, 'epoch')} a round",
    }
    return ", ".join(said for key, said in words.items() if said and key not in swept)


LONGEST_LINE = 2000  # letters: an invalid value may be as long as a file
IN_A_FILE = 140  # columns where no terminal says how many it has
# C0 but for tabs and line breaks, C1, what turns the direction of writing, line separators, halves of surrogate pairs
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class OutputLost(UserError):
    """Standard output takes no more; `quiet` where its reader has left (`| head`)."""

    def __init__(self, error: OSError):
        self.quiet = error.errno == errno.EPIPE
        reason = error.strerror or error
        super().__init__(f"standard output cannot be written: {reason}; send it to a place with room, or to /dev/null")


def printable(text: str) -> str:
    """The text without what a terminal would obey instead of showing it."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class Screen(Console):
    """A console for texts from elsewhere: see above."""

    def __init__(self, **settings: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **how: Any) -> Text:
        shown = printable(text)
        if not self.encoding.startswith("utf"):  # before tables are laid out: what is spelled is longer
            shown = shown.encode(self.encoding, "fedgg.spelled").decode(self.encoding)
        return super().render_str(shown, **how)

    def print(self, *things: Any, **how: Any) -> None:
        try:
            super().print(*things, **how)
        except OSError as error:
            if not self.stderr:
                raise OutputLost(error) from error  # what standard error cannot take is dropped

    def on_broken_pipe(self) -> None:
        if not self.stderr:
            raise OutputLost(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))


def _wide() -> int | None:
    """As wide as the terminal; in a pipe or a file wide enough for every table, unless COLUMNS says otherwise."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return None if terminal or "COLUMNS" in os.environ else IN_A_FILE


console = Screen(width=_wide())
errors = Screen(stderr=True)

_SPELLED = dict(zip("−–—×↑↓≈·•\N{REPLACEMENT CHARACTER}", "---x^v~**?", strict=True)) | {
    "±": "+-", "…": "...", "→": "->", "≥": ">=", "≤": "<=", "β": "beta", "ε": "epsilon", "δ": "delta", "μ": "mu"
}  # fmt: skip


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """For `codecs`: what the encoding of an output has no sign for, in letters that it has."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = (_SPELLED.get(sign) or _plain(sign) for sign in error.object[error.start : error.end])
    return "".join(letters), error.end


def _plain(sign: str) -> str:
    return unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode() or "?"


codecs.register_error("fedgg.spelled", _spelled)


def prepare_output() -> None:
    """Before anything is printed: every sign can be, and the numbers 0 to 2 are no files of ours."""
    closed = sys.stdout is None
    for descriptor in (0, 1, 2):  # the next file that is opened would become standard output
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
    """Whatever still waits to be written goes nowhere: Python would complain of it once more at the end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        sys.stdout = None


def complain(sentence: str) -> None:
    """One line on standard error, never wrapped, so that it can be searched and quoted."""
    line = " ".join(sentence.split())
    errors.print(Text.assemble(("error:", "bold red"), " ", printable(_cut(line))), soft_wrap=True)


def note(sentence: str) -> None:
    errors.print(Text.assemble(("note:", "yellow"), " ", printable(_cut(sentence))), soft_wrap=True)


def _cut(sentence: str) -> str:
    return sentence if len(sentence) <= LONGEST_LINE else f"{sentence[: LONGEST_LINE - 1]}…"


def confirm(question: str) -> bool:
    """Answered with y on a terminal; everything else is no."""
    return typer.confirm(question, default=False, err=True)


def say(sentence: str) -> None:
    console.print(sentence, soft_wrap=True)


LONGEST = 15  # letters of a word that are kept together: distinguishable


def print_table(table: Table, *, numbers: bool = True, names: int = 1) -> None:
    """Columns after the first `names` stand to the right if they are numbers."""
    grid = RichTable(
        title=table.title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD
    )
    for number, column in enumerate(table.columns):
        words = " ".join([column, *(row[number] for row in table.rows)]).split()
        right = number >= names and numbers
        # No word is broken as long as that is possible at all.
        whole = min(max(map(len, words), default=1), LONGEST)
        grid.add_column(column, justify="right" if right else "left", overflow="fold", min_width=whole)
    for row in table.rows:
        grid.add_row(*row)
    console.print(grid)
    for sentence in table.notes:
        console.print(Padding(Text(printable(sentence), style="dim"), (0, 0, 0, 2)))
    console.print()


class Words(TextColumn):
    """A column of text from elsewhere."""

    def render(self, task: Task) -> Text:
        return Text(printable(self.text_format.format(task=task)), style=self.style, justify=self.justify)


def progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        Words("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        Words("{task.fields[news]}"),
        Words("{task.fields[within]}", style="dim"),
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
            errors.print(sentence, soft_wrap=True)


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
