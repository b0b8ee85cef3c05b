"""`fedgg.compare`: one's own algorithms, models and data side by side, and the same numbers as one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedgg
from fedgg.core.algorithm import Number, Site
from fedgg.report.folders import read_study

SMALL: dict[str, Any] = {"rounds": 3, "split": {"clients": 3, "beta": 1.0}, "local": {"epochs": 1, "batch": 16}}


@dataclass(frozen=True)
class Mine(fedgg.Algorithm):
    """Held back a little."""

    def terms(self, site: Site) -> dict[str, Number]:
        return {"drift": 0.1}


def table() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    y = np.arange(160) % 3
    x = numbers.normal(size=(160, 7)) * 3 + 50 + y[:, None]
    return x[:120], y[:120], x[120:], y[120:]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_rows_are_the_runs_one_by_one(engine: str) -> None:
    base = fedgg.Experiment(**SMALL, engine={"name": engine})
    rows: list[Any] = [fedgg.FedAvg(), Mine, "fedprox"]
    found = fedgg.compare(rows, base, seeds=(0, 4), model=model, data=table())
    assert found.folder is None
    assert list(found.final) == ["FedAvg", "Mine", "FedProx"]
    for label, algorithm in zip(found.final, rows, strict=True):
        for seed in (0, 4):
            alone = fedgg.run(base.changed({"seed": seed}), model=model, data=table(), algorithm=algorithm)
            assert found.final[label][seed] == pytest.approx(alone.test_accuracy[-1], abs=1e-12)
    assert found.comparison.reference == "FedAvg"
    assert "| Mine |" in str(found)
    assert found.answer in str(found)


def test_a_folder_is_kept_and_gone_on_with(tmp_path: Path) -> None:
    told: list[str] = []
    given: dict[str, Any] = {"model": model, "data": table(), "out": tmp_path / "study", "tell": told.append}
    rows: dict[str, Any] = {"plain": fedgg.FedAvg(), "slow": {"algorithm.name": "fedavg", "local.lr": 0.001}}
    first = fedgg.compare(rows, SMALL, seeds=(0,), reference="slow", **given)
    assert first.comparison.reference == "slow"
    assert "plain, seed 0: 3 rounds" in told
    assert any(line.startswith("slow, seed 0: finished, test accuracy ") for line in told)
    file = tmp_path / "study" / "plain" / "seed-0" / "rounds.jsonl"
    before = file.read_bytes()  # with the seconds each round took
    rows["own"] = Mine()
    more = fedgg.compare(rows, SMALL, seeds=(0, 1), reference="slow", **given)
    assert file.read_bytes() == before
    assert more.final["plain"][0] == first.final["plain"][0]
    assert {label: set(runs) for label, runs in more.final.items()} == {
        label: {0, 1} for label in ("plain", "slow", "own")
    }
    assert read_study(tmp_path / "study").labels == ("plain", "slow", "own")


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (lambda: fedgg.compare([]), "at least one variant"),
        (
            lambda: fedgg.compare([fedgg.FedGG(mu=0.1), fedgg.FedGG(mu=1.0)]),
            "two rows are called FedGG: give them labels",
        ),
        (lambda: fedgg.compare([{"local.lr": 1}]), "settings need a label"),
        (lambda: fedgg.compare({"a": "fedavg"}, reference="b"), "the reference 'b' is none"),
        (lambda: fedgg.compare({"a": "fedavg"}, seeds=(1, 1)), "name each seed once"),
        (lambda: fedgg.compare({"a": "fedavg", "b": {"seed": 3}}), "b: a row cannot set seed"),
        (lambda: fedgg.compare({"a": "fedavg", "b": "fedcl"}), "FedCL needs examples at the server"),
        (lambda: fedgg.compare({"a": "fedavg", "b": {"local.lrr": 3}}), "did you mean 'local.lr'"),
    ],
)
def test_mistakes_before_the_first_run(ask: Callable[[], object], complaint: str) -> None:
    with pytest.raises(fedgg.UserError, match=complaint):
        ask()
