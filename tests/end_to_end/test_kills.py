"""A run killed at random moments and resumed until it is done ends with the same bits as one that was left alone."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

COMMAND = str(Path(sys.executable).with_name("fedgg"))
RUN = ["run", "--algorithm", "scaffold", "--clients", "4", "--set", "server.cohort=3", "--set", "local.epochs=2"]
RUN += ["--set", "model.hidden=32"]

MEASURED = {"seconds": 0, "checksum": "", "checksums": {}}  # of a summary: what depends on the time it took


def history(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "checksum")} for line in lines]


IN_A_FILE = ["--set", "server.memory_limit_mb=0"]
ATTACKED = ["--set", "robust.rule=median", "--set", "attack.kind=noise"]


@pytest.fixture
def attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the four sends noise, drawn anew in every round, and the server takes the median."""
    monkeypatch.setattr(sys.modules[__name__], "RUN", [*RUN, *ATTACKED])


def start(folder: Path, rounds: int, more: list[str]) -> subprocess.Popen[bytes]:
    words = [*RUN, *more, "--rounds", str(rounds), "--out", str(folder)]
    return subprocess.Popen([COMMAND, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(folder: Path, rounds: int, more: list[str]) -> None:
    process = start(folder, rounds, more)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()


def kill_and_resume(
    tmp_path: Path, rounds: int, kills: int, seed: int, more: list[str] | None = None
) -> dict[str, int]:
    """So many kills over as many lives as it takes; a life that ends by itself begins the next run.

    `more` moves no number, and is said to the runs that are killed only.
    """
    more = more or []
    straight = tmp_path / "straight"
    began = time.monotonic()
    finish(straight, rounds, [])
    whole = time.monotonic() - began
    chance = random.Random(seed)
    done = number = 0
    hit = {"before the first round": 0, "during training": 0, "after it": 0}
    while done < kills:
        folder = tmp_path / f"run-{number}"
        number += 1
        while done < kills and not (folder / "summary.json").exists():
            process = start(folder, rounds, more)
            try:
                # Most of a short life is importing torch: aim half of the kills at what comes after it.
                process.wait(chance.uniform(0, whole) if chance.random() < 0.3 else chance.uniform(0.5 * whole, whole))
            except subprocess.TimeoutExpired:
                process.kill()
                done += 1
                played = (folder / "rounds.jsonl").exists()
                ended = (folder / "summary.json").exists()
                hit["after it" if ended else "during training" if played else "before the first round"] += 1
            _, errors = process.communicate()
            assert b"Traceback" not in errors, errors.decode()
            assert process.returncode in (0, -9), errors.decode()
        if not (folder / "summary.json").exists() or list(folder.glob("*.tmp")):  # killed while it drew its pictures
            finish(folder, rounds, more)
        assert (folder / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
        assert history(folder) == history(straight)
        summaries = [json.loads((place / "summary.json").read_text()) for place in (folder, straight)]
        assert {**summaries[0], **MEASURED} == {**summaries[1], **MEASURED}
        assert not list(folder.rglob("*.tmp")), "a torn write was left behind"
        assert (folder / "checkpoint" / "client-memory.slots").exists() == (IN_A_FILE[1] in more)
        shutil.rmtree(folder)
    return hit


@pytest.mark.usefixtures("attacked")
def test_three_kills_under_attack_with_the_clients_memory_in_a_file(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, rounds=20, kills=3, seed=3, more=IN_A_FILE)


@pytest.mark.slow
@pytest.mark.usefixtures("attacked")
def test_ten_kills_under_attack(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, rounds=20, kills=10, seed=3)


PARTS = {
    "adamw": "optimiser.name=adamw optimiser.state=kept schedule.name=cosine local.part=0.5 server.lr=0.9",
    "fedrep": "personal.method=fedrep data.holdout=0.2 metrics=f1,accuracy split.unseen=1",
    "ditto": "personal.method=ditto data.holdout=0.2 stop.metric=holdout_accuracy stop.patience=12",
}


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_ten_kills_with_other_parts(tmp_path: Path, parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [word for setting in parts.split() for word in ("--set", setting)]
    monkeypatch.setattr(sys.modules[__name__], "RUN", [*RUN, "--algorithm", "fedavg", *settings])
    kill_and_resume(tmp_path, rounds=20, kills=10, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], IN_A_FILE, [*IN_A_FILE, "--set", "server.checkpoint_every=3"]])
def test_a_hundred_kills(tmp_path: Path, more: list[str]) -> None:
    hit = kill_and_resume(tmp_path, rounds=120, kills=100, seed=1, more=more)
    assert sum(hit.values()) == 100
    assert hit["during training"] > 20, hit
