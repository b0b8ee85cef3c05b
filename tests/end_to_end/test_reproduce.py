"""The quick version of the paper, killed and called again, called once more, archived, shown from the archive."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from calling import call

WORDS = ["reproduce", "table1", "table3", "fig1", "fig2", "--quick", "--rounds", "2", "--seeds", "1", "--jobs", "1"]
RUNS = 8  # four methods at two betas


def start(*words: str) -> subprocess.Popen[str]:
    """In a session of its own, so that a kill reaches everything it started."""
    command = [sys.executable, "-m", "fedgg", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(*words: str) -> str:
    process = start(*words)
    text, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return text


def histories(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Everything but the seconds, of every run."""
    found = {}
    for file in sorted(out.glob("digits/*/seed-*/rounds.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[str(file.parent.relative_to(out))] = [
            {key: value for key, value in line.items() if key not in ("seconds", "checksum")} for line in lines
        ]
    return found


def stamps(out: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in sorted(out.glob("digits/*/*/*"))}


def rows(file: Path) -> list[list[str]]:
    return list(csv.reader(file.read_text(encoding="utf-8").splitlines()))


def kill_in_the_middle(*words: str, out: Path) -> None:
    """By kill -9, as soon as the second run has written something."""
    process = start(*words)
    deadline = time.monotonic() + 120
    while len(list(out.glob("digits/*/seed-*/rounds.jsonl"))) < 2 and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def ended_well(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command prints, called within this process."""
    code, text, errors = call(words, monkeypatch)
    assert code == 0, errors
    return text


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished by one call, and archived."""
    out = tmp_path_factory.mktemp("reproduce") / "straight"
    with pytest.MonkeyPatch.context() as monkeypatch:
        text = ended_well([*WORDS, "--out", str(out), "--fold", str(out.parent / "archives" / "all.json")], monkeypatch)
    assert "The quick version" in text
    assert f"{RUNS} runs of 2 rounds, 0 of them finished" in text
    assert len(histories(out)) == RUNS
    return out


@pytest.mark.slow
def test_killed_and_called_again(straight: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    kill_in_the_middle(*WORDS, "--out", str(killed), out=killed)
    ended = list(killed.glob("digits/*/seed-*/summary.json"))
    assert len(ended) < RUNS
    finish(*WORDS, "--out", str(killed))
    assert histories(killed) == histories(straight)
    for name in ("table1.csv", "table3.csv", "fig1.csv", "fig2.csv"):
        assert (killed / name).read_bytes() == (straight / name).read_bytes()


def test_called_again_and_shown_from_the_archive(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stamps(straight)
    assert f"{RUNS} of them finished" in ended_well([*WORDS, "--out", str(straight)], monkeypatch)
    assert stamps(straight) == before, "a second call runs nothing"

    listing = ["reproduce", "table1", "--list", "--quick", "--rounds", "3", "--out", str(straight)]
    assert f"in {RUNS} finished runs on this device" in ended_well(listing, monkeypatch)

    shown = tmp_path / "shown"
    ended_well([*WORDS, "--from", str(straight.parent / "archives"), "--out", str(shown)], monkeypatch)
    for name in ("table1.csv", "table3.csv", "fig1.csv", "fig2.csv"):
        assert rows(shown / name) == rows(straight / name)
    assert not (shown / "digits").exists()
    page = (straight / "table1-table3-fig1-fig2.html").read_text(encoding="utf-8")
    assert page.count("<table") == 2
    assert page.count("<svg") == 2
    # One look, and one click from the paper's tables to every run and back.
    assert 'href="report.html"' in page
    for folder in (straight, shown):
        report = (folder / "report.html").read_text(encoding="utf-8")
        assert 'href="table1-table3-fig1-fig2.html"' in report
        assert re.findall(r"<style>.*?</style>", report, re.DOTALL) == re.findall(
            r"<style>.*?</style>", page, re.DOTALL
        )


def test_the_literature_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["reproduce", "literature-cpu", "--quick", "--rounds", "1", "--seeds", "1", "--jobs", "1"]
    text = ended_well([*words, "--out", str(tmp_path / "out")], monkeypatch)
    assert "in a protocol for a CPU" in text
    table = rows(tmp_path / "out" / "literature-cpu.csv")
    methods = [row[table[0].index("method")] for row in table[1:]]
    assert {"FedAvg", "SCAFFOLD", "FedACG", "FedGG, text", "FedLESAM", "FedWMSAM"} <= set(methods)
    assert "missing" not in {cell for row in table for cell in row}
    assert not any("printed" in column for column in table[0])


def test_the_list_needs_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = tmp_path / "none"
    text = ended_well(["reproduce", "--list", "--quick", "--rounds", "3", "--out", str(none)], monkeypatch)
    for words in ("table1", "fig3", "a probe of a few local steps", "epsilon"):
        assert words in text
    assert not none.exists()
