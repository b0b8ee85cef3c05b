"""What a user can get wrong: exit code 2, one line on standard error that names it, and no traceback.

Most cases call the command line within this process (starting one costs seconds, because of torch); those that need a
process of their own, or show that the real thing behaves the same, start one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import call, process
from earlier_folders import without_checksums

import fedgg
from fedgg.lab.config import Experiment
from fedgg.lab.runner import run

QUICK = ["--rounds", "1", "--model", "linear", "--set", "local.epochs=1"]


def assert_one_line(found: tuple[int, str, str], *words: str) -> None:
    code, _, errors = found
    assert "Traceback" not in errors, errors
    assert code == 2, errors
    complaints = [line for line in errors.splitlines() if line.startswith("error:")]
    assert len(complaints) == 1, errors
    for word in words:
        assert word in complaints[0], complaints[0]


def assert_only_line(errors: str) -> None:
    assert len(errors.splitlines()) == 1, f"not one line on standard error but: {errors!r}"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDGG_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "80")


CASES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "unknown key": (["run", "--set", "local.epoch=1"], ("'local.epoch'", "'local.epochs'")),
    "unknown section": (["run", "--set", "locla.epochs=1"], ("'locla.epochs'", "'local.epochs'")),
    "unknown top key": (["run", "--set", "round=1"], ("'round'", "'rounds'")),
    "negative clients": (["run", "--clients", "-1"], ("split.clients = -1",)),
    "no clients": (["run", "--clients", "0"], ("split.clients = 0",)),
    "negative hidden": (["run", "--rounds", "1", "--set", "model.hidden=-3"], ("hidden = -3",)),
    "no epochs": (["run", "--set", "local.epochs=0"], ("local.epochs = 0",)),
    "too many epochs": (["run", "--set", "local.epochs=2147483648"], ("local.epochs = 2147483648",)),
    "lr too large for its precision": (["run", *QUICK, "--set", "local.lr=1e308"], ("local.lr = 1e+308", "fp32")),
    "name too long": (["run", *QUICK, "--out", "x" * 300], ("xxx", "File name too long")),
    "start of an impossible name": (
        ["run", *QUICK, "--set", 'model.start="a\\u0000b"'],
        ("model.start", "is not a readable"),
    ),
    "report of a name too long": (["report", "x" * 300], ("xxx", "File name too long")),
    "a date as a setting": (["run", "--set", "model.hidden=1979-05-27"], ("model.hidden is a date",)),
    "no batch": (["run", "--set", "local.batch=0"], ("local.batch = 0",)),
    "no rounds": (["run", "--rounds", "0"], ("rounds = 0",)),
    "half a client": (["run", "--set", "split.clients=2.5"], ("split.clients = 2.5",)),
    "beta 0": (["run", "--beta", "0"], ("split.beta = 0",)),
    "beta nan": (["run", "--beta", "nan"], ("split.beta",)),
    "beta inf": (["run", "--set", "split.beta=inf"], ("split.beta",)),
    "negative seed": (["run", "--seed", "-1"], ("seed = -1",)),
    "more clients than examples": (["run", "--clients", "5000"], ("5000", "1437")),
    "more clients than fit": (["run", "--clients", "1000"], ("min_examples",)),
    "batch larger than every client": (["run", *QUICK, "--set", "local.batch=100000"], ("local.batch = 100000",)),
    "small clients refused": (
        ["run", *QUICK, "--beta", "0.1", "--set", "local.batch=140", "--set", "local.small_clients=refuse"],
        ("local.batch = 140", "small_clients"),
    ),
    "cohort too large": (["run", "--set", "server.cohort=11"], ("server.cohort = 11",)),
    "unknown algorithm": (["run", "--algorithm", "fedgb"], ("'fedgb'", "'fedgg'")),
    "unknown setting": (["run", "--algorithm", "fedgg:my=1"], ("'my'", "'algorithm.mu'")),
    "setting of another algorithm": (["run", "--algorithm", "fedavg:mu=1"], ("'mu'", "none")),
    "setting out of range": (["run", "--algorithm", "fedgg:mu=-1"], ("algorithm.mu = -1",)),
    "setting not in the list": (["run", "--algorithm", "fedgg:weight=adaptiv"], ("adaptive",)),
    "setting without value": (["run", "--algorithm", "fedgg:mu="], ("mu",)),
    "unknown model": (["run", "--model", "mpl"], ("'mpl'", "'mlp'")),
    "unknown model setting": (["run", "--set", "model.hiden=3"], ("'hiden'", "'model.hidden'")),
    "model too big for the data": (["run", "--model", "cnn"], ("16 x 16",)),
    "model file missing": (["run", "--model", "own.py:Net"], ("own.py",)),
    "unknown data set": (["run", "--data", "cifar11"], ("'cifar11'", "cifar10")),
    "bare npz": (["run", "--data", "mine.npz"], ("npz:mine.npz",)),
    "npz without file": (["run", "--data", "npz:"], ("npz:FILE",)),
    "npz missing": (["run", "--data", "npz:none.npz"], ("none.npz",)),
    "missing cifar10": (["run", "--data", "cifar10"], ("cifar-10-batches-py", "data", "fedgg data fetch cifar10")),
    "missing svhn": (["run", "--data", "svhn"], ("train_32x32.mat", "fedgg data fetch svhn")),
    "data show missing": (["data", "show", "cifar100"], ("fedgg data fetch cifar100",)),
    "data show unknown scheme": (["data", "show", "digits", "--scheme", "dirichlett"], ("dirichlett", "dirichlet")),
    "data show beta 0": (["data", "show", "digits", "--beta", "0"], ("beta",)),
    "data show too many": (["data", "show", "digits", "--clients", "9999"], ("9999",)),
    "data check missing": (["data", "check", "cifar10"], ("fedgg data fetch cifar10",)),
    "data check unknown": (["data", "check", "cifar11"], ("cifar10",)),
    "data fetch unknown": (["data", "fetch", "cifar11"], ("cifar10",)),
    "nonsense set": (["run", "--set", "nonsense"], ("KEY=VALUE",)),
    "set without key": (["run", "--set", "=3"], ("KEY=VALUE",)),
    "set text for a number": (["run", "--set", "local.lr=fast"], ("local.lr = 'fast'",)),
    "set below a value": (["run", "--set", "rounds.x=3"], ("'rounds' is a value",)),
    "set a section": (["run", "--set", "local=3"], ("local = 3",)),
    "nonsense seeds": (["compare", "--seeds", "a,b"], ("'a,b'", "0-4")),
    "backward seeds": (["compare", "--seeds", "4-0"], ("'4-0'",)),
    "seeds twice": (["compare", "--seeds", "1,1"], ("once",)),
    "negative seeds": (["compare", "--seeds", "-3"], ("'-3'",)),
    "empty seeds": (["compare", "--seeds", ","], ("','",)),
    "compare unknown algorithm": (["compare", "--algorithm", "fedgb"], ("'fedgg'",)),
    "compare twice the same": (["compare", "--algorithm", "a@fedavg", "--algorithm", "A@fedgg"], ("share the folder",)),
    "sweep over nothing": (["sweep"], ("--grid",)),
    "sweep nonsense": (["sweep", "--grid", "algorithm.mu"], ("KEY=VALUE",)),
    "sweep unknown key": (["sweep", "--grid", "local.rate=1,2"], ("'local.rate'",)),
    "sweep unknown setting": (["sweep", "--grid", "algorithm.my=1,2"], ("'my'", "'algorithm.mu'")),
    "missing experiment file": (["run", "none.toml"], ("none.toml",)),
    "folder as experiment": (["run", "."], ("cannot be read",)),
    "missing study file": (["compare", "none.toml"], ("none.toml",)),
    "resume nothing": (["resume", "nowhere"], ("nowhere", "no run")),
    "resume an empty folder": (["resume", "."], ("no run",)),
    "no such card": (["run", *QUICK, "--device", "cuda:99"], ("cuda:99",)),
    "no such device": (["run", "--device", "tpu"], ("engine.device",)),
    "start weights missing": (["run", *QUICK, "--set", "model.start=none.safetensors"], ("none.safetensors",)),
    "augment what is no image": (
        ["run", *QUICK, "--data", "npz:flat.npz", "--set", "data.augment=flip", "--set", "split.min_examples=1"],
        ("flip",),
    ),
    "check unknown": (["check", "fedgb"], ("'fedgg'",)),
    "check a missing file": (["check", "own.py:Own"], ("own.py",)),
    "below a regular file": (["run", *QUICK, "--out", "file/run"], ("cannot write", "file/run", "--out")),
    "compare below a regular file": (["compare", *QUICK, "--out", "file/run"], ("cannot write",)),
    "in proc": (["run", *QUICK, "--out", "/proc/fedgg"], ("cannot write", "/proc/fedgg")),
    "data show below a regular file": (["data", "show", "digits", "--out", "file/x"], ("cannot write",)),
    # What typer itself refuses is the user's mistake like any other
    "letters for a number": (["run", "--rounds", "many"], ("many",)),
    "unknown option": (["run", "--round", "3"], ("--round",)),
    "unknown command": (["rnu"], ("rnu",)),
    "no jobs": (["compare", "--jobs", "0"], ("jobs",)),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_code_2(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, expected = CASES[case]
    (tmp_path / "file").write_text("a regular file")
    save(tmp_path / "flat.npz")
    assert_one_line(call(words, monkeypatch), *expected)


def test_nothing_else_is_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a dead progress bar either."""
    for case in ("unknown key", "unknown data set", "negative hidden", "compare unknown algorithm"):
        assert_only_line(call(CASES[case][0], monkeypatch)[2])


