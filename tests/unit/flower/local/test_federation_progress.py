"""Progress of a run, read from its run folder while it grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedgg.files import write_atomically
from fedgg.flower.local.federation import FederationProgress, JsonLinesTail, read_rounds
from fedgg.lab.config import Experiment


def test_each_line_is_returned_once(tmp_path: Path) -> None:
    progress = JsonLinesTail(tmp_path / "rounds.jsonl", read_rounds)
    assert progress.new_lines() == []
    file = tmp_path / "rounds.jsonl"
    file.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert [record["round"] for record in progress.new_lines()] == [1, 2]
    assert progress.new_lines() == []
    file.write_text('{"round": 1}\n')  # a resumed run plays the second again
    assert progress.new_lines() == []
    file.write_text('{"round": 1}\n{"round": 2}\n{"round": 3}\n')
    assert [record["round"] for record in progress.new_lines()] == [3]
    assert JsonLinesTail(file, read_rounds).count == 3
    assert JsonLinesTail(file, read_rounds).new_lines() == []


def test_clients_without_a_reply(tmp_path: Path) -> None:
    progress = FederationProgress(tmp_path)
    lost = [{"client": 2, "why": "no reply within 5 s"}, {"client": 0, "why": "not finite: the model"}]
    (tmp_path / "exchanges.jsonl").write_text(json.dumps({"round": 4, "lost": lost}) + "\n")
    assert progress.clients_without_reply() == {2: 4}
    assert progress.clients_without_reply() == {}


@pytest.mark.parametrize(
    ("status", "done", "over"), [("finished", 5, True), ("finished", 4, False), ("diverged", 2, True)]
)
def test_the_summary_of_a_shorter_run_is_not_the_end(tmp_path: Path, status: str, done: int, over: bool) -> None:
    assert FederationProgress(tmp_path).summary(Experiment(rounds=5)) is None
    (tmp_path / "summary.json").write_text(json.dumps({"status": status, "rounds_done": done}))
    assert (FederationProgress(tmp_path).summary(Experiment(rounds=5)) is not None) == over


def test_the_summary_before_a_resume_is_not_the_end(tmp_path: Path) -> None:
    progress, file = FederationProgress(tmp_path), tmp_path / "summary.json"
    end = json.dumps({"status": "diverged", "rounds_done": 2})
    file.write_text(end)
    progress.ignore_present_summary()
    assert progress.summary(Experiment(rounds=5)) is None
    write_atomically(file, end.encode())  # it diverged again
    assert progress.summary(Experiment(rounds=5)) is not None
