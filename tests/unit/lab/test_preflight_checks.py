"""What only a build can find wrong with a later row of a study is told before the first one trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedgg
from fedgg.errors import UserError
from fedgg.lab import build, preflight_checks
from fedgg.lab.config import Experiment
from fedgg.lab.observer import Observer
from fedgg.lab.study import Study, run_study

BASE = Experiment(rounds=1, split={"clients": 3, "scheme": "iid"}, local={"epochs": 1}, model={"name": "linear"})


def silent(*news: object) -> None:
    pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.name": "cnn"}, "cnn needs images of 16 x 16"),
        ({"split.clients": 5000}, "5000"),
        ({"local.batch": 1000}, "larger than every client"),
        ({"privacy.noise": 1.0, "privacy.epsilon_limit": 1e-9}, "epsilon"),
        ({"data.source": "cifar10"}, "cifar10"),
    ],
)
def test_a_later_row_is_named_and_nothing_is_begun(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    study = Study(BASE, {"good": {}, "bad": changes}, (0, 1), "good")
    folder = tmp_path / "study"
    with pytest.raises(UserError, match=words) as told:
        run_study(study, folder, processes=1, observer=Observer(), data_folder=tmp_path)
    if "data.source" not in changes:
        assert str(told.value).startswith("bad, seed 0: ")
    assert not folder.exists()


def test_from_python_too(tmp_path: Path) -> None:
    rows = {"good": {"algorithm.name": "fedavg"}, "bad": {"model.name": "cnn"}}
    with pytest.raises(UserError, match=r"^bad, seed 0: the cnn needs images"):
        fedgg.compare(rows, BASE, seeds=(0,), out=tmp_path / "study")
    assert not (tmp_path / "study").exists()


def test_rows_that_are_built_alike_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    examined = build.examine

    def counted(experiment: Experiment, *more: Any) -> Any:
        built.append(experiment.name)
        return examined(experiment, *more)

    monkeypatch.setattr(preflight_checks, "examine", counted)
    rows: dict[str, dict[str, Any]] = {"a": {}, "b": {"local.lr": 0.1}, "c": {"split.clients": 4}, "d": {}}
    study = Study(BASE, rows | {"d": {"split.clients": 4, "algorithm.name": "fedprox"}}, (0, 1), "a")
    run_study(study, tmp_path / "one", processes=1, observer=Observer())
    assert built == ["a", "c"]
    run_study(study, tmp_path / "one", processes=1, observer=Observer())
    assert built == ["a", "c"]  # what has begun was built before
    run_study(
        Study(BASE, {"a": {}, "b": {"local.lr": 0.1}}, (0,), "a"), tmp_path / "two", processes=1, observer=Observer()
    )
    assert built == ["a", "c"]  # a single kind is built by its first run


def test_what_a_scheme_does_not_read_is_told() -> None:
    even = BASE.changed({"split.beta": 0.1, "split.shards_per_client": 3})
    assert [notice for notice in build.build(even).notices if "no effect" in notice] == [
        "split.beta = 0.1 has no effect under split.scheme = 'iid'",
        "split.shards_per_client = 3 has no effect under split.scheme = 'iid'",
    ]
    assert not any(
        "no effect" in notice for notice in build.build(even.changed({"split.scheme": "shards"})).notices[1:]
    )
    assert not any("no effect" in notice for notice in build.build(BASE).notices)


def test_augmentation_needs_images_wherever_the_clients_are() -> None:
    x, y = np.zeros((300, 3), np.float32), np.arange(300) % 2
    flipped = BASE.changed({"data.augment": "flip"})
    refused = r"^data.augment = 'flip' needs images \[C, H, W\], but examples of arrays have shape \(3,\)$"
    with pytest.raises(UserError, match=refused):
        build.build(flipped, data=(x, y, x, y))
    built = build.build(BASE, data=(x, y, x, y))
    with pytest.raises(UserError, match=refused):  # as the Flower server does, whose clients hold the examples
        build.assemble(flipped, built.feed, built.origin)


def test_moon_needs_one_representation_an_example() -> None:
    tokens = np.random.default_rng(0).integers(0, 12, (60, 7))
    moon = BASE.changed({"task.name": "next_token", "model.name": "char_lstm", "algorithm.name": "moon"})
    moon = moon.changed({"local.batch": 5, "data.normalise": "none"})
    with pytest.raises(UserError, match=r"CharLSTM has no representation of a whole example: its last layer 'head'"):
        build.build(moon, data=(tokens, tokens, tokens, tokens))


@pytest.mark.parametrize("work", [{"local.epochs": 1}, {"local.steps": 1}], ids=str)
def test_batches_of_one_example_of_a_model_with_batch_statistics(work: dict[str, Any]) -> None:
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    with pytest.raises(UserError, match=r"^local.batch = 1: every batch has one example"):
        build.build(BASE.changed(work | {"local.batch": 1}), model=norm)


def test_kept_optimiser_state_is_client_state_under_privacy() -> None:
    pytest.importorskip("dp_accounting")
    kept = BASE.changed({"optimiser.state": "kept", "privacy.noise": 1.0, "server.cohort": 2})
    run = fedgg.run(kept, algorithm="fedavg")
    fresh = fedgg.run(kept.changed({"optimiser.state": "fresh"}), algorithm="fedavg")
    assert run.rounds[0]["epsilon"] > fresh.rounds[0]["epsilon"]
