"""Runs under the engine `workers`, stopped in every way there is: no process stays behind, and the run can go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from calling import call
from earlier_folders import without_checksums

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")

PATIENCE = 60.0  # seconds; only a process that never ends takes that long
SETTINGS = ["--model", "linear", "--clients", "4", "--set", "server.cohort=3", "--set", "local.epochs=2"]
WORKERS = ["--set", "engine.name=workers", "--set", "engine.workers=2"]


def start(words: list[str]) -> subprocess.Popen[str]:
    """The command, in a process group of its own as a terminal would have it."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedgg", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def alive(group: int) -> list[int]:
    """Processes of a group, or of the session it leads, that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, of_group, of_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if group in (int(of_group), int(of_session)) and state != "Z":
                found.append(int(entry.name))
    return found


def wait_for(truth: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not truth():
        assert time.monotonic() < end, f"waited {PATIENCE} s for {what}"
        time.sleep(0.02)


def rounds(folder: Path) -> int:
    path = folder / "rounds.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def history(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "checksum")} for line in lines]


def stopped(words: list[str], folder: Path, how: signal.Signals, whole_group: bool) -> tuple[int, str]:
    """Start, let it play some rounds, stop it, see everybody gone."""
    parent = start([*words, "--rounds", "100000", "--out", str(folder)])
    try:
        wait_for(lambda: rounds(folder) >= 3 or parent.poll() is not None, "the first rounds")
        assert len(alive(parent.pid)) >= 3, "the command and two workers"
        (os.killpg if whole_group else os.kill)(parent.pid, how)
        _, errors = parent.communicate(timeout=PATIENCE)
        wait_for(lambda: not alive(parent.pid), "everybody to end")
    finally:
        for left in alive(parent.pid):
            os.kill(left, signal.SIGKILL)
    return parent.returncode, errors


def goes_on_as_if_nothing_had_happened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rounds further, against the loop that was left alone. The stopped run asked for far more: say fewer."""
    config = without_checksums(folder) / "config.toml"
    target = rounds(folder) + 3
    config.write_text(config.read_text().replace("rounds = 100000", f"rounds = {target}"))
    straight = tmp_path / "straight"
    for words in (["resume", str(folder)], ["run", *SETTINGS, "--rounds", str(target), "--out", str(straight)]):
        code, _, errors = call(words, monkeypatch)
        assert code == 0, errors
    assert history(folder) == history(straight)
    assert (folder / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    code, errors = stopped(["run", *SETTINGS, *WORKERS], folder, signal.SIGINT, whole_group=True)
    assert code == 130
    assert "Traceback" not in errors
    assert f"fedgg resume {folder}" in errors
    goes_on_as_if_nothing_had_happened(folder, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("whole_group", [False, True])
def test_other_ways_to_stop(
    how: signal.Signals, whole_group: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    code, errors = stopped(["run", *SETTINGS, *WORKERS], folder, how, whole_group)
    assert code == (130 if how == signal.SIGTERM else -how)
    assert "Traceback" not in errors
    goes_on_as_if_nothing_had_happened(folder, tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_killed_parent_of_a_long_client_leaves_no_orphan(tmp_path: Path) -> None:
    """Workers end at once, not when their client is done: here that would take hours."""
    words = ["run", *WORKERS, "--set", "local.epochs=100000", "--out", str(tmp_path / "run")]
    parent = start(words)
    wait_for(lambda: (tmp_path / "run" / "config.toml").exists(), "the run to begin")
    wait_for(lambda: len(alive(parent.pid)) >= 5, "the command, two helpers of Python's and two workers")
    time.sleep(2)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    wait_for(lambda: not alive(parent.pid), "the workers to end")


@pytest.mark.slow
def test_ctrl_c_of_a_study_while_workers_start_prints_no_traceback(tmp_path: Path) -> None:
    for delay in (0.0, 0.2, 0.5, 1.0, 1.5, 2.0):
        folder = tmp_path / str(delay)
        parent = start(["compare", *WORKERS, "--rounds", "1000", "--out", str(folder)])
        wait_for((folder / "study.json").exists, "the study to begin")
        time.sleep(delay)
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=PATIENCE)
        assert "Traceback" not in errors, f"after {delay} s"
        assert "stopped" in errors
        # CPython ends by the signal where it came while an import was in `exec` of a text, handled or not.
        assert parent.returncode in (130, -signal.SIGINT), f"after {delay} s: {errors}"
        wait_for(lambda group=parent.pid: not alive(group), "everybody to end")
