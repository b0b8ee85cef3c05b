"""`fedgg.compare`: one's own algorithms, models and data side by side, and the same numbers as one by one."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedgg
from fedgg.cli.options import refuse_a_study
from fedgg.core.algorithm import Client, Number
from fedgg.errors import UserError
from fedgg.runfolder.read import read_study

SMALL: dict[str, Any] = {"rounds": 3, "split": {"clients": 3, "beta": 1.0}, "local": {"epochs": 1, "batch": 16}}


@dataclass(frozen=True)
class Mine(fedgg.Algorithm):
    """Held back a little."""

    def terms(self, client: Client) -> dict[str, Number]:
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
    by_loss = found.by("test_loss")
    assert by_loss.final["FedProx"][4] == alone.scores("test_loss")[alone.rounds[-1]["round"]]
    assert "lower is better" in str(by_loss)
    with pytest.raises(UserError, match="do not record 'loss': did you mean 'test_loss'"):
        found.by("loss")
    with pytest.raises(UserError, match="do not record 'loss': did you mean 'test_loss'"):
        alone.scores("loss")


def test_a_folder_is_kept_and_gone_on_with(tmp_path: Path) -> None:
    told: list[str] = []
    given: dict[str, Any] = {
        "model": model,
        "data": table(),
        "out": tmp_path / "study",
        "observer": fedgg.PrintObserver(told.append),
    }
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


def test_another_model_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": table(), "out": tmp_path}
    fedgg.compare(["fedavg"], SMALL, seeds=(0,), model=lambda: model(), **given)
    with pytest.raises(fedgg.UserError, match="a model of other layers"):
        fedgg.compare(
            ["fedavg"],
            SMALL,
            seeds=(0, 1),
            model=lambda: nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 3)),
            **given,
        )


def test_a_variant_has_an_algorithm_of_ones_own_beside_settings() -> None:
    given: dict[str, Any] = {"model": model, "data": table(), "seeds": (0,)}
    variants: dict[str, Any] = {"object": Mine(), "beside": {"algorithm": Mine(), "local.lr": 0.002}}
    variants["class"] = {"algorithm": Mine, "local.lr": 0.002}
    losses = fedgg.compare(variants, SMALL, **given).by("test_loss").final
    slow = SMALL | {"local": SMALL["local"] | {"lr": 0.002}}
    alone = fedgg.run(slow, model=model, data=table(), algorithm=Mine()).scores("test_loss")[3]
    assert losses["beside"] == losses["class"] == {0: alone}
    assert losses["object"][0] != alone


OWN = """
from dataclasses import dataclass
import fedgg

@dataclass(frozen=True)
class Own(fedgg.Algorithm):
    def terms(self, client):
        return {"drift": 0.1}
