"""Folders that came from elsewhere: nothing is written through a link in them, and none takes the others down."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from calling import call
from observers import Callbacks

from fedgg.lab.config import Experiment
from fedgg.lab.runner import run

ROUNDS = 3


def experiment(rounds: int = ROUNDS) -> Experiment:
    return Experiment(
        rounds=rounds,
        split={"clients": 3},
        local={"epochs": 1},
        model={"name": "linear"},
        algorithm={"name": "scaffold"},
        server={"memory_limit_mb": 0},  # so that there are *.slots
    )


class Stop(Exception):
    pass


def _stop(record: dict[str, object]) -> None:
    if record["round"] == ROUNDS - 1:
        raise Stop


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("received") / "run"
    with pytest.raises(Stop):
        run(experiment(), out=folder, observer=Callbacks(round=_stop))
    return folder


@pytest.fixture
def received(unfinished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unfinished, tmp_path / "run"))


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    file = tmp_path / "elsewhere" / "precious"
    file.parent.mkdir()
    file.write_text("precious")
    return file


REPLACED = ("config.toml.tmp", "summary.json", "summary.json.tmp", "model.safetensors.tmp", "curves.png", "split.png",
            "checkpoint/000003.safetensors", "checkpoint/000003.safetensors.tmp", "rounds.jsonl.tmp")  # fmt: skip
REFUSED = ("rounds.jsonl", "resumes.jsonl", "lock", "checkpoint/client-memory.slots", "checkpoint")


def test_resume_replaces_links(received: Path, precious: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REPLACED:  # one of them leads nowhere, and a file would appear there
        (received / name).symlink_to(precious.with_name("absent") if name == "summary.json" else precious)
    code, _, errors = call(["resume", str(received)], monkeypatch)
    assert code == 0, errors
    assert [file.name for file in precious.parent.iterdir()] == ["precious"]
    assert precious.read_text() == "precious"
    for name in REPLACED:
        assert name.endswith(".tmp") or not (received / name).is_symlink()


@pytest.mark.parametrize(
    ("name", "link"), [*((name, "symbolic link") for name in REFUSED), *((name, "hard link") for name in REFUSED[:-1])]
)
def test_resume_refuses_links_that_it_would_write_through(
    name: str, link: str, received: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = precious.parent if name == "checkpoint" else precious
    if (received / name).is_dir():
        shutil.move(received / name, target / "moved")
        target = target / "moved"
    elif (received / name).exists():
        shutil.move(received / name, precious)
    before = {file: file.read_bytes() for file in precious.parent.rglob("*") if file.is_file()}
    if link == "hard link":
        (received / name).hardlink_to(target)
    else:
        (received / name).symlink_to(target)
    code, _, errors = call(["resume", str(received)], monkeypatch)
    assert {file: file.read_bytes() for file in precious.parent.rglob("*") if file.is_file()} == before
    if name == "rounds.jsonl":  # its history is read, and the first write puts a file in its place
        assert code == 0, errors
        assert not (received / name).is_symlink()
        return
    assert code == 2, errors
    assert Path(name).name in errors
    assert link in errors


def test_report_writes_through_no_link(
    received: Path, precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("report.html", "report.html.tmp", "tables/accuracy.md", "tables/accuracy.md.tmp"):
        (received / name).parent.mkdir(exist_ok=True)
        (received / name).symlink_to(precious)
    code, _, errors = call(["report", str(received), "--tables", str(received / "tables")], monkeypatch)
    assert code == 0, errors
    assert precious.read_text() == "precious"
    assert "<!doctype html>" in (received / "report.html").read_text()


def test_a_comparison_with_a_linked_row_is_refused(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--algorithm", "fedavg", "--rounds", "1", "--model", "linear", "--set", "local.epochs=1"]
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "fedavg").symlink_to(precious.parent)
    code, _, errors = call(["compare", *words, "--seeds", "0", "--out", str(tmp_path / "study")], monkeypatch)
    assert code == 2, errors
    assert "fedavg is a symbolic link" in errors
    assert list(precious.parent.iterdir()) == [precious]
    (tmp_path / "study" / "fedavg").unlink()
    (tmp_path / "linked").symlink_to(tmp_path / "study")  # the folder that the user names may be one
    code, _, errors = call(["compare", *words, "--seeds", "0", "--out", str(tmp_path / "linked")], monkeypatch)
    assert code == 0, errors
    assert (tmp_path / "study" / "fedavg" / "seed-0" / "summary.json").is_file()
