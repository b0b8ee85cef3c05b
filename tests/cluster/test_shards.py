"""Shards of a study in processes of their own, and one process for each of several devices."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import ALGORITHMS, assert_same, ended, resumes_of, rounds_done, runs_of, start, study
from safetensors.torch import load_file

from fedgg.analysis.collect import RunCollection
from fedgg.cluster.runners import runner_of
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.observer import Observer
from fedgg.lab.run_places import Shard, devices_from, machine_name, shard_from, shards_of
from fedgg.lab.study import Study, run_study
from fedgg.runfolder.locks import check_locking
from fedgg.runfolder.read import read_study

SHARDS = 8


def test_shards_are_balanced() -> None:
    """Whatever the numbers: of all runs and of the runs of a row, no shard has two more than another."""
    for rows, seeds, count in ((4, 6, 8), (3, 3, 8), (8, 3, 8), (1, 10, 4), (5, 7, 3), (2, 2, 6)):
        runs = [(seed, row) for seed in range(seeds) for row in range(rows)]
        shards = shards_of(runs, count, lambda run: run[1])
        for some in (shards, *([s for s, run in zip(shards, runs, strict=True) if run[1] == r] for r in range(rows))):
            sizes = [sum(shard == Shard(number + 1, count) for shard in some) for number in range(count)]
            assert max(sizes) - min(sizes) <= 1, (rows, seeds, count)
            assert sum(sizes) == len(some)


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "3/", "a/b", "-1/4", "1/0"])
def test_shards_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="write NUMBER/COUNT"):
        shard_from(text)


def test_lists_of_devices() -> None:
    assert devices_from("cuda:0,1") == ("cuda:0", "cuda:1")
    assert devices_from("cuda:0,cuda:0") == ("cuda:0", "cuda:0")
    assert devices_from("cpu,cpu") == ("cpu", "cpu")
    assert devices_from("cuda:1") is None
    assert devices_from("cuda") is None


def compared(folder: Path, **settings: Any) -> None:
    """Four short runs."""
    base = Experiment(
        rounds=3, split={"clients": 3}, local={"epochs": 1}, model={"name": "linear"}, **settings.pop("changes", {})
    )
    variants = {name: {"algorithm.name": name} for name in ("fedavg", "scaffold")}
    run_study(Study(base, variants, (0, 1), "fedavg"), folder, observer=Observer(), **settings)


def test_one_process_for_each_device(tmp_path: Path) -> None:
    """As on several GPUs, with CPUs in their place."""
    compared(tmp_path / "here")
    runner = runner_of("cpu,cpu", tmp_path / "devices", processes=None)
    compared(tmp_path / "devices", runner=runner)
    assert_same(tmp_path / "devices", tmp_path / "here")
    versions = json.loads((tmp_path / "devices" / "fedavg" / "seed-0" / "versions.json").read_text())
    assert versions["where"] == {"node": machine_name(), "device": "cpu"}
    assert "where" not in json.loads((tmp_path / "here" / "fedavg" / "seed-0" / "versions.json").read_text())
    assert read_study(tmp_path / "devices").runs["fedavg"][0].where == f"{machine_name()}, cpu"


@pytest.mark.slow
def test_stacks_on_several_devices(tmp_path: Path) -> None:
    """The code of GPUs on CPUs. Two stacks of two runs are other sums than one of four: last bits differ."""
    stacked = {"engine": {"name": "stacked"}}
    compared(tmp_path / "here", changes=stacked)
    runner = runner_of("cpu,cpu", tmp_path / "devices", processes=None)
    compared(tmp_path / "devices", changes=stacked, runner=runner)
    for run in runs_of(tmp_path / "here"):
        here, there = (load_file(tmp_path / name / run / "model.safetensors") for name in ("here", "devices"))
        for name, rows in here.items():
            torch.testing.assert_close(there[name], rows)
        assert json.loads((tmp_path / "devices" / run / "summary.json").read_text())["status"] == "finished"


def test_what_runs_wait_for(tmp_path: Path) -> None:
    """Seen by a reader while a shard is at work, and gone afterwards."""
    folder, seen = tmp_path / "study", list[dict[tuple[str, int], str]]()

    class Reader(Observer):
        def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
            collection = RunCollection([folder])
            collection.refresh()
            seen.append(collection.groups[0].study.waiting)

    base = Experiment(rounds=1, split={"clients": 3}, local={"epochs": 1}, model={"name": "linear"})
    variants = {name: {"algorithm.name": name} for name in ("fedavg", "scaffold")}
    study_of_four = Study(base, variants, (0, 1), "fedavg")
    run_study(study_of_four, folder, observer=Reader(), shard=Shard(1, 2))
    assert len(seen) == 2
    assert seen[0][("scaffold", 1)] == "waits for shard 2/2 of this study"
    assert ("fedavg", 0) not in seen[0]
    collection = RunCollection([folder])
    collection.refresh()
    assert collection.groups[0].study.waiting == {}
    assert len(collection.groups[0].study.missing) == 2


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    check_locking(tmp_path)
    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(UserError, match="cannot be shared by several jobs: its file system has no file locks"):
        check_locking(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_eight_shards_of_which_two_are_killed(tmp_path: Path) -> None:
    rounds, folder = 60, tmp_path / "study"
    expected = tmp_path / "expected"
    ended(start(*study(expected, "0-5", rounds, "--jobs", "2")))

    def shard(number: int) -> subprocess.Popen[str]:
        return start(*study(folder, "0-5", rounds, "--jobs", "1", "--shard", f"{number}/{SHARDS}"))

    calls = {number: shard(number) for number in range(1, SHARDS + 1)}
    until = time.monotonic() + 120
    while rounds_done(folder) < 200 and time.monotonic() < until:
        time.sleep(0.1)
    for number in (2, 5):
        calls[number].kill()
        calls[number].communicate()
        assert calls[number].returncode == -9, "it was killed while it worked"
        calls[number] = shard(number)
    outputs = [ended(call) for call in calls.values()]
    assert all("3 runs of 24" in output for output in outputs)
    assert_same(folder, expected)
    assert 1 <= sum(map(len, resumes_of(folder).values())) <= 2  # those of the two that were killed
    places = [json.loads(file.read_text())["where"]["shard"] for file in folder.glob("*/seed-*/versions.json")]
    assert sorted(places) == sorted(f"{number}/{SHARDS}" for number in range(1, SHARDS + 1) for _ in range(3))
    assert "over seeds 0, 1, 2, 3, 4, 5" in (folder / "tables.md").read_text(encoding="utf-8")
    assert json.loads((folder / "study.json").read_text())["labels"] == list(ALGORITHMS)
