"""Where the clients' memory lies moves no number: in memory or in a file, resumed or not, with a folder or without."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from test_store import RemembersAPart, assert_same, batch_norm, dropout, resumed, small, stopped

from fedgg.lab.checkpoint import read_checkpoint
from fedgg.lab.client_state import RowsOnDisk
from fedgg.lab.config import Experiment
from fedgg.lab.runner import run

pytestmark = pytest.mark.usefixtures("checkpoints_at_once")

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scaffold": ({"algorithm.name": "scaffold"}, {}),
    "scaffold, all clients": ({"algorithm.name": "scaffold", "server.cohort": 4}, {}),
    "scaffold, every third checkpoint": ({"algorithm.name": "scaffold", "server.checkpoint_every": 3}, {}),
    "scaffold, stacked": ({"algorithm.name": "scaffold", "engine.name": "stacked"}, {}),
    "scaffold, fp64": ({"algorithm.name": "scaffold", "engine.precision": "fp64"}, {}),
    "scaffold, dropout": ({"algorithm.name": "scaffold"}, {"model": dropout}),
    "fedgg": ({"algorithm.name": "fedgg"}, {}),
    "fedgg, stacked": ({"algorithm.name": "fedgg", "engine.name": "stacked"}, {}),
    "views of the model": ({}, {"algorithm": RemembersAPart()}),
    "batch norm": ({"model.statistics": "local"}, {"model": batch_norm}),
    "batch norm and scaffold": ({"algorithm.name": "scaffold", "model.statistics": "local"}, {"model": batch_norm}),
}
if torch.cuda.is_available():
    CASES |= {
        f"{rule}, {engine}, cuda": ({"algorithm.name": rule, "engine.name": engine, "engine.device": "cuda"}, {})
        for rule in ("scaffold", "fedgg")
        for engine in ("loop", "stacked")
    }
FILE = {"server.memory_limit_mb": 0}


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoint").glob("*.slots")}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, given = CASES[case]
    experiment = small(**changes)
    run(experiment, out=tmp_path / "in memory", **given)
    assert not files(tmp_path / "in memory")
    in_file = experiment.changed(FILE)
    stopped(in_file, tmp_path / "in a file", 1, **given)
    stopped(in_file, tmp_path / "in a file", 4, **given)
    last, _, start = resumed(in_file, tmp_path / "in a file", **given)
    assert start == (3 if "third" in case else 4)
    assert_same(tmp_path / "in memory", tmp_path / "in a file")
    expected = {"client-memory.slots"} if case != "batch norm" else set()
    assert files(tmp_path / "in a file") == expected | ({"client-buffers.slots"} if "batch norm" in case else set())

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    nowhere = run(in_file, **given)
    assert all(torch.equal(nowhere.weights[name], tensor) for name, tensor in last.weights.items())
    assert not list(temporary.iterdir())


def test_the_limit_is_no_part_of_the_experiment() -> None:
    one, other = Experiment(), Experiment(server={"memory_limit_mb": 3})
    assert one.hash() == other.hash()
    assert one.trajectory() == other.trajectory()


def test_a_run_moves_to_the_file_on_its_way_and_stays(tmp_path: Path) -> None:
    """Also a folder that was begun before there were such files."""
    experiment = small(**{"algorithm.name": "scaffold", "rounds": 6})
    run(experiment.changed({"rounds": 8}), out=tmp_path / "straight")
    moving = tmp_path / "moving"
    stopped(experiment, moving, 2)
    assert not files(moving)
    stopped(experiment.changed(FILE), moving, 3)
    assert files(moving) == {"client-memory.slots"}
    (moving / "checkpoint" / "000003.safetensors").write_bytes(b"torn")
    _, notices, start = resumed(experiment.changed(FILE), moving)  # back to a checkpoint without a file, and again
    assert start == 2
    assert any("000003" in sentence for sentence in notices)
    resumed(experiment.changed({"rounds": 8}), moving)
    assert_same(tmp_path / "straight", moving)
    state = read_checkpoint(
        moving / "checkpoint" / "000008.safetensors", experiment.trajectories(), torch.device("cpu")
    )
    assert isinstance(state.memory, RowsOnDisk)


def test_a_larger_population_writes_no_larger_checkpoints(tmp_path: Path) -> None:
    """By default, as soon as a checkpoint would hold far more than its round has changed."""
    experiment = Experiment(
        rounds=3,
        split={"clients": 90, "scheme": "iid", "min_examples": 1},
        local={"epochs": 1, "batch": 16},
        server={"cohort": 4},
        model={"name": "mlp", "hidden": 200},
        algorithm={"name": "scaffold"},
    )
    run(experiment, out=tmp_path)
    assert files(tmp_path) == {"client-memory.slots"}
    model, checkpoint = (
        (tmp_path / name).stat().st_size for name in ("model.safetensors", "checkpoint/000003.safetensors")
    )
    assert checkpoint < 2.2 * model  # the model and the server's variate
