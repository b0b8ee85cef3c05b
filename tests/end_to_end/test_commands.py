"""Every command does what its help says, on real data, and leaves what it promises."""

from __future__ import annotations

import csv
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import call

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer uses names that click is about to drop
    from typer.testing import CliRunner

    import fedgg.cli
    from fedgg.cli import terminal

ROOT = Path(__file__).parents[2]
QUICK = ["--clients", "3", "--set", "local.epochs=1", "--set", "model.hidden=8"]
PNG = b"\x89PNG\r\n\x1a\n"
COMMANDS = (
    ["run"],
    ["resume"],
    ["compare"],
    ["sweep"],
    ["tune"],
    ["reproduce"],
    ["report"],
    ["watch"],
    ["check"],
    ["list"],
    ["data", "fetch"],
    ["data", "check"],
    ["data", "show"],
    ["bench"],
    ["bench", "setup"],
    ["flower", "new"],
    ["flower", "up"],
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fedgg_(*words: str, code: int = 0) -> str:
    """The command in this process; what it prints on standard output."""
    with terminal.console.capture() as heard:
        result = CliRunner().invoke(fedgg.cli.app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    return heard.get() + result.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_shows_an_example(command: list[str]) -> None:
    text = fedgg_(*command, "--help")
    assert "Example" in text
    assert f"fedgg {' '.join(command)}" in text


def test_every_command_is_in_the_list_above() -> None:
    listed = {command.name for command in fedgg.cli.app.registered_commands}
    listed |= {group.name for group in fedgg.cli.app.registered_groups}
    assert listed == {command[0] for command in COMMANDS}
    assert "compare" in fedgg_("--help")
    assert fedgg_("--version").startswith("fedgg ")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_run_and_resume() -> None:
    text = fedgg_("run", "--rounds", "2", *QUICK, "--out", "one")
    assert "test accuracy" in text
    folder = Path("one")
    for picture in ("split.png", "curves.png"):
        assert (folder / picture).read_bytes().startswith(PNG)
    names = {"config.toml", "versions.json", "partition.npz", "partition.json", "rounds.jsonl", "summary.json"}
    assert names | {"model.safetensors", "checkpoint"} <= {path.name for path in folder.iterdir()}
    before = (folder / "rounds.jsonl").read_bytes()
    assert "test accuracy" in fedgg_("resume", "one")
    assert (folder / "rounds.jsonl").read_bytes() == before


def test_run_without_out_names_its_folder() -> None:
    fedgg_("run", "--rounds", "1", *QUICK, "--algorithm", "fedprox:mu=0.1", "--seed", "3")
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("fedprox-digits-seed-3-")
    config = (folder / "config.toml").read_text()
    assert 'name = "fedprox"' in config
    assert "mu = 0.1" in config


def test_a_diverged_run_says_so() -> None:
    words = ["--rounds", "30", "--clients", "3", "--set", "local.lr=1e38", "--algorithm", "fedavg"]
    fedgg_("run", *words, "--out", "wild", code=1)
    assert json.loads(Path("wild/summary.json").read_text())["status"] == "diverged"


def test_compare_and_again() -> None:
    words = ["--algorithm", "fedavg", "--algorithm", "fedgg:mu=0.1", "--seeds", "0-1", "--rounds", "2"]
    words += [*QUICK, "--out", "both"]
    text = fedgg_("compare", *words, "--jobs", "2")
    assert "3 clients, dirichlet 0.1, mlp, 2 rounds, 1 epoch a round, seeds 0, 1\n" in text
    assert "fedgg mu=0.1" in text
    folder = Path("both")
    for picture in ("accuracy.png", "split-seed-0.png", "split-seed-1.png"):
        assert (folder / picture).read_bytes().startswith(PNG)
    for table in ("tables.md", "accuracy.csv", "target.csv", "report.html"):
        assert "fedavg" in (folder / table).read_text(encoding="utf-8")
    runs = [folder / name / f"seed-{seed}" for name in ("fedavg", "fedgg-mu=0.1") for seed in (0, 1)]
    assert all(len(lines(run)) == 2 for run in runs)
    stamps = [(run / "model.safetensors").stat().st_mtime_ns for run in runs]
    fedgg_("compare", *words, "--jobs", "1")
    assert [(run / "model.safetensors").stat().st_mtime_ns for run in runs] == stamps
    splits = [json.loads((run / "partition.json").read_text())["hash"] for run in runs]
    assert splits[0] == splits[2]
    assert splits[1] == splits[3]
    assert splits[0] != splits[1]


def test_resume_of_a_comparison_says_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command stands in the folder, quoted for a shell, and does go on; without it there is advice."""
    words = ["compare", "--algorithm", "a b@fedavg", "--rounds", "1", *QUICK, "--seeds", "0", "--jobs", "1"]
    words += ["--out", "my runs"]
    assert call(words, monkeypatch)[0] == 0
    code, _, errors = call(["resume", "my runs"], monkeypatch)
    assert code == 2
    assert errors.count("\n") == 1
    assert errors.startswith("error: my runs holds a comparison or sweep, which needs no resume")
    said = re.search(r"call again: fedgg (.*) \(finished runs are kept", errors)
    assert said, errors
    assert shlex.split(said[1]) == words
    model = Path("my runs/a-b/seed-0/model.safetensors")
    before = model.stat().st_mtime_ns
    assert call(shlex.split(said[1]), monkeypatch)[0] == 0
    assert model.stat().st_mtime_ns == before
    for content in ('{"format": 1}', "{", "[]"):
        Path("my runs/study.json").write_text(content)
        assert "`fedgg sweep` again, with --out 'my runs'" in call(["resume", "my runs"], monkeypatch)[2]


def test_an_axis_is_named_once_and_folders_are_no_options() -> None:
    Path("somewhere").mkdir()
    for words, complaint in (
        (["sweep", "--grid", "local.lr=0.1", "--grid", "local.lr=0.2"], "--grid local.lr is named twice"),
        (["report", "somewhere", "--figures", "--tables"], "--figures needs a folder to write to, got '--tables'"),
    ):
        assert str(CliRunner().invoke(fedgg.cli.app, words).exception).startswith(complaint)


def test_compare_by_another_metric() -> None:
    """Refused before anything trains where no run would record it; tables, figure and page by it otherwise."""
    words = ["compare", "--algorithm", "fedavg", "--rounds", "2", *QUICK, "--seeds", "0,1", "--jobs", "1"]
    words += ["--set", "metrics=perplexity,top5", "--set", "data.holdout=0.2", "--out", "by"]
    complaint = "--metric: the runs do not record 'test_accuracy': choose from test_perplexity, test_top5, holdout_perp"
    assert str(CliRunner().invoke(fedgg.cli.app, [*words, "--metric", "test_accuracy"]).exception).startswith(complaint)
    assert not Path("by").exists()
    assert "Test perplexity over seeds 0, 1 (lower is better)" in fedgg_(*words)
    finals = [lines(run)[-1]["test_perplexity"] for run in sorted(Path("by").glob("*/seed-*"))]
    (row,) = csv.DictReader(Path("by/test_perplexity.csv").read_text().splitlines())
    assert float(row["final"].split()[0]) == pytest.approx(np.mean(finals), rel=0.01)
    assert Path("by/test_perplexity.png").stat().st_size > 1000
    worst = "holdout_top5_worst_client"
    fedgg_("report", "by", "--metric", worst, "--tables", "tables")
    (row,) = csv.DictReader(Path(f"tables/{worst}.csv").read_text().splitlines())
    worsts = [min(lines(run)[-1]["holdout_top5_by_client"].values()) for run in Path("by").glob("*/seed-*")]
    assert float(row["final %"].split()[0]) == pytest.approx(100 * np.mean(worsts), abs=0.051)
    refused = CliRunner().invoke(fedgg.cli.app, ["report", "by", "--metric", "rmse"]).exception
    assert str(refused).startswith("the runs do not record 'rmse': choose from test_perplexity, test_top5")
    text = fedgg_("run", "--rounds", "2", *QUICK, "--set", "metrics=perplexity", "--out", "one")
    assert re.search(r"test perplexity \d+\.\d+ after round 2, lowest \d+\.\d+ after round \d", text)


def test_sweep() -> None:
    fedgg_("sweep", "--grid", "algorithm.mu=0,0.1", "--rounds", "1", *QUICK, "--jobs", "1", "--out", "grid")
    assert {path.name for path in Path("grid").iterdir() if path.is_dir()} == {"mu=0", "mu=0.1"}
    assert "mu=0.1" in Path("grid/accuracy.csv").read_text()
    assert "Sweep over mu on digits" in Path("grid/report.html").read_text(encoding="utf-8")


def test_tune_stopped_and_continued_then_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna", reason="needs the extra `tune`")
    from fedgg.cli.tune import SearchProgress
    from fedgg.lab.study import load_study

    space = ["--space", "local.lr=0.01..1:log", "--space", "fedprox@algorithm.mu=0.01,0.1"]
    search = ["--algorithm", "fedavg", "--algorithm", "fedprox", "--trials", "2", "--rounds", "2", *QUICK, *space]
    rounds_played: list[str] = []

    def stop(self: SearchProgress, run: str, record: dict[str, Any]) -> None:
        rounds_played.append(run)
        if len(rounds_played) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SearchProgress, "on_round", stop)
        fedgg_("tune", *search, "--out", "tuned", code=130)
    assert rounds_played[-1] == "fedprox, trial 1 of 2"
    assert len(Path("tuned/trials.jsonl").read_text().splitlines()) == 1
    text = fedgg_("tune", *search, "--out", "tuned")
    assert "fedgg compare tuned/winners.toml" in text
    assert Path("tuned/trials.png").read_bytes().startswith(PNG)
    trials = [json.loads(line) for line in Path("tuned/trials.jsonl").read_text().splitlines()]
    assert [trial["algorithm"] for trial in trials] == ["fedavg", "fedprox"] * 2
    assert {trial["settings"]["algorithm.mu"] for trial in trials[1::2]} <= {0.01, 0.1}
    study = load_study(Path("tuned/winners.toml"))
    assert study.seeds == (1, 2, 3)
    final = fedgg.run(study.experiment("fedprox", 1))
    assert final.experiment.algorithm.settings["mu"] in (0.01, 0.1)


@pytest.mark.slow
def test_the_winners_of_a_search_are_compared() -> None:
    pytest.importorskip("optuna", reason="needs the extra `tune`")
    fedgg_("tune", "--algorithm", "fedavg", "--trials", "1", "--rounds", "1", *QUICK, "--out", "tuned")
    text = fedgg_("compare", "tuned/winners.toml", "--out", "final")
    assert "fedavg" in text
    assert sorted(path.name for path in Path("final/fedavg").iterdir()) == ["seed-1", "seed-2", "seed-3"]


def test_report() -> None:
    for seed in ("0", "1"):
        fedgg_("run", "--rounds", "2", *QUICK, "--seed", seed, "--out", f"one/{seed}")
    assert "page: one/0/report.html" in fedgg_("report", "one/0")
    text = fedgg_("report", "one/0", "one/1", "-o", "new/both.html", "--figures", "figures", "--tables", "tables")
    assert "page: new/both.html" in text
    assert "9 files in tables" in text
    assert "over 2 seeds" in Path("new/both.html").read_text(encoding="utf-8")
    assert Path("figures/accuracy.png").read_bytes().startswith(PNG)
    # The whole folder at once, with a summary that was torn apart: named, and the history says that it had finished.
    Path("one/1/summary.json").write_text("{")
    assert "page: one/report.html" in fedgg_("report", "one")
    page = Path("one/report.html").read_text(encoding="utf-8")
    assert "summary.json is broken" in page
    assert "over 2 seeds" in page
    # And with a history that was torn apart: then one seed is left.
    Path("one/1/rounds.jsonl").write_text("{")
    fedgg_("report", "one")
    page = Path("one/report.html").read_text(encoding="utf-8")
    assert "One seed, so the spread over seeds is unknown." in page


def own_browser(writes: Path) -> str:
    """A browser as good as any to whoever starts it: it loads the page, and writes down what its address was."""
    program = Path("browser")
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, sys, urllib.request\n"
        "urllib.request.urlopen(sys.argv[1], timeout=60).read()\n"
        f"pathlib.Path({str(writes.resolve())!r}).write_text(sys.argv[1])\n"
    )
    program.chmod(0o755)
    return str(program.resolve())


def told_to_open(**around: str) -> subprocess.CompletedProcess[str]:
    """`fedgg report --open` in a process of its own, since a process looks for browsers once."""
    words = [sys.executable, "-m", "fedgg", "report", "a run", "--open"]
    kept = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=kept | around)


@pytest.mark.skipif(os.name == "nt", reason="the browser is a script")
def test_open_shows_the_page() -> None:
    fedgg_("run", "--rounds", "1", *QUICK, "--out", "a run")
    done = told_to_open(BROWSER=own_browser(Path("shown")))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert Path("shown").read_text() == (Path("a run") / "report.html").resolve().as_uri()


@pytest.mark.skipif(os.name == "nt", reason="Windows always has one")
@pytest.mark.parametrize(
    "browser",
    ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("/nowhere/a-browser", "a-browser-that-is-not %s"))],
)
def test_open_without_a_browser_says_so(browser: str) -> None:
    fedgg_("run", "--rounds", "1", *QUICK, "--out", "a run")
    done = told_to_open(BROWSER=browser, PATH="")
    page = (Path("a run") / "report.html").resolve()
    assert done.returncode == 0, done.stderr
    assert page.exists()
    assert done.stderr.startswith(f"note: no browser could be started: open {page.as_uri()} yourself")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["report"], "name at least one folder of runs"),
        (["report", "nowhere"], "nowhere does not exist"),
        (["report", "empty"], "there is nothing to report: empty: it holds no run"),
        (["watch"], "name at least one folder of runs"),
    ],
    ids=str,
)
def test_nothing_to_report(words: list[str], complaint: str) -> None:
    Path("empty").mkdir()
    result = subprocess.run([sys.executable, "-m", "fedgg", *words], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {complaint}")
    assert result.stderr.count("\n") == 1


def test_watch_opens_its_page_and_ends_with_ctrl_c() -> None:
    """Started on a folder that is not there yet, which is no mistake."""
    command = [sys.executable, "-u", "-m", "fedgg", "watch", "later", *(["--open"] if os.name != "nt" else [])]
    around = os.environ | {"BROWSER": own_browser(Path("shown"))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=around)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", said)
        assert address, said
        with urllib.request.urlopen(address[0], timeout=60) as page:
            assert b"No run yet" in page.read()
        deadline = time.monotonic() + 60
        while os.name != "nt" and not (Path("shown").exists() and Path("shown").read_text() == address[0]):
            assert time.monotonic() < deadline, "the browser has seen nothing"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "stopped watching" in text
    assert errors == "note: later does not exist yet: its runs are shown when it does\n"


def test_list_names_everything() -> None:
    text = fedgg_("list")
    from fedgg.algorithms import ALGORITHMS

    for word in (*ALGORITHMS, "mlp", "vgg16", "cifar10", "shards", "when to use it", "bytes", "work"):
        assert word in text


def test_data_show_and_check() -> None:
    fedgg_("data", "show", "digits", "--beta", "0.1", "--out", "pictures")
    fedgg_("data", "show", "digits", "--scheme", "iid", "--seed", "1", "--clients", "4", "--out", "pictures")
    names = {
        "digits-samples.png",
        "digits-split-dirichlet-beta=0.1-seed=0.png",
        "digits-split-iid-clients=4-seed=1.png",
    }
    assert {path.name for path in Path("pictures").iterdir()} == names
    for name in names:
        assert (Path("pictures") / name).read_bytes().startswith(PNG)
    assert "1,437" in fedgg_("data", "check", "digits")


@pytest.mark.slow
def test_check_on_the_example() -> None:
    output = fedgg_("check", f"{ROOT / 'examples' / 'my_algorithm.py'}:MyAlgorithm")
    assert "a round takes 1 times FedAvg's bytes" in output


def test_check_on_a_broken_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, the line that raised, each reason once, and words in square brackets are no markup."""
    Path("own.py").write_text(
        "from dataclasses import dataclass\nfrom fedgg import Algorithm\n\n\n@dataclass(frozen=True)\n"
        "class Own(Algorithm):\n    '''Broken.'''\n\n    def steer(self, grad, w, client):\n"
        "        raise ValueError('[/nope] [bold] not a tag')\n"
    )
    from fedgg.check import PROPERTIES

    for name in ("many rounds on quadratics", "learns real digits"):
        monkeypatch.delitem(PROPERTIES, name)
    text = fedgg_("check", "own.py:Own", code=1)
    assert text.count("ValueError: [/nope] [bold] not a tag (own.py, line 10, in steer)") == 1
    assert text.count("the same as above") > 3


def test_clients_named_by_the_data() -> None:
    """Every command finds out how many there are, and calls them by their names."""
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(160, 7)), np.arange(160) % 3
    owners = np.array(["charite"] * 60 + ["mayo"] * 40 + ["ucsf"] * 20)
    np.savez("wards.npz", x_train=x[:120], y_train=y[:120], x_test=x[120:], y_test=y[120:], clients=owners)
    given = ["--set", "split.scheme=given"]
    text = fedgg_("data", "show", "npz:wards.npz", *given)
    assert "split over 3 clients, 20 to 60 examples each" in text
    assert "charite 60, mayo 40, ucsf 20" in text
    quick = ["--data", "npz:wards.npz", "--rounds", "1", "--model", "linear", "--set", "local.batch=8", *given]
    assert "3 clients" in fedgg_("run", *quick, "--set", "server.cohort=2", "--out", "one")
    assert json.loads(Path("one/partition.json").read_text())["names"] == ["charite", "mayo", "ucsf"]
    assert "clients = 3" in Path("one/config.toml").read_text()
    fedgg_("compare", *quick, "--algorithm", "fedavg", "--seeds", "0", "--jobs", "1", "--out", "two")
    page = Path("two/report.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("charite", "mayo", "ucsf"))
    heard = CliRunner().invoke(fedgg.cli.app, ["run", *quick, "--clients", "5", "--out", "four"])
    assert "the data name 3 clients" in str(heard.exception)


def test_data_show_takes_the_settings_of_an_experiment() -> None:
    text = fedgg_("data", "show", "digits", "--set", "split.scheme=shards", "--set", "split.shards_per_client=3")
    assert "split over 10 clients" in text
    text = fedgg_("data", "show", "digits", "--clients", "7", "--set", "split.scheme=iid", "--set", "seed=3")
    assert "split over 7 clients, 205 to 206 examples each" in text


def test_data_show_says_what_is_repeated_or_left_out_and_draws_the_clients_inputs() -> None:
    text = fedgg_("data", "show", "digits", "--scheme", "dirichlet_repeated", "--beta", "0.1")
    assert re.search(r"\d+ of 1437 training examples are held by no client", text)
    assert re.search(r"\d+ of 1437 training examples are held more than once, at most \d times", text)
    text = fedgg_("data", "show", "digits", "--scheme", "iid", "--set", "split.feature_noise=0.2", "--out", "noise")
    assert "are held" not in text
    (picture,) = Path("noise").glob("digits-clients-*.png")
    assert picture.read_bytes().startswith(PNG)


def test_early_stopping_and_how_to_continue() -> None:
    stop = ["--set", "stop.metric=test_accuracy", "--set", "stop.target=0.0"]
    assert "after round 1" in fedgg_("run", "--rounds", "3", "--model", "linear", *stop, "--out", "one")
    assert json.loads(Path("one/summary.json").read_text())["status"] == "stopped_early"
    assert "after round 1" in fedgg_("resume", "one")
    assert "after round 3" in fedgg_("resume", "one", "--without-stop")
    heard = CliRunner().invoke(fedgg.cli.app, ["resume", "one", "--without-stop"])
    assert "has no early stopping" in str(heard.exception)


def test_tracking_by_tensorboard() -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'fedgg[tensorboard]'")
    fedgg_("run", "--rounds", "1", "--model", "linear", "--track", "tensorboard", "--out", "one")
    assert len(list(Path("one/tensorboard/run").glob("events.out.tfevents.*"))) == 1


def test_tracking_by_a_class_of_ones_own() -> None:
    Path("lines.py").write_text(
        "import fedgg\n"
        "class Lines(fedgg.Tracker):\n"
        "    name = 'lines'\n"
        "    def check(self): pass\n"
        "    def open(self, run, experiment, rounds_done): return open(self.folder / 'lines.txt', 'w')\n"
        "    def log(self, tracked, step, values): print(step, values['test_accuracy'], file=tracked)\n"
        "    def end(self, tracked, status, summary): print(status, file=tracked); tracked.close()\n"
    )
    fedgg_("run", "--rounds", "2", "--model", "linear", "--track", "lines.py:Lines", "--out", "one")
    *rounds, status = Path("one/lines.txt").read_text().splitlines()
    records = [json.loads(line) for line in Path("one/rounds.jsonl").read_text().splitlines()]
    assert [line.split() for line in rounds] == [[str(r["round"]), str(r["test_accuracy"])] for r in records]
    assert status == "finished"
    for name, complaint in (
        ("lines.py:fedgg", "must be a class that extends fedgg.Tracker"),
        ("linse", "unknown tracker"),
    ):
        heard = CliRunner().invoke(fedgg.cli.app, ["run", "--rounds", "1", "--track", name, "--out", "two"])
        assert complaint in str(heard.exception)


EXAMPLES = {
    "quickstart": "finished: test accuracy",
    "regression": "RMSE 0.",
    "multilabel": "macro-F1 0.9",
    "two_inputs": "accuracy 0.8",
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.filterwarnings("default")
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith(EXAMPLES[name])
