"""The app that `fedgg flower new` writes: Flower builds it, and no file is overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgg.older_python import tomllib

pytest.importorskip("flwr")

import fedgg
from fedgg.cli import app as fedgg_app
from fedgg.cli import terminal
from fedgg.errors import UserError
from fedgg.flower.app_project import AppNames, new_app, with_full_paths
from fedgg.lab.config import Experiment, load_experiment

EXPERIMENT = Experiment(rounds=2, split={"clients": 3}, algorithm={"name": "scaffold"})


def test_flower_builds_it_with_the_experiment_inside(tmp_path: Path) -> None:
    new_app(tmp_path / "my-app", EXPERIMENT, tmp_path / "runs")
    flwr = Path(sys.executable).with_name("flwr")
    environment = os.environ | {"FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
    environment["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    built = subprocess.run(
        [flwr, "build", "--app", "my-app"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (bundle,) = tmp_path.glob("*.fab")
    names = zipfile.ZipFile(bundle).namelist()
    assert {"my_app/client_app.py", "my_app/server_app.py", "my_app/experiment.toml"} <= set(names)


def test_it_has_the_experiment_and_every_setting(tmp_path: Path) -> None:
    names = new_app(tmp_path / "trial", EXPERIMENT, Path("runs/trial"))
    assert load_experiment(tmp_path / "trial" / names.package / "experiment.toml") == EXPERIMENT
    whole = tomllib.loads((tmp_path / "trial" / "pyproject.toml").read_text())
    assert whole["project"]["dependencies"] == [], "Flower would install them anew for every run"
    project = whole["tool"]["flwr"]["app"]
    assert set(project["config"]) == {
        "out",
        "data",
        "deadline",
        "wait",
        "attempts",
        "min_clients",
        "max_examples",
        "track",
    }
    assert Path(project["config"]["out"]) == Path("runs/trial").absolute()
    readme = (tmp_path / "trial" / "README.md").read_text()
    assert "num-supernodes=3" in readme
    assert all(f"`{key}`" in readme for key in project["config"])


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("years of work")
    with pytest.raises(UserError, match="mine exists and is not empty"):
        new_app(tmp_path / "mine", EXPERIMENT, tmp_path / "runs")
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("folder", "project", "package"),
    [
        ("my-app", "my-app", "my_app"),
        ("Digits run_2", "digits-run-2", "digits_run_2_app"),
        ("2nd", "app-2nd", "app_2nd_app"),
        ("torch", "torch", "torch_app"),
        ("a" * 50, "a" * 32, "a" * 32 + "_app"),
    ],
)
def test_names_that_flower_and_python_accept(folder: str, project: str, package: str) -> None:
    assert AppNames.of(Path(folder)) == AppNames(project, package)


def test_files_are_found_from_everywhere() -> None:
    named = Experiment(
        data={"source": "npz:mine.npz"},
        model={"name": "nets.py:Mine", "width": 3, "start": "first.safetensors"},
        algorithm={"name": "rules.py:Own", "mu": 0.5},
        split={"scheme": "splits.py:by_ward", "wards": 4, "clients": 3},
        robust={"rule": "rules.py:Rule", "trim": 0.1, "depth": 2},
        engine={"name": "engines.py:Mine", "threads": 2},
    )
    here, full = Path.cwd(), with_full_paths(named)
    assert full.data.source == f"npz:{here / 'mine.npz'}"
    assert full.model.name == f"{here / 'nets.py'}:Mine"
    assert full.model.settings == {"width": 3}
    assert full.model.start == str(here / "first.safetensors")
    assert full.algorithm.name == f"{here / 'rules.py'}:Own"
    assert full.algorithm.settings == {"mu": 0.5}
    assert full.split == named.split.model_copy(update={"scheme": f"{here / 'splits.py'}:by_ward"})
    assert full.robust is not None
    assert (full.robust.rule, full.robust.rule_settings) == (f"{here / 'rules.py'}:Rule", {"trim": 0.1, "depth": 2})
    assert (full.engine.name, full.engine.threads) == (f"{here / 'engines.py'}:Mine", 2)
    assert with_full_paths(EXPERIMENT) == EXPERIMENT
    folder = EXPERIMENT.changed({"data.source": "hf:./mine", "data.client": "who", "data.proxy": 3})
    assert with_full_paths(folder) == folder.changed({"data.source": f"hf:{here / 'mine'}", "data.client": "who"})
    hub = EXPERIMENT.changed({"data.source": "hf:ylecun/mnist", "data.size": 8})
    assert with_full_paths(hub) == hub
    code = EXPERIMENT.changed({"data.source": "mine.py:made", "data.size": 8})
    assert with_full_paths(code).data.settings == {"size": 8}


def test_the_readme_says_what_nodes_must_allow(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("from torch import nn\nclass Mine(nn.Linear): ...\n")
    named = EXPERIMENT.changed({"model.name": f"{tmp_path / 'nets.py'}:Mine"})
    with pytest.raises(UserError, match="--trust"):
        new_app(tmp_path / "app", named, tmp_path / "run")
    assert not (tmp_path / "app").exists()
    fedgg.trust(tmp_path / "nets.py")
    new_app(tmp_path / "app", named, tmp_path / "run")
    assert f"export FEDGG_TRUST={tmp_path / 'nets.py'}\n" in (tmp_path / "app" / "README.md").read_text()


def test_the_command_says_how_to_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("experiment.toml").write_text(EXPERIMENT.to_toml())
    with terminal.console.capture() as heard:
        said = CliRunner().invoke(fedgg_app, ["flower", "new", "trial", "experiment.toml"])
    assert said.exit_code == 0, said.output
    assert "flwr run trial" in heard.get() + said.output
