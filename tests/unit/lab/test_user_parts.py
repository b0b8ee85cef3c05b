"""Data sets, splits, aggregation rules and engines from a user's file: checked, run, recorded and resumed."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedgg.aggregation import RULES
from fedgg.data import SPLITS
from fedgg.engines import ENGINES
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment, described_settings, load_experiment
from fedgg.lab.federated_data import load_data
from fedgg.lab.local_optimiser import optimiser_of
from fedgg.lab.name_resolution import check_parts
from fedgg.lab.observer import Observer
from fedgg.lab.runner import run
from fedgg.lab.study import Study, run_study
from fedgg.lab.trusted_code import code_at, trust
from fedgg.older_python import tomllib

EXAMPLE = Path(__file__).parents[3] / "examples" / "my_parts.py"
PARTS = {
    "optimiser.name": "my_parts.py:SignSGD",
    "optimiser.decay": 0.5,
    "data.source": "my_parts.py:two_moons",
    "split.scheme": "my_parts.py:by_size",
    "split.ratio": 1.5,
    "robust.rule": "my_parts.py:GeometricMedian",
    "robust.iterations": 4,
    "engine.name": "my_parts.py:Reversed",
}
SMALL = Experiment(rounds=2, split={"clients": 4}, local={"epochs": 1, "batch": 32}, model={"name": "mlp", "hidden": 4})
OWN = SMALL.changed(PARTS)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLE, "my_parts.py")


def test_a_run_of_users_parts_is_recorded_and_resumed_to_the_same_bits() -> None:
    with pytest.raises(UserError, match=r"--trust my_parts\.py"):
        run(OWN, out="refused")
    assert not Path("refused").exists()
    trust("my_parts.py")
    run(OWN, out="resumed")
    run(load_experiment(Path("resumed/config.toml")).changed({"rounds": 4}), out="resumed")
    run(OWN.changed({"rounds": 4}), out="whole")
    one, two = (load_file(f"{folder}/model.safetensors") for folder in ("resumed", "whole"))
    assert all(torch.equal(one[name], two[name]) for name in two)
    versions = json.loads(Path("whole/versions.json").read_text())
    assert versions["code_files"].keys() == {"optimiser", "data", "split", "robust", "engine"}
    assert {file["sha256"] for file in versions["code_files"].values()} == {code_at("my_parts.py").sha256}
    assert {part for part, code in versions["code"].items() if code} == {"robust", "engine"}
    sizes = [sum(counts) for counts in json.loads(Path("whole/partition.json").read_text())["counts"]]
    assert sum(sizes) == 600
    assert [round(b / a, 1) for a, b in pairwise(sizes)] == [1.5] * 3


def test_an_engine_that_trains_as_the_reference_has_its_bits() -> None:
    trust("my_parts.py")
    engines = [run(OWN.changed({"engine.name": name})).weights for name in (PARTS["engine.name"], "loop")]
    assert all(torch.equal(tensor, engines[1][name]) for name, tensor in engines[0].items())


def test_a_schedule_of_ones_own_has_its_rates_and_is_not_continued_with_other_rounds() -> None:
    """It may read the number of rounds."""
    trust("my_parts.py")
    scheduled = SMALL.changed({"schedule.name": "my_parts.py:inverse_root", "schedule.offset": 2})
    rates = [optimiser_of(scheduled, round_).values["lr"] / SMALL.local.lr for round_ in range(3)]
    assert rates == pytest.approx([1, (2 / 3) ** 0.5, 0.5**0.5])
    run(scheduled, out="run")
    with pytest.raises(UserError, match=r"rounds = 2 there, 4 here"):
        run(scheduled.changed({"rounds": 4}), out="run")


def test_names_and_settings_are_part_of_the_identity() -> None:
    """Without loading any of the code, which is not allowed here."""
    others = [OWN.changed({key: f"{value}2" if isinstance(value, str) else 2.0}) for key, value in PARTS.items()]
    assert len({one.hash() for one in (OWN, *others)}) == 1 + len(PARTS)
    assert len({one.trajectory() for one in (OWN, *others)}) == 1 + len(PARTS)
    Path("config.toml").write_text(OWN.to_toml())
    assert load_experiment(Path("config.toml")) == OWN
    assert OWN.changed({"split.scheme": "iid"}).split.settings == {}
    assert OWN.changed({"robust.rule": "median"}).robust == Experiment(robust={"rule": "median"}).robust


def test_settings_of_a_data_set_are_its_arguments_and_part_of_the_identity() -> None:
    Path("sized.py").write_text(
        "import numpy as np\n"
        "def made(size: int, shift: float = 0.0) -> tuple:\n"
        "    x, y = np.arange(size * 2.0).reshape(size, 2) + shift, np.arange(size) % 2\n"
        "    return x, y, x, y\n"
    )
    trust("sized.py")
    own = SMALL.changed(
        {"data.source": "sized.py:made", "data.size": 40, "data.shift": 0.5, "split.scheme": "iid", "local.batch": 8}
    )
    dataset = load_data(own.data)
    assert len(dataset.x_train) == 40
    assert float(dataset.x_train[0, 0]) == 0.5
    assert Experiment(**tomllib.loads(own.to_toml())) == own
    other, without = own.changed({"data.size": 60}), own.changed({"data.holdout": 0.2})
    assert own.hash() != other.hash()
    assert own.data.data_set == without.data.data_set != other.data.data_set
    assert own.changed({"data.source": "digits"}).data.settings == {}
    together = own.changed({"engine.name": "stacked"})  # runs that share their data in memory
    study = Study(together, {"small": {}, "large": {"data.size": 60}}, seeds=(0,), reference="small")
    run_study(study, Path("study"), processes=1, observer=Observer())
    sizes = {path.parent.parent.name: np.load(path)["sizes"].sum() for path in Path("study").rglob("partition.npz")}
    assert sizes == {"small": 40, "large": 60}


def test_settings_of_registered_data_sets() -> None:
    assert Experiment(data={"source": "cifar100", "labels": "coarse"}).data.settings == {"labels": "coarse"}
    for settings, words in (
        ({"source": "digits", "labels": "coarse"}, "data.labels is a setting of cifar100: leave it out"),
        ({"source": "cifar100", "lables": "coarse"}, "'data.lables': did you mean 'data.labels'?"),
        ({"source": "mnist", "length": 3}, "data.length is a setting of shakespeare: leave it out"),
        ({"source": "cifar100", "folder": "x"}, "'data.folder'"),
        ({"source": "npz:x.npz", "path": "x"}, "'data.path'"),
        ({"normalize": "none"}, "'data.normalize': did you mean 'data.normalise'?"),
    ):
        with pytest.raises(UserError) as caught:
            Experiment(data=settings)
        assert words in str(caught.value)
    described = {key: row for key, *row in described_settings()}
    assert described["data.length"] == ["80", "shakespeare: characters of a sequence"]
    with pytest.raises(UserError, match=r"data\.labels = 1: must be text"):
        check_parts(Experiment(data={"source": "cifar100", "labels": 1}))
    with pytest.raises(UserError, match="unknown data set 'cifar'"):
        check_parts(Experiment(data={"source": "cifar", "labels": "coarse"}))


ODD = """
from pathlib import Path
from os import system
from numpy import split
from dataclasses import dataclass
from fedgg.core.server import Collector
from fedgg.data.split_schemes import iid
def load() -> tuple:
    return 1, 2
