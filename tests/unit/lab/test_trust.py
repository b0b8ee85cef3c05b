"""Which code a name in an experiment may run: found without running it, allowed by the user, checked before a call."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedgg
from fedgg.errors import UserError
from fedgg.lab import trusted_code as trust
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.name_resolution import build_model, check_code, model_maker
from fedgg.lab.runner import run

NET = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, classes))
"""
SMALL = Experiment(rounds=1, split={"clients": 2}, local={"epochs": 1, "batch": 16}, algorithm={"name": "fedavg"})


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    return tmp_path / "net.py"


def refused(place: str = "net.py", doubt: str = "") -> str:
    with pytest.raises(UserError) as caught:
        trust.check_trusted(trust.code_at(place), doubt)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_refusal_says_what_would_run_and_the_option_that_allows_it(file: Path) -> None:
    said = refused()
    assert str(file) in said
    assert trust.code_at("net.py").sha256 in said
    assert "--trust net.py" in said
    assert "fedgg.trust('net.py')" in said
    assert f"FEDGG_TRUST={file}" in said


def test_the_same_content_in_the_same_place_is_allowed_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust.trust("net.py")
    trust.check_trusted(trust.code_at("net.py"))
    monkeypatch.setattr(trust, "_trusted", set())  # as in another call
    assert trust.check_trusted(trust.code_at("./net.py")) == trust.BEFORE
    refused(doubt="it has changed")
    Path("copy.py").write_text(NET)
    refused("copy.py")
    file.write_text(f"{NET}\n")
    refused()


def test_a_record_that_others_can_write_allows_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust.trust("net.py")
    trust.check_trusted(trust.code_at("net.py"))
    monkeypatch.setattr(trust, "_trusted", set())
    record = trust.record_file()
    assert record is not None
    assert record.stat().st_mode & 0o777 == 0o600
    record.chmod(0o666)
    refused()


