"""What `fedgg flower up` refuses before it starts anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

pytest.importorskip("flwr")

from fedgg.cli import app
from fedgg.flower.places import Places
from fedgg.lab.config import Experiment
from fedgg.lab.runner import run

EXPERIMENT = Experiment(rounds=1, split={"clients": 2}, model={"name": "linear"})


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    file = tmp_path / "experiment.toml"
    file.write_text(EXPERIMENT.to_toml())
    return ["flower", "up", str(file), "--out", str(tmp_path / "run")]


def complaint(words: list[str]) -> str:
    return str(CliRunner().invoke(app, words).exception)


def test_it_does_not_listen_unprotected_beyond_loopback(words: list[str], tmp_path: Path) -> None:
    assert "without TLS and authentication" in complaint([*words, "--host", "0.0.0.0", "--no-tls"])
    assert "without authentication" in complaint([*words, "--host", "0.0.0.0", "--no-authentication"])
    assert not (tmp_path / "run").exists()


def test_another_experiment_in_the_folder_is_named(words: list[str], tmp_path: Path) -> None:
    run(EXPERIMENT, out=tmp_path / "run")
    assert "holds another experiment (seed = 0 there, 1 here)" in complaint([*words, "--set", "seed=1"])


def test_one_federation_for_one_folder(words: list[str], tmp_path: Path) -> None:
    places = Places(tmp_path / "run")
    places.folder.mkdir(parents=True)
    with FileLock(places.lock):
        assert "has a federation that is up" in complaint(words)


def test_a_finished_run_is_shown_and_nothing_is_started(words: list[str], tmp_path: Path) -> None:
    done = run(EXPERIMENT, out=tmp_path / "run")
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    assert f"{100 * done.test_accuracy[-1]:.2f}%" in said.output
    assert not (tmp_path / "run" / "federation").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == done.summary
