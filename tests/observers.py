"""An observer made of callbacks, shorter than a subclass where a test needs one or two of them; a tracker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedgg.lab.observer import Observer


class Callbacks(Observer):
    """Each callback gets what the method of the observer gets, without the label of the run."""

    def __init__(
        self,
        started: Callable[[int, int], None] = lambda rounds_done, rounds: None,
        client: Callable[[int, int], None] = lambda clients_done, clients: None,
        round: Callable[[dict[str, Any]], None] = lambda record: None,
        notice: Callable[[str], None] = lambda message: None,
    ):
        self.started, self.client, self.round, self.notice = started, client, round, notice

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        self.started(rounds_done, rounds)

    def on_client(self, run: str, clients_done: int, clients: int) -> None:
        self.client(clients_done, clients)

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        self.round(record)

    def on_notice(self, run: str, message: str) -> None:
        self.notice(message)


class Events(Observer):
    """Hands every call to one function, as (label of the run, kind of event, its content)."""

    def __init__(self, heard: Callable[[str, str, Any], None]):
        self.heard = heard

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        self.heard(run, "started", (rounds_done, rounds))

    def on_client(self, run: str, clients_done: int, clients: int) -> None:
        self.heard(run, "client", (clients_done, clients))

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        self.heard(run, "round", record)

    def on_notice(self, run: str, message: str) -> None:
        self.heard(run, "notice", message)

    def on_end(self, run: str, summary: dict[str, Any]) -> None:
        self.heard(run, "ended", summary)


# The file of a tracker that writes what it is told to lines.json.
TRACKER_OF_LINES = """
import json

import fedgg


class Lines(fedgg.Tracker):
    name = subfolder = "lines"

    def check(self):
        pass

    def open(self, run, experiment, rounds_done):
        self.folder.mkdir(parents=True, exist_ok=True)
        return [["open", experiment.rounds, rounds_done]]

    def log(self, tracked, step, values):
        tracked.append(["log", step, values["test_accuracy"]])

    def end(self, tracked, status, summary):
        tracked.append(["end", status, summary["rounds_done"]])
        (self.folder / "lines.json").write_text(json.dumps(tracked))
"""