@pytest.mark.parametrize("case", ["unknown data set", pytest.param("resume nothing", marks=pytest.mark.slow)])
def test_the_real_command_does_the_same(case: str, tmp_path: Path) -> None:
    words, expected = CASES[case]
    (tmp_path / "file").write_text("a regular file")
    found = process(words)
    assert_one_line(found, *expected)
    assert_only_line(found[2])


TOML = {
    "malformed": ("rounds = = 3", ("mine.toml", "TOML")),
    "unknown key": ("[local]\nepoch = 3", ("mine.toml", "'local.epoch'", "'local.epochs'")),
    "unknown section": ("[locla]\nepochs = 3", ("'locla.epochs'", "'local.epochs'")),
    "not utf-8": ("name = '\udcff'", ("mine.toml",)),
    "wrong type": ("rounds = 'many'", ("rounds = 'many'",)),
    "twice": ("rounds = 1\nrounds = 2", ("TOML",)),
    "many": ("[local]\nepochs = 0\nbatch = 0\nlr = 0\nmomentum = 2", ("and 1 more",)),
}


@pytest.mark.parametrize("case", TOML)
def test_experiment_files(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, expected = TOML[case]
    (tmp_path / "mine.toml").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert_one_line(call(["run", "mine.toml"], monkeypatch), *expected)


def save(path: Path, **changes: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"x_train": rng.normal(size=(120, 5)), "x_test": rng.normal(size=(30, 5))}
    arrays |= {"y_train": np.arange(120) % 3, "y_test": np.arange(30) % 3}
    np.savez(path, **(arrays | changes))


def test_arrays_with_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.npz"
    words = ["run", *QUICK, "--clients", "3", "--set", "local.batch=8", "--data", "npz:mine.npz"]
    nan = np.ones((120, 5))
    nan[7, 2] = np.nan
    cases: list[tuple[dict[str, np.ndarray], tuple[str, ...]]] = [
        ({"x_train": nan}, ("NaN", "example 7")),
        ({"x_test": np.full((30, 5), np.inf)}, ("x_test", "infinity")),
        ({"y_train": np.arange(120) % 3 - 1}, ("label -1",)),
        ({"y_train": np.arange(120) / 7}, ("whole numbers",)),
        ({"y_test": np.arange(29) % 3}, ("y_test",)),
        ({"x_train": np.ones((0, 5)), "y_train": np.arange(0)}, ("x_train",)),
        ({"x_test": np.ones((30, 6))}, ("different shapes",)),
        ({"y_train": np.array(["a"] * 120)}, ("y_train",)),
    ]
    for changes, expected in cases:
        save(path, **changes)
        assert_one_line(call(words, monkeypatch), "mine.npz", *expected)
    save(path)
    assert call([*words, "--out", "fine"], monkeypatch)[0] == 0
    for length in (0, 10, 200, path.stat().st_size // 2, path.stat().st_size - 5):
        (tmp_path / "torn.npz").write_bytes(path.read_bytes()[:length])
        assert_one_line(call([*words[:-1], "npz:torn.npz"], monkeypatch), "torn.npz")


def test_archives_with_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    archive = folder / "cifar-10-python.tar.gz"
    for content in (b"", b"\x1f\x8b\x08\x00torn", os.urandom(1000)):
        archive.write_bytes(content)
        for words in (["run", "--data", "cifar10"], ["data", "check", "cifar10"], ["data", "show", "cifar10"]):
            assert_one_line(call(words, monkeypatch), "cifar-10-python.tar.gz", "SHA-256", "fetch")
    archive.unlink()
    (folder / "cifar-10-batches-py").mkdir()
    assert_one_line(call(["run", "--data", "cifar10"], monkeypatch), "data_batch_1", "missing")


def test_run_folders_with_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment(rounds=2, model={"name": "linear"}, split={"clients": 3}, local={"epochs": 1})
    run(experiment, out=tmp_path / "run")
    good = (without_checksums(tmp_path / "run") / "versions.json").read_text()
    for content, word in ((good.replace('"format": 1', '"format": 7'), "format 7"), ("{", "versions.json")):
        (tmp_path / "run" / "versions.json").write_text(content)
        assert_one_line(call(["resume", "run"], monkeypatch), word)
    (tmp_path / "run" / "versions.json").write_text(good)
    (tmp_path / "run" / "config.toml").write_text("rounds = ")
    assert_one_line(call(["resume", "run"], monkeypatch), "config.toml")
    experiment.changed({"seed": 3})
    (tmp_path / "run" / "config.toml").write_text(experiment.changed({"seed": 3}).to_toml())
    assert_one_line(call(["resume", "run"], monkeypatch), "another experiment")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.json").write_text("{")
    assert call(["compare", *QUICK, "--seeds", "0", "--jobs", "1", "--out", "study"], monkeypatch)[0] == 0


def test_a_run_from_python_cannot_be_resumed_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    experiment = Experiment(rounds=1, split={"clients": 3}, local={"epochs": 1})
    run(experiment, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), out=tmp_path / "run")
    assert_one_line(call(["resume", "run"], monkeypatch), "objects from Python")


# Folders --------------------------------------------------------------------------------------------------------------

IMPOSSIBLE = {  # folders that cannot be there, by what is said of them, in words that all versions of Python have
    "File name too long": "x" * 300,
    "too long": "/".join(["folder"] * 800),
    r"'a\\x00b' is not the name of a folder": "a\0b",
    r"'\\ud800' is not the name of a folder": "\ud800",
}


@pytest.mark.parametrize("fault", IMPOSSIBLE)
def test_folders_that_cannot_be_there_from_python(fault: str) -> None:
    folder = IMPOSSIBLE[fault]
    for use in (
        lambda: fedgg.run({"rounds": 1}, out=folder),
        lambda: fedgg.compare(["fedavg"], {"rounds": 1}, out=folder),
        lambda: fedgg.Run.load(folder),
    ):
        with pytest.raises(fedgg.UserError, match=fault) as caught:
            use()
        assert len(str(caught.value).splitlines()) == 1
        assert len(str(caught.value)) < 300


WITHOUT_PERMISSION = """
import sys
import fedgg, fedgg.cli
for use in (fedgg.Run.load, lambda folder: fedgg.run({"rounds": 1}, out=folder)):
    try:
        use("closed/run")
    except fedgg.UserError as error:
        print("error:", error, file=sys.stderr)
for words in (["resume", "closed/run"], ["compare", "--out", "closed/run"], ["report", "closed/run"],
              ["report", ".", "-o", "closed/page.html"]):
    sys.argv = ["fedgg", *words]
    try:
        fedgg.cli.main()
    except SystemExit as end:
        assert end.code == 2, words
"""


def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    alone = [sys.executable, "-c", WITHOUT_PERMISSION]
    if os.geteuid() == 0:  # root may enter every folder
        if not (setpriv := shutil.which("setpriv")):
            pytest.skip("root without setpriv may enter every folder")
        rights = "-dac_override,-dac_read_search"
        alone = [setpriv, f"--bounding-set={rights}", f"--inh-caps={rights}", *alone]
    found = subprocess.run(alone, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    lines = found.stderr.splitlines()
    assert len(lines) == 6, found.stderr
    assert all(line.startswith("error: closed/") and "Permission denied" in line for line in lines), found.stderr


# Disks ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True
    )
    if not done or done.returncode:
        pytest.skip("no small disk: mounting a tmpfs needs root and the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    "choice",
    [
        ["--set", "model.hidden=400"],
        # The second checkpoint does not fit: while the third round is trained, or after it if that was postponed.
        ["--set", "model.hidden=400", "--set", "server.checkpoint_every=1"],
        # Two of three variates fit, so that it is the file of the clients' memory that fills the disk.
        ["--algorithm", "scaffold", "--set", "server.memory_limit_mb=0", "--set", "model.hidden=350"],
    ],
)
def test_a_full_disk_and_room_again(choice: list[str], small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run", "--rounds", "4", "--clients", "3", "--set", "local.epochs=1", *choice]
    assert_one_line(call([*words, "--out", str(small_disk / "run")], monkeypatch), "No space left", "resume")
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert call(["resume", str(small_disk / "run")], monkeypatch)[0] == 0
    assert call([*words, "--out", "straight"], monkeypatch)[0] == 0
    model = "model.safetensors"
    assert (small_disk / "run" / model).read_bytes() == Path("straight", model).read_bytes()


def test_a_disk_too_full_for_the_pictures() -> None:
    """The run fits into 16 kB a file, its pictures do not."""
    assert_one_line(process(["run", *QUICK, "--clients", "3", "--out", "run"], limit=16384), "File too large")


@pytest.mark.slow
def test_a_disk_too_full_for_the_tables() -> None:
    words = ["compare", *QUICK, "--clients", "3", "--seeds", "0", "--jobs", "1", "--out", "study"]
    assert_one_line(process(words, limit=16384), "File too large")
