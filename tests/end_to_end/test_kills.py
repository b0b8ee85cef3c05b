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


def is_writing_a_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoint").glob("*.safetensors.*.tmp"))


def wait_for_a_write(process: subprocess.Popen[bytes], folder: Path, rounds: int, more_seconds: float) -> None:
    """Until a checkpoint is being written, so many rounds after the first; TimeoutExpired unless the process ended."""
    file, first = folder / "rounds.jsonl", -1
    while process.poll() is None:
        done = file.read_bytes().count(b"\n") if file.exists() else 0
        if is_writing_a_checkpoint(folder):
            first = done if first < 0 else first
            if done >= first + rounds:
                process.wait(more_seconds)
                return
        time.sleep(0.001)


def kill_and_resume(
    tmp_path: Path, rounds: int, kills: int, seed: int, more: list[str] | None = None, in_a_write: bool = False
) -> dict[str, int]:
    """So many kills over as many lives as it takes; a life that ends by itself begins the next run.

    `more` does not change results, and is given to the runs that are killed only. `in_a_write`: kills are aimed at
    moments in which a checkpoint is being written.
    """
    more = more or []
    straight = tmp_path / "straight"
    began = time.monotonic()
    finish(straight, rounds, [])
    whole = time.monotonic() - began
    chance = random.Random(seed)
    done = number = 0
    hit = {"before the first round": 0, "during training": 0, "after it": 0, "in a write": 0}
    while done < kills:
        folder = tmp_path / f"run-{number}"
        number += 1
        while done < kills and not (folder / "summary.json").exists():
            process = start(folder, rounds, more)
            try:
                if in_a_write:
                    # The first and about half of the others at once: how long a write takes depends on the machine.
                    later = chance.choice((0.0, chance.uniform(0, 0.02))) if done else 0.0
                    wait_for_a_write(process, folder, chance.randrange(4), later)
                else:
                    # Most of a short life is importing torch: aim half of the kills at what comes after it.
                    early = chance.random() < 0.3
                    process.wait(chance.uniform(0, whole) if early else chance.uniform(0.5 * whole, whole))
            except subprocess.TimeoutExpired:
                process.kill()
                done += 1
                played = (folder / "rounds.jsonl").exists()
                ended = (folder / "summary.json").exists()
                hit["after it" if ended else "during training" if played else "before the first round"] += 1
                hit["in a write"] += is_writing_a_checkpoint(folder)
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
def test_two_kills_under_attack_with_the_clients_memory_in_a_file(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, rounds=20, kills=2, seed=3, more=IN_A_FILE)


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
    assert sum(hit.values()) - hit["in a write"] == 100
    assert hit["during training"] > 20, hit


ALWAYS_WRITING = ["--set", "server.checkpoint_every=1"]


@pytest.fixture
def large_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of 9 MB, which take about as long to write as a round to train: some are still being written then."""
    large = ["--set", "model.hidden=5000", "--set", "local.epochs=1", "--set", "local.batch=200"]
    monkeypatch.setattr(sys.modules[__name__], "RUN", [*RUN, *large, "--set", "engine.name=fused"])


@pytest.mark.usefixtures("large_state")
def test_two_kills_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    hit = kill_and_resume(tmp_path, rounds=12, kills=2, seed=2, more=ALWAYS_WRITING, in_a_write=True)
    assert hit["in a write"] > 0, hit


@pytest.mark.slow
@pytest.mark.usefixtures("large_state")
@pytest.mark.parametrize(
    "more", [ALWAYS_WRITING, [*ALWAYS_WRITING, *IN_A_FILE], ["--set", "server.checkpoint_seconds=0.3"]]
)
def test_thirty_kills_while_a_checkpoint_is_written(tmp_path: Path, more: list[str]) -> None:
    hit = kill_and_resume(tmp_path, rounds=30, kills=30, seed=4, more=more, in_a_write=True)
    assert hit["in a write"] > 10, hit
