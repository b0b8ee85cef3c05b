"""The setting of a grid is chosen by what clients kept back, and the study of the chosen ones can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import script

from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.observer import Observer
from fedgg.lab.study import Study, load_study, run_study
from fedgg.older_python import tomllib
from fedgg.runfolder.archive_file import read_archive, write_archive
from fedgg.runfolder.read import read_run

SMALL: dict[str, Any] = {"model": {"name": "mlp", "hidden": 16}, "local": {"epochs": 1}, "rounds": 3}


def archived(folder: Path, holdout: float) -> Path:
    """A grid of three settings of FedProx, the last of which no step survives, and FedAvg."""
    prox: dict[str, dict[str, Any]] = {
        f"FedProx: mu {mu:g}, beta 0.5": {"algorithm": {"name": "fedprox", "mu": mu}} for mu in (0.01, 50.0, 1e30)
    }
    variants: dict[str, dict[str, Any]] = {"FedAvg, beta 0.5": {"algorithm": {"name": "fedavg"}}, **prox}
    study = Study(Experiment(data={"holdout": holdout}, **SMALL), variants, (10,), "FedAvg, beta 0.5")
    run_study(study, folder, processes=1, observer=Observer())
    write_archive(map(read_run, sorted(folder.glob("*/seed-*"))), folder / "runs.json")
    return folder / "runs.json"


def test_the_best_on_what_was_kept_back_is_taken(tmp_path: Path) -> None:
    tuned = script("tuned")
    points = [tuned.Point.of(record) for record in read_archive(archived(tmp_path, 0.2))]
    best = tuned.chosen(points)
    point, grid = best["FedProx, beta 0.5"]
    reached = {p.setting: p.accuracy for p in grid}
    assert reached["mu 1e+30"] is None
    assert reached["mu 0.01"] > reached["mu 50"]
    assert point.setting == "mu 0.01"
    rounds, kept_back = point.record.numbers("holdout_accuracy")
    assert point.accuracy == pytest.approx(kept_back.mean())
    assert len(rounds) == 3

    (tmp_path / "tuned.toml").write_text(tuned.study(best), encoding="utf-8")
    study = load_study(tmp_path / "tuned.toml")
    assert study.seeds == (0, 1, 2)
    assert list(study.variants) == ["FedAvg, beta 0.5", "FedProx, beta 0.5"]
    chosen = study.experiment("FedProx, beta 0.5", 0)
    assert chosen.algorithm.settings == {"mu": 0.01}
    assert chosen.data.holdout == 0
    assert chosen.local.epochs == 1


def test_a_family_that_diverged_is_left_out_with_a_word(tmp_path: Path) -> None:
    tuned = script("tuned")
    points = [tuned.Point.of(record) for record in read_archive(archived(tmp_path, 0.2))]
    text = tuned.study(tuned.chosen([p for p in points if p.setting in ("", "mu 1e+30")]))
    assert list(tomllib.loads(text)["variants"]) == ["FedAvg, beta 0.5"]
    assert "FedProx, beta 0.5: left out, all settings diverged (mu 1e+30 diverged)" in text


def test_without_anything_kept_back_nothing_is_chosen(tmp_path: Path) -> None:
    tuned = script("tuned")
    with pytest.raises(UserError, match=r"data\.holdout"):
        tuned.chosen([tuned.Point.of(record) for record in read_archive(archived(tmp_path, 0.0))])
