"""What a run folder tells while it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedgg.files import write_atomically
from fedgg.flower.local.federation import History, Lines
from fedgg.lab.config import Experiment


def test_each_round_is_told_once(tmp_path: Path) -> None:
    history = Lines(tmp_path / "rounds.jsonl")
    assert history.news() == []
    file = tmp_path / "rounds.jsonl"
    file.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert [record["round"] for record in history.news()] == [1, 2]
    assert history.news() == []
    file.write_text('{"round": 1}\n')  # a resumed run plays the second again
    assert history.news() == []
    file.write_text('{"round": 1}\n{"round": 2}\n{"round": 3}\n')
    assert [record["round"] for record in history.news()] == [3]
    assert Lines(file).told == 3
    assert Lines(file).news() == []


def test_who_was_silent(tmp_path: Path) -> None:
    history = History(tmp_path)
    lost = [{"client": 2, "why": "no answer within 5 s"}, {"client": 0, "why": "not finite: the model"}]
    (tmp_path / "exchanges.jsonl").write_text(json.dumps({"round": 4, "lost": lost}) + "\n")
    assert history.silent() == {2: 4}
    assert history.silent() == {}


@pytest.mark.parametrize(
    ("status", "done", "over"), [("finished", 5, True), ("finished", 4, False), ("diverged", 2, True)]
)
def test_the_end_of_a_shorter_run_is_none(tmp_path: Path, status: str, done: int, over: bool) -> None:
    assert History(tmp_path).summary(Experiment(rounds=5)) is None
    (tmp_path / "summary.json").write_text(json.dumps({"status": status, "rounds_done": done}))
    assert (History(tmp_path).summary(Experiment(rounds=5)) is not None) == over


def test_the_end_before_a_resume_is_none(tmp_path: Path) -> None:
    history, file = History(tmp_path), tmp_path / "summary.json"
    end = json.dumps({"status": "diverged", "rounds_done": 2})
    file.write_text(end)
    history.resume()
    assert history.summary(Experiment(rounds=5)) is None
    write_atomically(file, end.encode())  # it diverged again
    assert history.summary(Experiment(rounds=5)) is not None
