"""What `fedgg list` says of algorithms is true of them, every one of them says it, and it fits."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedgg.algorithms import ALGORITHMS, MOON, SCAFFOLD, FedACG, FedAdam, FedAvg, FedCL, FedCM, FedCurv, FedDyn, FedGG
from fedgg.check.cost import Cost, cost_of
from fedgg.cli import terminal
from fedgg.cli.listing import _registries, list_parts
from fedgg.data import DATASETS
from fedgg.data.readers import load_digits
from fedgg.engines import Loop
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.federated_data import with_given_clients
from fedgg.lab.one_round import begin
from fedgg.lab.runner import play_round
from fedgg.registry import Registry


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_says_how_it_differs_and_when_to_use_it(name: str) -> None:
    kind = ALGORITHMS[name]
    assert (kind.__doc__ or "").startswith("Differs from FedAvg: ")
    assert 20 < len(kind.when) < 90
    assert "\n" not in (kind.__doc__ or "") + kind.when


def test_what_travels_and_what_is_kept() -> None:
    variate, pair = ("variate",), ("curvature", "weighted")
    assert cost_of(FedAvg()) == Cost((), (), (), (), 1, 1)
    assert cost_of(SCAFFOLD()) == Cost(variate, ("variate_change",), variate, variate, 2, 1)
    assert cost_of(FedGG()) == Cost((), (), ("received",), (), 1, 1)
    assert cost_of(FedGG(direction="sent")) == Cost(("update",), (), (), ("update",), 1.5, 1)
    assert cost_of(FedAdam()) == Cost((), (), (), ("momentum", "squares"), 1, 1)
    assert cost_of(FedCM()) == Cost(("pace",), ("reach (number)",), (), ("pace",), 1.5, 1)
    assert cost_of(FedACG()) == Cost((), (), (), ("velocity",), 1, 1)
    assert cost_of(FedDyn()) == Cost((), (), ("moved",), ("moved",), 1, 1)
    assert cost_of(FedCL()) == Cost(("fisher",), (), (), (), 1.5, 1)
    assert cost_of(MOON()) == Cost((), (), ("previous",), (), 1, 1 + 2 / 3)
    kept = ("curvature", "until (number)", "weighted")
    assert cost_of(FedCurv()) == Cost(pair, pair, kept, pair, 3, 1.2)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_bytes_are_those_a_run_counts(name: str) -> None:
    def counted(algorithm: str) -> float:
        proxy = 20 if ALGORITHMS[name].needs_proxy else 0
        given: dict[str, Any] = {"split": {"clients": 3}, "model": {"name": "mlp", "hidden": 8}}
        federation = build(Experiment(algorithm={"name": algorithm}, data={"proxy": proxy}, **given))
        _, record = play_round(federation, begin(federation), Loop())
        return float(record["bytes_down"] + record["bytes_up"])

    assert counted(name) / counted("fedavg") == pytest.approx(cost_of(ALGORITHMS[name]()).bytes, abs=0.01)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_tables_fit(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=text, width=columns, highlight=False))
    list_parts(None)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    head = next(line.split() for line in lines if line.split()[-2:] == ["bytes", "work"])  # nothing is cut off
    assert head[0] == "name"
    assert [line.split()[-2:] for line in lines if line.split()[:1] == ["moon"]][-1] == ["1", "1.67"]


def told(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    text = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=text, width=140, highlight=False))
    list_parts(name)
    return text.getvalue()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_algorithm_in_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, kind = told(name, monkeypatch), ALGORITHMS[name]
    said = " ".join(text.split())
    assert (sys.modules[kind.__module__].__doc__ or "").strip() in text  # its equation as it stands
    assert " ".join((kind.__doc__ or "").split()) in said
    assert f"When to use it: {kind.when}." in said
    for field in fields(kind):
        assert f"algorithm.{field.name} {field.default} " in said
        assert str(field.metadata["origin"]).split()[0] in said
    assert f"{cost_of(kind()).bytes:g} {cost_of(kind()).arithmetic:.3g}" in said
    assert f"To run it: fedgg run --algorithm {name}" in text


def test_choices_that_change_the_price_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(told("FedGG", monkeypatch).split())  # also as its paper spells it
    assert "direction=sent down: update server: update 1.5 1" in text
    assert "first_step=push" not in text
    assert "plain, exact, after)" in told("scaffold", monkeypatch)
    assert "with variate_mean=uniform, equally" in told("scaffold", monkeypatch)
    assert "--set data.proxy=" in told("fedcl", monkeypatch)


def test_an_algorithm_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[3] / "examples" / "my_algorithm.py"
    assert "algorithm.radius" in told(f"{example}:MyAlgorithm", monkeypatch)
    own = tmp_path / "broken.py"
    own.write_text(example.read_text().replace("return {", "raise ZeroDivisionError('odd')\n        return {"))
    with pytest.raises(UserError, match=r"cannot run two rounds \(ZeroDivisionError: odd\): see `fedgg check"):
        told(f"{own}:MyAlgorithm", monkeypatch)
    with pytest.raises(UserError, match="unknown algorithm, part or setting 'fedag': did you mean 'fedavg'"):
        told("fedag", monkeypatch)


def test_one_part_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, registry in _registries().values():
        for name, description in registry.descriptions().items():
            text = " ".join(told(name, monkeypatch).split())
            assert f"{name}: {registry.kind} {description}" in text
            assert f"={name}" in text
            assert "not documented" not in text, name


def test_help_names_every_kind_of_parts() -> None:
    text = " ".join((list_parts.__doc__ or "").split())
    assert [title for title in ("algorithms", *_registries()) if title not in text] == []


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("algorithms", "algorithms"),
        ("metrics", "metrics"),
        ("task", "tasks"),
        ("Models", "models"),
        ("data sets", "data sets"),
        ("datasets", "data sets"),
        ("data", "data sets"),
        ("splits", "splits"),
        ("optimisers", "client optimisers"),
        ("learning-rate schedules", "learning-rate schedules"),
        ("rules", "aggregation rules"),
        ("engines", "engines"),
    ],
)
def test_a_kind_of_parts(name: str, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = told(name, monkeypatch)
    parts: Registry[Any] = ALGORITHMS if title == "algorithms" else _registries()[title][1]
    assert text.startswith(title)
    assert [part for part in parts if not re.search(rf"^ +{part} ", text, re.M)] == []


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("stop", ["stop.metric", "stop.patience", "stop.min_delta", "stop.target"]),
        ("local.batch", ["local.batch"]),
        ("rounds", ["rounds"]),
    ],
)
def test_a_section_or_a_setting(name: str, keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(re.findall(r"^ +(\w+\.\w+|rounds) ", told(name, monkeypatch), re.M)) == set(keys)


def test_an_unknown_setting_is_answered_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"unknown algorithm, part or setting 'local.batc': did you mean 'local.batch'"):
        told("local.batc", monkeypatch)
    with pytest.raises(UserError, match="did you mean 'adamw'"):
        Experiment(optimiser={"name": "AdamW"})


cached_digits = cache(load_digits)


def fitting_data(part: str, changes: dict[str, Any]) -> Any:
    """The data of the advised command, arrays in the place of files."""
    rng = np.random.default_rng(0)
    values = {"multilabel": rng.integers(0, 2, (1000, 3)), "regression": rng.normal(size=1000)}
    owners = np.arange(1000) % 10
    match changes.get("data.source", "digits"):
        case "digits":
            return cached_digits()
        case "cifar10":
            return (
                rng.normal(size=(1000, 3, 32, 32)),
                np.arange(1000) % 10,
                rng.normal(size=(10, 3, 32, 32)),
                np.arange(10),
            )
        case "shakespeare":
            tokens = rng.integers(0, 65, (1000, 80))
            return tokens, tokens, tokens[:10], tokens[:10], owners
        case "npz:FILE":
            y = values.get(changes.get("task.name", ""), np.arange(1000) % 4)
            return rng.normal(size=(1000, 5)), y, rng.normal(size=(20, 5)), y[:20], owners
    raise AssertionError(f"{part} is advised with data of which there are none here")


def test_the_advised_commands_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of data sets, which need their files, and of engines that need a GPU, as far as settings are checked."""
    for _, registry in _registries().values():
        for name in registry:
            advice = " ".join(told(name, monkeypatch).split()).split("To run it: fedgg run ")
            for command in advice[1:]:
                options = re.findall(r"--set ([\w.]+)=(\S+)", command.partition(" learning-rate")[0])
                assert options, name
                changes = dict(options)
                experiment = Experiment().changed(changes)
                if name in (*DATASETS, "streams", "devices") and name != "shakespeare":
                    continue
                given = fitting_data(name, changes)
                if isinstance(given, tuple) and changes.get("split.scheme") not in ("given", "domains"):
                    given = given[:4]
                build(with_given_clients(experiment, given), data=given)


def test_the_settings_of_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(name: str) -> dict[str, list[str]]:
        rows = [line.split() for line in told(name, monkeypatch).splitlines()]
        return {row[0]: row[1:] for row in rows if row and re.fullmatch(r"[a-z]+\.\w+", row[0])}

    assert settings("trimmed_mean")["robust.trim"][:4] == ["0.2", "share", "of", "the"]
    assert settings("norm_clip").keys() == {"robust.clip"}
    assert settings("median") == settings("digits") == {}
    assert settings("dirichlet").keys() == {"split.beta"}
    assert settings("mlp")["model.hidden"][0] == "512"
    assert settings("workers").keys() >= {"engine.workers"}
    with pytest.raises(UserError, match="unknown algorithm, part or setting 'medain': did you mean 'median'"):
        told("medain", monkeypatch)
