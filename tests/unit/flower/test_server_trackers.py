"""The server of a Flower app sends rounds to the trackers that its run config names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from in_process_grid import Federation, small
from observers import TRACKER_OF_LINES

import fedgg
from fedgg.errors import UserError
from fedgg.flower import server_app


def run_app(federation: Federation, track: str) -> None:
    files: dict[str, Any] = {"out": str(federation.out), "data": str(federation.folder / "data" / "server.npz")}
    config = files | {"deadline": 0.5, "wait": 0.5, "track": track}
    server_app(federation.file)(federation.grid, Context(1, 0, {}, RecordDict(), config))


def test_rounds_reach_the_trackers_of_the_run_config(tmp_path: Path) -> None:
    federation, tracker = Federation(small(rounds=3), tmp_path), tmp_path / "lines.py"
    tracker.write_text(TRACKER_OF_LINES)
    with pytest.raises(UserError, match=r"lines\.py"):
        run_app(federation, f"{tracker}:Lines")
    fedgg.trust(str(tracker))
    run_app(federation, f" {tracker}:Lines ,")
    accuracies = [record["test_accuracy"] for record in fedgg.Run.load(federation.out).rounds]
    assert json.loads((federation.out / "lines" / "lines.json").read_text()) == [
        ["open", 3, 0],
        *(["log", number, accuracy] for number, accuracy in enumerate(accuracies, 1)),
        ["end", "finished", 3.0],
    ]


def test_an_unknown_tracker_is_named_before_the_run(tmp_path: Path) -> None:
    federation = Federation(small(), tmp_path)
    with pytest.raises(UserError, match=r"tensorbord.*did you mean 'tensorboard'"):
        run_app(federation, "tensorbord")
    assert not federation.out.exists()
