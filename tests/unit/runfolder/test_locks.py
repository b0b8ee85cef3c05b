"""Locks: one holder at a time, and no write after the folder was removed and made again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from observers import Callbacks

from fedgg.lab import checkpoint
from fedgg.lab.config import Experiment
from fedgg.lab.runner import run
from fedgg.lab.store import Store
from fedgg.runfolder.locks import InUse, LockFile, LockLost

SMALL: dict[str, Any] = {
    "rounds": 4,
    "split": {"clients": 3},
    "local": {"epochs": 1, "batch": 64},
    "model": {"name": "linear"},
    "algorithm": {"name": "scaffold"},
}


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first, second = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    assert not second.is_held_elsewhere()  # nobody has made the file
    assert first.acquire()
    assert second.is_held_elsewhere()
    assert not second.acquire(timeout=0)
    first.release()
    assert not second.is_held_elsewhere()
    assert second.acquire(timeout=0)
    second.check()


def test_a_killed_holder_holds_no_more(tmp_path: Path) -> None:
    code = "import sys, time; from fedgg.runfolder.locks import *; from pathlib import Path\n"
    code += "lock = LockFile(Path(sys.argv[1])); print(lock.acquire(), flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert LockFile(tmp_path / "lock").is_held_elsewhere()
    finally:
        holder.kill()
        holder.communicate()
    assert LockFile(tmp_path / "lock").acquire(timeout=0)


@pytest.mark.parametrize("again", [True, False])
def test_a_lock_knows_that_its_folder_was_removed(again: bool, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    lock = LockFile(folder / "lock")
    assert lock.acquire()
    lock.check()
    shutil.rmtree(folder)
    if again:
        folder.mkdir()
        assert LockFile(folder / "lock").acquire(timeout=0)  # by whoever made it again
    with pytest.raises(LockLost, match="was removed or replaced"):
        lock.check()


@pytest.mark.parametrize("memory", [{}, {"memory_limit_mb": 0}])
def test_a_run_whose_folder_is_replaced_writes_nothing_more(memory: dict[str, Any], tmp_path: Path) -> None:
    """Another run, of other settings, has taken the place of a folder that was removed."""
    out, saved = tmp_path / "run", tmp_path / "saved"
    run(SMALL | {"seed": 9}, out=saved)

    def replaced(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            out.rename(tmp_path / "moved")  # and not rmtree: a checkpoint may be written into it at the same time
            shutil.copytree(saved, out)
            other = Store(out).locked()
            other.__enter__()
            held.append(other)

    held: list[Any] = []
    with pytest.raises(LockLost, match="was removed or replaced"):
        run(SMALL | {"server": memory}, out=out, observer=Callbacks(round=replaced))
    held[0].__exit__(None, None, None)
    assert files(out) == files(saved)


@pytest.mark.parametrize("moment", ["_checksum", "_write_safetensors"])  # before and after its file was created
def test_a_checkpoint_is_not_written_into_a_folder_that_was_replaced_meanwhile(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, saved = tmp_path / "run", tmp_path / "saved"
    run(SMALL | {"seed": 9}, out=saved)
    original = getattr(checkpoint, moment)

    def replaced(*arguments: Any) -> Any:
        if not (tmp_path / "moved").exists():
            out.rename(tmp_path / "moved")
            shutil.copytree(saved, out)
        return original(*arguments)

    monkeypatch.setattr(checkpoint, moment, replaced)
    with pytest.raises(LockLost, match="was removed or replaced"):
        run(SMALL, out=out)
    assert files(out) == files(saved)


def test_a_second_run_in_a_folder_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    run(SMALL, out=tmp_path)
    with Store(tmp_path).locked(), pytest.raises(InUse, match="another process is working in"):
        run(Experiment(**SMALL).changed({"data.source": "npz:nosuch.npz"}), out=tmp_path)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_stopped_run_that_wakes_up_in_another_folder(tmp_path: Path) -> None:
    """As in life: stopped, removed, taken by another command, continued."""
    out = tmp_path / "two"

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fedgg", "run", "--algorithm", "scaffold", "--model", "linear"]
        command += ["--set", "local.epochs=1", "--out", str(out), *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for_rounds(count: int, process: subprocess.Popen[str]) -> None:
        while process.poll() is None:
            if (out / "rounds.jsonl").exists() and (out / "rounds.jsonl").read_bytes().count(b"\n") >= count:
                return
            time.sleep(0.02)
        raise AssertionError(process.communicate())

    first = start("--rounds", "10000")
    wait_for_rounds(5, first)
    os.kill(first.pid, signal.SIGSTOP)
    shutil.rmtree(out)
    second = start("--rounds", "60", "--seed", "9")
    wait_for_rounds(3, second)
    os.kill(first.pid, signal.SIGCONT)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 2
    assert "was removed or replaced" in errors
    assert "Traceback" not in errors
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    rounds = [json.loads(line)["round"] for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert rounds == [*range(1, 61)]
    assert Store(out).experiment().seed == 9
    assert json.loads((out / "summary.json").read_text())["rounds_done"] == 60
