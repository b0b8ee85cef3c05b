"""What `fedgg flower up` refuses before it starts anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

pytest.importorskip("flwr")

from fedgg.cli import app
from fedgg.flower.local.setup import FederationFolder
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
    paths = FederationFolder(tmp_path / "run")
    paths.folder.mkdir(parents=True)
    with FileLock(paths.lock):
        assert "has a federation that is up" in complaint(words)


def test_a_finished_run_is_shown_and_nothing_is_started(words: list[str], tmp_path: Path) -> None:
    done = run(EXPERIMENT, out=tmp_path / "run")
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    assert f"{100 * done.test_accuracy[-1]:.2f}%" in said.output
    assert not (tmp_path / "run" / "federation").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text()).items() >= done.summary.items()


@pytest.mark.parametrize(
    ("more", "words_of_it"),
    [
        (["--set", "algorithm.name=fedfoo"], "unknown algorithm 'fedfoo'"),
        (["--set", "model.name=cnn"], "cnn needs images of 16 x 16"),
        (["--host", "203.0.113.9"], "cannot listen on 203.0.113.9"),
        (["--min-clients", "9"], "min_clients = 9, but a round has 2 clients"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    words: list[str], tmp_path: Path, more: list[str], words_of_it: str
) -> None:
    assert words_of_it in complaint([*words, *more])
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_is_named(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert f"cannot write to {out}: Not a directory" in complaint([*words[:-1], str(out)])
    below = tmp_path / "file" / "app"
    assert "Not a directory; name another folder" in complaint(["flower", "new", str(below), words[2]])


def test_an_app_of_an_unknown_algorithm_is_not_written(words: list[str], tmp_path: Path) -> None:
    new = ["flower", "new", str(tmp_path / "app"), words[2], "--set", "algorithm.name=fedfoo"]
    assert "unknown algorithm 'fedfoo'" in complaint(new)
    assert not (tmp_path / "app").exists()


def test_a_federation_that_never_began_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "run" / "federation").mkdir(parents=True)
    assert "holds a federation that was not started: call `fedgg flower up`" in complaint(
        ["resume", str(tmp_path / "run")]
    )