def test_the_environment_allows_files_by_full_path_and_packages(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGG_TRUST", os.pathsep.join([str(file), "torch"]))
    assert trust.check_trusted(trust.code_at("net.py")) == "FEDGG_TRUST"
    assert trust.check_trusted(trust.code_at("torch.nn.modules.linear")) == "FEDGG_TRUST"
    refused(doubt="it has changed")
    refused("numpy")
    monkeypatch.setenv("FEDGG_TRUST", "net.py")
    with pytest.raises(UserError, match="full path"):
        trust.check_trusted(trust.code_at("net.py"))
    monkeypatch.setenv("FEDGG_TRUST", "tor")  # the beginning of a name is another name
    refused("torch")


def test_processes_started_by_this_one_may_run_what_it_may(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trust.environment_for_children() == {}
    monkeypatch.setenv("FEDGG_TRUST", "torch")
    trust.trust("net.py")
    assert trust.environment_for_children() == {"FEDGG_TRUST": f"torch{os.pathsep}{file}"}


def test_a_question_is_one_line_and_its_answer_is_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def no(question: str) -> bool:
        heard.append(question)
        return False

    trust.ask_with(no)
    refused()
    assert str(file) in heard[0]
    assert trust.code_at("net.py").sha256 in heard[0]
    trust.ask_with(lambda question: True)
    assert trust.check_trusted(trust.code_at("net.py"), "it has changed") == trust.IN_THIS_CALL
    monkeypatch.setattr(trust, "_trusted", set())
    trust.ask_with(None)
    trust.check_trusted(trust.code_at("net.py"))


def test_a_module_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "unimported" / "inner"
    folder.mkdir(parents=True)
    for file in (folder.parent / "__init__.py", folder / "__init__.py", folder / "nets.py"):
        file.write_text("raise SystemExit('it was imported')")
    found = trust.code_at("unimported.inner.nets")
    assert found.path == folder / "nets.py"
    assert not [name for name in sys.modules if name.startswith("unimported")]
    refused("unimported.inner.nets")
    with pytest.raises(UserError, match="cannot be imported"):
        trust.code_at("unimported.none.nets")


@pytest.mark.parametrize(
    "place",
    ["", ".", "..", "a..b", "-x", "a b", "\x1b[31m.py", "a\n.py", "\udcff.py", "\0.py", "x" * 5000 + ".py", "/dev/zero",
     "__main__", "os", "os.path", "builtins", "subprocess", "importlib", "antigravity", "nosuchmodule"],
)  # fmt: skip
def test_no_name_is_more_than_a_name(place: str) -> None:
    with pytest.raises(UserError) as caught:
        trust.code_at(place)
    assert str(caught.value).isprintable()


def test_a_folder_a_pipe_and_an_endless_file_are_no_code(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    with (tmp_path / "long.py").open("wb") as file:
        file.truncate(1 << 40)
    for name in ("folder.py", "pipe.py", "long.py"):
        with pytest.raises(UserError):
            trust.code_at(str(tmp_path / name))


MAKERS = """
from torch import nn
from torch.hub import load
class Net(nn.Linear):
    pass
class Other:
    def __init__(self, **settings):
        open("CALLED", "w")
def annotated(classes: int) -> nn.Module:
    return nn.Linear(64, classes)
def own(classes: int) -> "Net":
    return Net(64, classes)
def plain(**settings):
    open("CALLED", "w")
def number() -> int:
    open("CALLED", "w")
def odd() -> "NoSuchName":
    open("CALLED", "w")
instance, value = Net(1, 1), 3
"""


@pytest.mark.parametrize("name", ["Net", "annotated", "own"])
def test_what_makes_a_model(name: str, file: Path) -> None:
    file.write_text(MAKERS)
    trust.trust(file)
    settings = {"in_features": 64, "out_features": 10} if name == "Net" else {}
    assert isinstance(build_model(f"net.py:{name}", settings, (1, 8, 8), 10, 0), nn.Linear)


@pytest.mark.parametrize("name", ["Other", "plain", "number", "odd", "load", "nn", "instance", "value"])
def test_nothing_else_is_called(name: str, file: Path) -> None:
    file.write_text(MAKERS)
    trust.trust(file)
    with pytest.raises(UserError, match=r"must be a subclass of torch\.nn\.Module"):
        build_model(f"net.py:{name}", {"repo_or_dir": "x", "model": "y"}, (1, 8, 8), 10, 0)
    assert not Path("CALLED").exists()


def test_a_function_of_another_package_makes_no_model(file: Path) -> None:
    """Though it is annotated: what was allowed is the named file, or package."""
    file.write_text("from torch.nn.utils.parametrizations import orthogonal\n")
    trust.trust(file, "torch.nn")
    with pytest.raises(UserError, match="must be a subclass"):
        model_maker("net.py:orthogonal")
    assert model_maker("torch.nn.utils.parametrizations:orthogonal").__name__ == "orthogonal"


def test_the_run_folder_says_which_code_it_ran(file: Path, tmp_path: Path) -> None:
    experiment = SMALL.changed({"model.name": "net.py:Net"})
    with pytest.raises(UserError, match="--trust"):
        run(experiment, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    fedgg.trust("net.py")
    run(experiment, out=tmp_path / "run")
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    sha256 = trust.code_at("net.py").sha256
    assert versions["code_files"] == {"model": {"path": "net.py", "sha256": sha256, "allowed": "this call"}}
    run(SMALL, model=nn.Linear(64, 10), data=_flat(), out=tmp_path / "handed in")  # objects: nothing is asked
    assert "code_files" not in json.loads((tmp_path / "handed in" / "versions.json").read_text())


def _flat() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(80, 64), torch.arange(80) % 10, torch.randn(20, 64), torch.arange(20) % 10


def test_from_python_names_are_checked_wherever_they_come_from(file: Path, tmp_path: Path) -> None:
    (tmp_path / "received.toml").write_text('[model]\nname = "net.py:Net"\n')
    for experiment in (load_experiment(tmp_path / "received.toml"), Experiment(model={"name": "net.py:Net"})):
        for ask in (lambda: run(experiment), lambda: check_code(experiment)):  # noqa: B023 (called at once)
            with pytest.raises(UserError, match=r"fedgg\.trust\('net\.py'\)"):
                ask()
    with pytest.raises(UserError, match=r"fedgg\.trust\('net\.py'\)"):
        run(algorithm="net.py:Mine")
    with pytest.raises(UserError, match="handed in as an object"):
        run(Experiment(model={"name": "python:Net"}))


def test_a_mistake_in_what_is_trusted(file: Path) -> None:
    for place, word in (("nosuch.py", "no file"), ("a b", "FILE.py or a package"), ("", "FILE.py or a package")):
        with pytest.raises(UserError, match=word):
            trust.trust(place)
    trust.trust("net.py:Net")  # with its class it is the same file
    trust.check_trusted(trust.code_at("net.py"))