def fails() -> tuple:
    raise KeyError("nowhere")
def unannotated():
    Path("CALLED").touch()
def number() -> int:
    Path("CALLED").touch()
def demanding(where: str) -> tuple:
    Path("CALLED").touch()
def no_labels(clients, where):
    Path("CALLED").touch()
def by_ward(labels, clients, wards: int):
    raise KeyError(wards)
def twice(labels, clients):
    return [range(len(labels))] * clients
class Other:
    def __init__(self, **settings):
        Path("CALLED").touch()
class Half(Other):
    def train(self, job): ...
class Needy(Half):
    def __init__(self, cores):
        Path("CALLED").touch()
    def score(self, looks): ...
@dataclass(frozen=True)
class Rule(Collector):
    depth: int
instance = Rule(1)
"""


@pytest.mark.parametrize(
    ("key", "name", "settings", "words"),
    [
        ("data.source", "load", {}, "data must be (x_train, y_train, x_test, y_test)"),
        ("data.source", "fails", {}, "cannot be loaded: KeyError: 'nowhere'"),
        ("data.source", "unannotated", {}, "annotated to return a tuple"),
        ("data.source", "number", {}, "annotated to return a tuple"),
        ("data.source", "Other", {}, "annotated to return a tuple"),
        ("data.source", "system", {}, "annotated to return a tuple"),
        ("data.source", "demanding", {}, "a parameter 'where' without a value"),
        ("data.source", "demanding", {"data.wher": "x"}, "no setting 'wher': did you mean 'data.where'?"),
        ("data.source", "demanding", {"data.where": 3}, "data.where = 3: must be text"),
        ("data.source", "demanding", {"data.where": "x", "data.folder": "y"}, "no setting 'folder'"),
        ("data.source", "nosuch", {}, "odd.py has no 'nosuch'"),
        ("split.scheme", "no_labels", {"split.where": "x"}, "the parameters `labels` and `clients`"),
        ("split.scheme", "split", {}, "must be a function of odd.py"),
        ("split.scheme", "iid", {}, "must be a function of odd.py"),
        ("split.scheme", "Other", {}, "must be a function of odd.py"),
        ("split.scheme", "by_ward", {}, "a parameter 'wards' without a value"),
        ("split.scheme", "by_ward", {"split.wads": 3}, "no setting 'wads': did you mean 'split.wards'?"),
        ("split.scheme", "by_ward", {"split.wards": "many"}, "split.wards = 'many': must be a whole number"),
        ("split.scheme", "by_ward", {"split.wards": 3}, "failed: KeyError: 3"),
        ("split.scheme", "twice", {}, "every example goes to exactly one client"),
        ("robust.rule", "Other", {"robust.x": 1}, "must be a subclass of fedgg.core.server.Collector"),
        ("robust.rule", "instance", {}, "must be a subclass"),
        ("robust.rule", "Rule", {}, "a parameter 'depth' without a value"),
        ("robust.rule", "Rule", {"robust.dept": 1}, "no setting 'dept': did you mean 'robust.depth'?"),
        ("robust.rule", "Rule", {"robust.depth": 0.5}, "robust.depth = 0.5: must be a whole number"),
        ("robust.rule", "Rule", {"robust.depth": 1, "robust.trim": 0.1}, "no setting 'trim'"),
        ("engine.name", "Half", {}, "a class with the methods train and score"),
        ("engine.name", "Needy", {}, "a parameter 'cores' without a value"),
        ("engine.name", "unannotated", {}, "a class with the methods train and score"),
    ],
)
def test_what_is_no_such_part_is_refused_and_not_called(
    key: str, name: str, settings: dict[str, Any], words: str
) -> None:
    Path("odd.py").write_text(ODD)
    trust("odd.py")
    with pytest.raises(UserError) as caught:
        build(SMALL.changed({key: f"odd.py:{name}", **settings}))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("CALLED").exists()


@pytest.mark.parametrize("key", ["data.source", "split.scheme", "robust.rule", "engine.name"])
def test_a_study_is_refused_before_its_first_run(key: str) -> None:
    Path("odd.py").write_text(ODD)
    variants: dict[str, dict[str, Any]] = {"a": {}, "b": {key: "odd.py:Other"}}
    with pytest.raises(UserError, match=r"--trust odd\.py"):
        Study(SMALL, variants, (0,), "a")
    trust("odd.py")
    with pytest.raises(UserError, match="must be"):
        Study(SMALL, variants, (0,), "a")
    assert not Path("CALLED").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine.name": "lop"}, "engine.name = 'lop': did you mean 'loop'?"),
        ({"engine.name": "Stacked"}, "did you mean 'stacked'?"),
        ({"engine.name": "zzz"}, "choose from auto, loop, "),
        ({"engine.name": "mine.py"}, "name the class too, as in mine.py:MyClass"),
        ({"split.scheme": "mine.py"}, "name the function too, as in mine.py:my_function"),
        ({"split.scheme": "dirichlet-client"}, "did you mean 'dirichlet_client'?"),
        ({"split.betta": 1}, "unknown key 'split.betta': did you mean 'split.beta'?"),
        ({"robust.rule": "trimmed"}, "did you mean 'trimmed_mean'?"),
        ({"robust.rule": "median", "robust.tirm": 0.1}, "unknown key 'robust.tirm': did you mean 'robust.trim'?"),
        ({"robust.rule": 3}, "robust.rule = 3: input should be a valid string"),
    ],
)
def test_unknown_names_meet_their_neighbours(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        SMALL.changed(changes)
    assert words in str(caught.value)


def test_registered_names_are_parts() -> None:
    for key, registry in (("engine.name", ENGINES), ("split.scheme", SPLITS), ("robust.rule", RULES)):
        for name in registry:
            device = {"streams": "cuda", "devices": "cpu,cpu"}.get(name, "cpu")
            check_parts(SMALL.changed({key: name, "engine.device": device}))
