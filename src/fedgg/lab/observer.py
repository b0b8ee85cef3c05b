"""Callbacks for runs in progress: the same for `run`, `compare`, `sweep` and Flower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedgg.runfolder.measure import first_score


class Observer:
    """Subclass it and override what you need; by default every method does nothing.

    `run` is the label of the run, as "FedGG, seed 0" in a comparison, and the name of the experiment in `fedgg.run`.
    The methods are called in the process that called `run`, `compare` or `sweep`, one at a time. An exception in one
    of them ends the run after its last finished round; `run` with the same folder resumes it.
    """

    def on_phase(self, run: str, phase: str) -> None:
        """A phase before the first round begins, such as "starting 10 SuperNodes" (Flower)."""

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


class PrintObserver(Observer):
    """Prints a line when a run starts or ends, and every notice."""

    def __init__(self, output: Callable[[str], None] = print):
        self.output = output

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        remaining = f"from round {rounds_done + 1} of {rounds}" if rounds_done else f"{rounds} rounds"
        self._line(run, "all rounds are there" if rounds_done >= rounds else remaining)

    def on_notice(self, run: str, message: str) -> None:
        self._line(run, message)

    def on_end(self, run: str, summary: dict[str, Any]) -> None:
        ending = str(summary["status"])
        if (score := first_score(summary, "final_")) is not None:
            measure, value = score
            ending += f", {measure.title} {measure.number(value)}{'%' if measure.percent else ''}"
        self._line(run, ending)

    def _line(self, run: str, message: str) -> None:
        self.output(f"{run}: {message}" if run else message)