"""


def test_code_that_has_changed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    given: dict[str, Any] = {"model": model, "data": table(), "out": tmp_path / "out", "seeds": (0,)}

    def play(code: str) -> None:
        (tmp_path / "own_algorithm.py").write_text(code, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("own_algorithm", tmp_path / "own_algorithm.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "own_algorithm", module)
        spec.loader.exec_module(module)
        fedgg.compare({"own": module.Own()}, SMALL, observer=fedgg.PrintObserver(told.append), **given)

    play(OWN)
    play(OWN)
    assert "own, seed 0: all rounds are there" in told
    assert not any("the code of" in line for line in told)
    play(OWN.replace("0.1", "-0.25"))
    assert any("the code of the algorithm has changed since this run began" in line for line in told)


def test_rows_and_seeds_of_all_kinds() -> None:
    rows: dict[Any, Any] = {0.1: {"local": {"lr": 0.1}}, "β +": "fedavg", "β −": "fedavg", "x" * 300: fedgg.FedProx}
    found = fedgg.compare(rows, SMALL, seeds=np.arange(1), model=model, data=table())
    assert list(found.final) == ["0.1", "β +", "β −", "x" * 300]
    assert found.record.runs["0.1"][0].config["local"]["batch"] == 16  # what the row does not set stays
    assert found.final["β +"] == found.final["β −"]
    assert found._repr_markdown_() == str(found)


def test_a_row_that_never_began_can_be_dropped(tmp_path: Path) -> None:
    given: dict[str, Any] = {"seeds": (0,), "model": model, "data": table(), "out": tmp_path}
    with pytest.raises(fedgg.UserError, match=r"terms\(\)|vector"):
        fedgg.compare({"good": "fedavg", "bad": _lost()}, SMALL, **given)
    assert list(fedgg.compare({"good": "fedavg", "better": Mine()}, SMALL, **given).final) == ["good", "better"]


def _lost() -> fedgg.Algorithm:
    @dataclass(frozen=True)
    class Lost(fedgg.Algorithm):
        """A vector that was never noted."""

        def terms(self, client: Client) -> dict[str, Number]:
            return {"compass": 0.5}

    return Lost()


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (lambda: fedgg.compare(fedgg.FedAvg()), "variants must be several"),  # type: ignore[arg-type]
        (lambda: fedgg.compare("fedavg"), "variants must be several"),
        (lambda: fedgg.compare({" ": "fedavg"}), "a label that can be read"),
        (lambda: fedgg.compare(["fedgg:mu=0.3"]), r"as in fedgg\.FedGG\(mu=0\.1\)"),
        (lambda: fedgg.compare(["fedavg"], "exp.toml"), "experiment must be"),  # type: ignore[arg-type]
        (lambda: fedgg.compare(["fedavg"], seeds="0-2"), "seeds must be whole numbers"),  # type: ignore[arg-type]
        (lambda: fedgg.compare(["fedavg"], seeds=3), "seeds must be whole numbers"),  # type: ignore[arg-type]
        (lambda: fedgg.compare(["fedavg"], seeds=[True]), "seeds must be whole numbers"),
        (lambda: fedgg.compare({"a": {"model.name": "cnn"}}, model=model), "a: a variant cannot set model.name"),
        (lambda: fedgg.compare({"a": {"data.source": "digits"}}, data=table()), "a variant cannot set data.source"),
        (lambda: fedgg.compare([]), "at least one variant"),
        (
            lambda: fedgg.compare([fedgg.FedGG(mu=0.1), fedgg.FedGG(mu=1.0)]),
            "two variants have the label FedGG",
        ),
        (lambda: fedgg.compare([{"local.lr": 1}]), "settings need a label"),
        (lambda: fedgg.compare({"a": "fedavg"}, reference="b"), "the reference 'b' is none"),
        (lambda: fedgg.compare({"a": "fedavg"}, seeds=(1, 1)), "name each seed once"),
        (lambda: fedgg.compare({"a": "fedavg", "b": {"seed": 3}}), "b: a variant cannot set seed"),
        (
            lambda: fedgg.compare({"a": {"algorithm": fedgg.FedGG(), "algorithm.mu": 0.1}}),
            "a: algorithm.mu is a setting of the object",
        ),
        (lambda: fedgg.compare({"a": "fedavg", "b": "fedcl"}), "FedCL needs examples at the server"),
        (lambda: fedgg.compare({"a": "fedavg", "b": {"local.lrr": 3}}), "did you mean 'local.lr'"),
    ],
)
def test_mistakes_before_the_first_run(ask: Callable[[], object], complaint: str) -> None:
    with pytest.raises(fedgg.UserError, match=complaint):
        ask()


@pytest.mark.parametrize(
    "algorithms", [[fedgg.FedAvg()], [fedgg.FedAvg(), fedgg.FedProx()]], ids=["one kind", "two labels"]
)
def test_a_split_of_a_later_seed_that_cannot_be_trained_on_ends_the_study_before_its_first_run(
    algorithms: list[fedgg.Algorithm], tmp_path: Path
) -> None:
    """With seed 4 a client has 33 examples, and batch statistics need two in a batch."""
    chosen = fedgg.Experiment(rounds=1, split={"clients": 10, "beta": 0.1}, local={"epochs": 1, "batch": 32})

    def normalised() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))

    def compared(experiment: fedgg.Experiment, seeds: Sequence[int]) -> fedgg.StudyResult:
        return fedgg.compare(algorithms, experiment, model=normalised, seeds=seeds, out=tmp_path / "study")

    with pytest.raises(UserError, match=r"FedAvg, seed 4: client 8 holds 33 examples, .* take local\.drop_last = true"):
        compared(chosen, range(5))
    assert not list(tmp_path.rglob("rounds.jsonl"))
    finished = compared(chosen.changed({"local.drop_last": True}), (4,)).run("FedAvg", 4)
    assert finished.status == "finished"
    assert finished.predict(np.zeros((3, 1, 8, 8))).shape == (3,)  # the result knows the model of its call
    named = fedgg.compare(
        {"Named": fedgg.FedAvg()}, chosen.changed({"model.name": "linear"}), seeds=(4,), out=tmp_path / "study"
    )
    both = compared(chosen.changed({"local.drop_last": True}), (4,))
    assert both.run("Named", 4).predict(np.zeros((3, 1, 8, 8))).shape == (
        3,
    )  # and that rows of other calls have others
    assert named.run("Named", 4).summary["parameters"] == 650


def test_its_folder_says_how_to_go_on(tmp_path: Path) -> None:
    fedgg.compare([fedgg.FedAvg(), fedgg.FedGG()], SMALL, seeds=[0], data=table(), model=model, out=tmp_path / "kept")
    with pytest.raises(
        UserError, match=r"to continue, call again: fedgg\.compare\(\.\.\., out='.*kept'\), from Python"
    ):
        refuse_a_study(tmp_path / "kept")


def test_files_and_runs_of_a_kept_result(tmp_path: Path) -> None:
    """The files of `fedgg compare`, and each run by its label and seed."""
    result = fedgg.compare([fedgg.FedAvg(), fedgg.FedGG()], SMALL, seeds=[3], data=table(), model=model, out=tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    assert {"tables.md", "accuracy.csv", "target.csv", "accuracy.png", "split-seed-3.png", "report.html"} <= written
    run = result.run("FedGG", 3, model=model)
    assert run.test_accuracy[-1] == result.final["FedGG"][3]
    assert len(run.predict(table()[0])) == len(table()[0])
    with pytest.raises(fedgg.UserError, match=r"no finished run 'FedGG' with seed 4: .* 'FedGG' \[3\]"):
        result.run("FedGG", 4)
    passing = fedgg.compare([fedgg.FedAvg()], SMALL, seeds=[3], data=table(), model=model)
    with pytest.raises(fedgg.UserError, match="out=FOLDER"):
        passing.run("FedAvg", 3)


def test_clients_that_the_data_name(tmp_path: Path) -> None:
    """Their number is found out for every row, and twelve of them may be a cohort of eleven."""
    owners = np.array([f"ward {number % 12:02d}" for number in range(120)])
    settings = {"rounds": 1, "local": {"epochs": 1, "batch": 8}}
    base = fedgg.Experiment(**settings, server={"cohort": 11}, split={"scheme": "given"})
    rows = {"FedAvg": {"algorithm.name": "fedavg"}, "slow": {"algorithm.name": "fedavg", "local.lr": 0.001}}
    fedgg.compare(rows, base, seeds=[0], model=model, data=(*table(), owners), out=tmp_path)
    told = json.loads((tmp_path / "slow" / "seed-0" / "partition.json").read_text())
    assert told["names"][:2] == ["ward 00", "ward 01"]
    assert "ward 07" in (tmp_path / "report.html").read_text(encoding="utf-8")
