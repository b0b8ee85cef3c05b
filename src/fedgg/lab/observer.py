"""Callbacks for runs in progress: the same for `run`, `compare`, `sweep` and Flower."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from fedgg.runfolder.measure import first_score

if TYPE_CHECKING:
    from fedgg.lab.config import Experiment

MAX_NOTICES = 5  # below the table of a notebook
SECONDS_BETWEEN_UPDATES = {"notebook": 0.2, "terminal": 0.2, "log": 10.0}


class Observer:
    """Subclass it and override what you need; by default every method does nothing.

    `run` is the label of the run, as "FedGG, seed 0" in a comparison, and the name of the experiment in `fedgg.run`.
    The methods are called in the process that called `run`, `compare` or `sweep`, one at a time. An exception in one
    of them ends the run after its last finished round; `run` with the same folder resumes it.
    """

    def on_phase(self, run: str, phase: str) -> None:
        """A phase before the first round begins, such as "starting 10 SuperNodes" (Flower)."""

    def on_experiment(self, run: str, experiment: Experiment) -> None:
        """The settings of the run, before it starts."""

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        """The run starts, or is resumed after `rounds_done` of its rounds."""

    def on_client(self, run: str, clients_done: int, clients: int) -> None:
        """Another client of this round has been trained."""

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        """A round has ended; `record` is its line in `rounds.jsonl`."""

    def on_notice(self, run: str, message: str) -> None:
        """Something the user should know, in one sentence."""

    def on_end(self, run: str, summary: dict[str, Any]) -> None:
        """The run has ended; `summary` is the content of `summary.json`."""


class Observers(Observer):
    """Several observers as one: each is called in turn."""

    def __init__(self, observers: Sequence[Observer]):
        self.observers = tuple(observers)

    def on_phase(self, run: str, phase: str) -> None:
        for observer in self.observers:
            observer.on_phase(run, phase)

    def on_experiment(self, run: str, experiment: Experiment) -> None:
        for observer in self.observers:
            observer.on_experiment(run, experiment)

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        for observer in self.observers:
            observer.on_start(run, rounds_done, rounds)

    def on_client(self, run: str, clients_done: int, clients: int) -> None:
        for observer in self.observers:
            observer.on_client(run, clients_done, clients)

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.on_round(run, record)

    def on_notice(self, run: str, message: str) -> None:
        for observer in self.observers:
            observer.on_notice(run, message)

    def on_end(self, run: str, summary: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.on_end(run, summary)


class PrintObserver(Observer):
    """Prints a line when a run starts or ends, and every notice."""

    def __init__(self, output: Callable[[str], None] = print):
        self.output = output

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        remaining = f"{rounds} round{'' if rounds == 1 else 's'}"
        if rounds_done:
            remaining = f"from round {rounds_done + 1} of {rounds}"
        self._line(run, "all rounds are there" if rounds_done >= rounds else remaining)

    def on_notice(self, run: str, message: str) -> None:
        self._line(run, message)

    def on_end(self, run: str, summary: dict[str, Any]) -> None:
        ending = str(summary["status"])
        if ending != "finished":
            ending += f" after round {summary['rounds_done']}"
        if (score := first_score(summary, "final_")) is not None:
            measure, value = score
            ending += f", {measure.title} {measure.number(value)}{'%' if measure.percent else ''}"
        self._line(run, ending)

    def _line(self, run: str, message: str) -> None:
        self.output(f"{run}: {message}" if run else message)


@dataclass
class _Row:
    """A run as `ProgressObserver` shows it."""

    rounds: int
    rounds_done: int = 0
    text: str = ""
    clients: str = ""
    has_ended: bool = False


class ProgressObserver(Observer):
    """Shows the progress of `run`, `compare` or `sweep` called from Python.

    In a Jupyter notebook a table with a bar for each run, updated in place; on a terminal one line; in a log a line
    every ten seconds.
    """

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._notices: dict[str, str] = {}  # each once, with the first run it came from
        self._shown_at = time.monotonic()
        self._display: Any = None  # in the output of a notebook's cell
        self._cell: int | None = None  # its number
        self._place = "terminal" if sys.stderr.isatty() else "log"

    def _forget_earlier_calls(self, run: str | None = None) -> None:
        """Those of an earlier cell, or of the same run, are not shown again."""
        cell = notebook_cell()
        if cell != self._cell or (run in self._rows and self._rows[run].has_ended):
            self._rows, self._notices, self._display, self._cell = {}, {}, None, cell
            self._place = self._place if cell is None else "notebook"

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        self._forget_earlier_calls(run)
        self._rows[run] = _Row(rounds, rounds_done, f"resumed after round {rounds_done}" if rounds_done else "")
        self._show(run, at_once=self._place != "log")

    def on_client(self, run: str, clients_done: int, clients: int) -> None:
        self._rows[run].clients = f"{clients_done}/{clients} clients"
        self._show(run)

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        row = self._rows[run]
        row.rounds_done, row.clients = record["round"], ""
        score, loss = first_score(record), record.get("train_loss")
        texts = [
            "" if score is None else f"{score[0].title} {score[0].number(score[1])}{score[0].unit}",
            "" if loss is None else f"train loss {loss:.3f}",
        ]
        row.text = ", ".join(filter(None, texts))
        self._show(run)

    def on_notice(self, run: str, message: str) -> None:
        self._forget_earlier_calls()
        if message in self._notices:
            return
        self._notices[message] = f"{run}: {message}" if run else message
        if self._place != "notebook":
            self._print(f"note: {self._notices[message]}")
        elif self._display is not None:
            self._show(run, at_once=True)

    def on_end(self, run: str, summary: dict[str, Any]) -> None:
        row = self._rows[run]
        row.has_ended, row.clients = True, ""
        status = summary["status"] + (f" ({summary['why']})" if summary.get("why") else "")
        row.text = ", ".join(filter(None, [status, row.text]))
        if self._place == "notebook":
            self._show(run, at_once=True)
        else:
            self._print(f"{run}: {row.text}" if run else row.text)

    def _show(self, run: str, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._shown_at < SECONDS_BETWEEN_UPDATES[self._place]:
            return
        self._shown_at = time.monotonic()
        if self._place == "notebook":
            from IPython.display import HTML, display

            if self._display is None:
                self._display = display(HTML(self._table()), display_id=True)
            else:
                self._display.update(HTML(self._table()))
            return
        rounds_done = sum(row.rounds_done for row in self._rows.values())
        rounds = sum(row.rounds for row in self._rows.values())
        row = self._rows[run]
        texts = ", ".join(filter(None, [run, row.text, row.clients]))
        self._print(f"{rounds_done} of {rounds} rounds; {texts}", passing=True)

    def _print(self, text: str, *, passing: bool = False) -> None:
        """A line on standard error; on a terminal one that passes is replaced by the next."""
        text = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)
        if self._place == "terminal":
            text = text[: shutil.get_terminal_size().columns - 1] if passing else text
            text = f"\r{text}\x1b[K"  # and clear the rest of the line
        print(text, end="" if passing and self._place == "terminal" else "\n", file=sys.stderr, flush=True)

    def _table(self) -> str:
        rows = [
            f"<tr><td>{escape(run or 'run')}</td>"
            f"<td><progress value='{row.rounds_done}' max='{row.rounds}'></progress></td>"
            f"<td>{row.rounds_done}/{row.rounds}</td><td>{escape(row.text)}</td><td>{escape(row.clients)}</td></tr>"
            for run, row in self._rows.items()
        ]
        notices = "".join(f"<div>{escape(notice)}</div>" for notice in list(self._notices.values())[-MAX_NOTICES:])
        return f"<table>{''.join(rows)}</table>{notices}"


def notebook_cell() -> int | None:
    """The number of the cell that is executed; None where this process is not the kernel of a Jupyter notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return int(shell.execution_count) if shell is not None and hasattr(shell, "kernel") else None
