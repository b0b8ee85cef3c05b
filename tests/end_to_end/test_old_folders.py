"""Run folders written by an earlier commit (`tests/fixtures/format-1`, ad897b8) open, resume to the same numbers, and
appear in the report.

`killed` and `arrays` were killed with SIGKILL after round 3 of 6; `expected.json` holds what uninterrupted runs of that
commit ended with, in float64.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from earlier_folders import without_checksums
from observers import Callbacks
from torch import nn

import fedgg
from fedgg.lab.store import Store
from fedgg.runfolder.read import read_study

FOLDERS = Path(__file__).parents[1] / "fixtures" / "format-1"
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDERS / "expected.json").read_text())


def arrays() -> tuple[np.ndarray[Any, Any], ...]:
    """The examples that `arrays` was run with."""
    rng = np.random.default_rng(5)
    x = 50 + 20 * rng.normal(size=(160, 6))
    y = (x[:, 0] + x[:, 1] > 100).astype(int) + (x[:, 2] > 60)
    return x[:120], y[:120], x[120:], y[120:]


def module() -> nn.Module:
    """The model that `arrays` was run with."""
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize("name", ["killed", "arrays"])
def test_a_killed_run_of_an_earlier_commit_resumes_to_its_numbers(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(FOLDERS / name, folder)
    brought: dict[str, Any] = {}
    if name == "arrays":
        brought = {"model": module, "data": arrays(), "algorithm": fedgg.FedGG(mu=0.1)}
    resumed_after = []
    observer = Callbacks(started=lambda done, _: resumed_after.append(done))

    finished = fedgg.run(Store(folder).experiment(), out=folder, observer=observer, **brought)

    assert resumed_after == [3]
    assert json.loads((folder / "resumes.jsonl").read_text())["engine"]["name"] == "fused"  # config.toml says loop
    expected = EXPECTED[name]
    assert finished.test_accuracy == expected["test_accuracy"]
    assert finished.summary["bytes"] == expected["bytes"]
    row = torch.cat([finished.weights[key].reshape(-1).double() for key in sorted(finished.weights)])
    wave = torch.arange(len(row), dtype=torch.float64).sin()
    for key, value in (("sum", row.sum()), ("length", row.norm()), ("wave", (row * wave).sum())):
        assert float(value) == pytest.approx(expected[key], rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("named_again", [False, True])
def test_what_was_called_loop_is_resumed_by_the_fused_step(named_again: bool, tmp_path: Path) -> None:
    """To the last bit, in float32, whether the folder's own settings are taken or an experiment that names `loop`."""
    fused = fedgg.Experiment(rounds=4, split={"clients": 3}, engine={"name": "fused"})
    loop = fused.changed({"engine.name": "loop"})
    uninterrupted, by_loop = fedgg.run(fused).weights, fedgg.run(loop).weights
    assert not all(torch.equal(by_loop[name], tensor) for name, tensor in uninterrupted.items())
    folder = tmp_path / "run"
    fedgg.run(fused.changed({"rounds": 2}), out=folder)
    config = without_checksums(folder) / "config.toml"
    config.write_text(config.read_text().replace('name = "fused"', 'name = "loop"'))
    notices: list[str] = []
    again = loop if named_again else Store(folder).experiment().changed({"rounds": 4})
    resumed = fedgg.run(again, out=folder, observer=Callbacks(notice=notices.append))
    assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in uninterrupted.items())
    assert ("engine: fused (the rounds of this folder were trained by the fused step)" in notices) is named_again
    assert Store(folder).experiment().engine.name == "fused"


def test_a_folder_of_the_loop_is_resumed_by_the_loop(tmp_path: Path) -> None:
    loop = fedgg.Experiment(rounds=4, split={"clients": 3}, engine={"name": "loop"})
    uninterrupted = fedgg.run(loop).weights
    fedgg.run(loop.changed({"rounds": 2}), out=tmp_path / "run")
    resumed = fedgg.run(Store(tmp_path / "run").experiment().changed({"rounds": 4}), out=tmp_path / "run")
    assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in uninterrupted.items())
    with pytest.raises(fedgg.UserError, match="holds another experiment"):
        fedgg.run(loop.changed({"rounds": 4, "engine.name": "auto"}), out=tmp_path / "run")


def test_a_study_of_an_earlier_commit_appears_in_the_report() -> None:
    study = read_study(FOLDERS / "study")
    assert {label: sorted(by_seed) for label, by_seed in study.runs.items()} == {
        "FedAvg": [0, 1],
        "SCAFFOLD": [0, 1],
        "FedGG mu=0.1": [0, 1],
    }
    for by_seed in study.runs.values():
        for record in by_seed.values():
            rounds, accuracy = record.accuracy()
            assert list(rounds) == [1, 2, 3]
            assert all(0 <= value <= 1 for value in accuracy)
