"""Wrappers from the command line: what a person sees of them."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer uses names that click is about to drop
    from typer.testing import CliRunner

    import fedgg.cli
    from fedgg.cli import terminal

QUICK = ["--clients", "5", "--set", "local.epochs=1", "--set", "model.hidden=8", "--algorithm", "fedavg"]
ACCOUNTED = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None,
    reason='the accountant is not installed: pip install "fedgg[privacy]"',
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fedgg_(*words: str, code: int = 0) -> str:
    """The command in this process; what it prints, notes included."""
    with terminal.console.capture() as heard, terminal.errors.capture() as noted:
        result = CliRunner().invoke(fedgg.cli.app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    return heard.get() + noted.get() + result.stdout


@ACCOUNTED
def test_a_private_run_stops_at_its_limit_and_can_go_on() -> None:
    private = ["--set", "privacy.noise=8", "--set", "privacy.epsilon_limit=2", "--rounds", "9"]
    said = fedgg_("run", *QUICK, *private, "--out", "here")
    summary = json.loads(Path("here/summary.json").read_text())
    assert summary["status"] == "spent"
    assert 0 < summary["rounds_done"] < 9
    assert summary["epsilon"] <= 2
    assert f"privacy spent: epsilon {summary['epsilon']:.2f} at delta 1e-05" in said
    assert f"stopped after {summary['rounds_done']} rounds" in said
    assert "which is all that epsilon_limit allows of 9" in said
    fedgg_("resume", "here", "--epsilon-limit", "100")
    summary = json.loads(Path("here/summary.json").read_text())
    assert (summary["status"], summary["rounds_done"]) == ("finished", 9)


@ACCOUNTED
def test_a_comparison_takes_in_what_a_limit_stopped() -> None:
    words = ["--grid", "privacy.noise=8,20", "--set", "privacy.epsilon_limit=2", "--rounds", "9", "--jobs", "1"]
    fedgg_("sweep", *QUICK, *words, "--out", "here")
    text = Path("here/tables.md").read_text()
    assert "unfinished" not in text
    assert "end at different rounds" in text


def test_a_limit_needs_a_private_run() -> None:
    fedgg_("run", *QUICK, "--rounds", "1", "--out", "here")
    with pytest.raises(fedgg.UserError, match="not a private run"):
        CliRunner().invoke(fedgg.cli.app, ["resume", "here", "--epsilon-limit", "1"], catch_exceptions=False)


def test_the_round_line_says_what_was_spent() -> None:
    record = {"test_accuracy": 0.5, "train_loss": 1.0, "epsilon": 3.14159, "delta": 1e-5, "lost": []}
    assert terminal.news(record) == "test accuracy 50.0%, train loss 1.000, epsilon 3.14 at delta 1e-05"
    assert "epsilon infinite" in terminal.news({**record, "epsilon": None})


def test_the_list_has_them() -> None:
    said = fedgg_("list")
    for word in ("privacy.noise", "robust.rule", "attack.kind", "[privacy]", "[robust]", "[attack]"):
        assert word in said
