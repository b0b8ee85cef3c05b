"""Several `fedgg compare` in one folder at the same time, killed at random and called again, while others read it."""

from __future__ import annotations

import csv
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROUNDS = 40
CALLS = ("0,1", "1,2", "2,0")  # two calls have every seed, so that they meet
SETTINGS = ["--algorithm", "fedavg", "--algorithm", "scaffold", "--model", "linear", "--set", "local.epochs=1"]


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedgg", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_three_calls_killed_at_random(jobs: str, tmp_path: Path) -> None:
    folder, chance, kills = tmp_path / "study", random.Random(int(jobs)), 0
    words = ["compare", *SETTINGS, "--rounds", str(ROUNDS), "--jobs", jobs, "--out", str(folder)]
    calls = {seeds: start(*words, "--seeds", seeds) for seeds in CALLS}
    reader: subprocess.Popen[str] | None = None
    while calls:
        time.sleep(chance.uniform(0.5, 3.0))
        for seeds, call in list(calls.items()):
            if call.poll() is not None:
                output, _ = call.communicate()
                assert call.returncode == 0, output
                assert "Traceback" not in output
                del calls[seeds]
        if calls and kills < 15:
            seeds = chance.choice(list(calls))
            calls[seeds].kill()
            output, _ = calls[seeds].communicate()
            assert "error" not in output
            if calls[seeds].returncode == -signal.SIGKILL:
                kills += 1
                calls[seeds] = start(*words, "--seeds", seeds)
            else:
                del calls[seeds]
        if reader is not None and reader.poll() is not None:
            output, _ = reader.communicate()
            assert reader.returncode == 0 or "nothing to report" in output, output
            assert "damaged" not in output
            assert "cannot be read" not in output
            reader = None
        if reader is None and folder.exists():
            reader = start("report", str(folder), "--out", str(tmp_path / "page.html"))
    if reader is not None:
        reader.communicate()

    study = json.loads((folder / "study.json").read_text())
    assert study["labels"] == ["fedavg", "scaffold"]
    assert study["seeds"] == [0, 1, 2]
    resumes = 0
    for run in (folder / place for places in study["runs"].values() for place in places.values()):
        rounds = [json.loads(line)["round"] for line in (run / "rounds.jsonl").read_text().splitlines()]
        assert rounds == [*range(1, ROUNDS + 1)]
        assert json.loads((run / "summary.json").read_text())["status"] == "finished"
        resumed = run / "resumes.jsonl"
        after = (
            [json.loads(line)["after_round"] for line in resumed.read_text().splitlines()] if resumed.exists() else []
        )
        assert after == sorted(after), "no run goes back to an earlier round than it was resumed from before"
        resumes += len(after)
    assert resumes <= kills * int(jobs)  # a run is taken up again after a kill and at no other time
    with (folder / "accuracy.csv").open() as file:
        assert [(row["algorithm"], row["runs"]) for row in csv.DictReader(file)] == [("fedavg", "3"), ("scaffold", "3")]
    assert "over seeds 0, 1, 2" in (folder / "tables.md").read_text(encoding="utf-8")
    assert '"seeds":[0,1,2]' in (folder / "report.html").read_text(encoding="utf-8")
    assert not list(folder.rglob("*.tmp"))
    assert not list(folder.glob(".process-*"))
