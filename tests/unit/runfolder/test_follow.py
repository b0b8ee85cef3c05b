"""A followed run is read once: what is new is added, what was cut is forgotten, what is broken is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from written_folders import write_run

from fedgg.runfolder.read import FollowedRun, read_bytes


def line(number: int) -> str:
    return json.dumps({"round": number, "test_accuracy": number / 10, "bytes_up": 1, "bytes_down": 1}) + "\n"


def rounds(followed: FollowedRun) -> list[int]:
    assert followed.record is not None, followed.problem
    return [told["round"] for told in followed.record.rounds]


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", [0.1, 0.2], status=None)
    followed = FollowedRun(folder)
    assert followed.refresh()
    assert not followed.refresh()
    before = followed.record
    read: list[int] = []

    def counting(file: Path, limit: int | None = None, start: int = 0) -> bytes:
        content = read_bytes(file, limit, start)
        read.append(len(content))
        return content

    with (folder / "rounds.jsonl").open("a") as file:
        file.write(line(3))
    monkeypatch.setattr("fedgg.runfolder.read.read_bytes", counting)
    assert followed.refresh()
    assert rounds(followed) == [1, 2, 3]
    assert read == [len(line(3))]
    assert before is not None
    assert len(before.rounds) == 2  # an older record does not change under its reader


def test_a_line_on_its_way_waits(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.1], status=None)
    followed = FollowedRun(folder)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(line(2)[:20])
    followed.refresh()
    assert rounds(followed) == [1]
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(line(2)[20:])
    followed.refresh()
    assert rounds(followed) == [1, 2]


def test_a_history_that_is_cut_is_read_anew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.1, 0.2, 0.3], status=None)
    followed = FollowedRun(folder)
    followed.refresh()
    beside = folder / "new"
    beside.write_text(line(1))
    beside.replace(folder / "rounds.jsonl")
    followed.refresh()
    assert rounds(followed) == [1]
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(line(2))
    followed.refresh()
    assert rounds(followed) == [1, 2]


def test_the_end_and_the_resumes_are_seen(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.1], status=None)
    followed = FollowedRun(folder)
    followed.refresh()
    assert followed.record is not None
    assert followed.record.status == "unfinished"
    (folder / "resumes.jsonl").write_text('{"after_round": 1, "when": "now", "notes": []}\n{"torn')
    (folder / "summary.json").write_text('{"status": "finished"}')
    assert followed.refresh()
    assert followed.record.status == "finished"
    assert followed.record.resumes == ({"after_round": 1, "when": "now", "notes": []},)
    (folder / "federation").mkdir()
    (folder / "federation" / "events.jsonl").write_text('{"who": "client 2"}\n{"torn')
    assert followed.refresh()
    assert followed.record.processes == ({"who": "client 2"},)


def test_trouble_is_named_and_passes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    followed = FollowedRun(folder)
    followed.refresh()
    good = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text("= half")
    followed.refresh()
    assert followed.record is None
    assert "config.toml is broken" in (followed.problem or "")
    (folder / "config.toml").write_text(good)
    followed.refresh()
    assert rounds(followed) == [1, 2]
    shutil.rmtree(folder)
    followed.refresh()
    assert "config.toml is not there" in (followed.problem or "")
