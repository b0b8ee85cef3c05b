"""Several calls, one after another or at the same time, in one study folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from observers import Events

import fedgg
from fedgg.analysis.collect import RunCollection
from fedgg.analysis.compare import compare
from fedgg.errors import UserError
from fedgg.lab import study_folder
from fedgg.lab.config import Experiment
from fedgg.lab.parallel_runs import run_all
from fedgg.lab.run_processes import Job
from fedgg.lab.store import Store
from fedgg.lab.study import Study, run_study
from fedgg.older_python import tomllib
from fedgg.report.page_data import command_again
from fedgg.report.tables import score_table
from fedgg.runfolder.read import read_study

SMALL: dict[str, Any] = {
    "rounds": 2,
    "split": {"clients": 3},
    "local": {"epochs": 1, "batch": 64},
    "model": {"name": "linear"},
    "algorithm": {"name": "fedavg"},
}
ROWS: dict[str, dict[str, Any]] = {"a": {}, "b": {"local.lr": 0.05}}


def go(
    folder: Path, labels: str, seeds: tuple[int, ...], heard: Any = lambda run, kind, what: None, **changes: Any
) -> None:
    base = Experiment(**SMALL).changed(changes)
    study = Study(base, {label: ROWS.get(label, {}) for label in labels}, seeds, labels[0])
    run_study(study, folder, processes=1, observer=Events(heard), command=f"{labels} {seeds}")


def listing(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "study.json").read_text())
    return content


def test_calls_add_up(tmp_path: Path) -> None:
    go(tmp_path, "ab", (1,))
    go(tmp_path, "ab", (0,))
    go(tmp_path, "b", (2,))
    known = listing(tmp_path)
    assert known["labels"] == ["a", "b"]
    assert known["seeds"] == [0, 1, 2]
    assert known["reference"] == "a"  # a single row decides nothing
    assert {label: [*runs] for label, runs in known["runs"].items()} == {"a": ["0", "1"], "b": ["0", "1", "2"]}
    assert known["commands"] == ["ab (1,)", "ab (0,)", "b (2,)"]
    assert known["command"] == "b (2,)"


def test_rows_of_different_seeds_are_compared(tmp_path: Path) -> None:
    go(tmp_path, "ab", (0, 1))
    go(tmp_path, "b", (2,))
    study = read_study(tmp_path)
    assert study.missing == []
    assert study.size == 5
    found = compare(study)
    assert [(row.finished, row.unfinished) for row in found.rows] == [(2, 0), (3, 0)]
    assert found.rows[1].against_reference is not None
    assert found.rows[1].against_reference.n == 2  # the seeds that both have
    assert any("Rows have different seeds" in note and "a seeds 0, 1; b seeds 0, 1, 2" in note for note in found.notes)
    assert score_table(found).rows[1][1] == "3"
    collection = RunCollection([tmp_path])
    collection.refresh()
    assert collection.groups[0].study.missing == []
    assert not collection.problems
    again = command_again(study)
    assert again is not None
    files = [tomllib.loads(part.partition("\nEND\n")[0]) for part in again.split("<<'END'\n")[1:]]
    assert [(file["seeds"], [*file["variants"]]) for file in files] == [([0, 1], ["a", "b"]), ([2], ["b"])]
    assert again.count("--out again") == 2


def test_a_label_is_one_experiment(tmp_path: Path) -> None:
    go(tmp_path, "ab", (0,))
    before = (tmp_path / "study.json").read_bytes()
    with pytest.raises(
        UserError, match=r"has the row 'a' already, as another experiment \(local\.lr = 0\.01 there, 0\.5"
    ):
        go(tmp_path, "a", (1,), **{"local.lr": 0.5})
    assert (tmp_path / "study.json").read_bytes() == before
    assert not (tmp_path / "a" / "seed-1").exists()
    with pytest.raises(UserError, match="two variants would share the folder 'a'"):
        go(tmp_path, "A", (0,))
    go(tmp_path, "a", (1,), rounds=3)  # further is the same experiment
    (tmp_path / "study.json").write_text(json.dumps({**listing(tmp_path), "experiments": {}}))  # as older ones are
    with pytest.raises(UserError, match=r"local\.lr = 0\.01 there, 0\.5 here"):
        go(tmp_path, "a", (2,), **{"local.lr": 0.5})


def test_a_label_has_one_data_set(tmp_path: Path) -> None:
    def data(shift: float) -> tuple[Any, ...]:
        x, y = np.random.default_rng(0).normal(shift, size=(300, 4)), np.arange(300) % 3
        return x, y, x, y

    fedgg.compare([fedgg.FedAvg()], SMALL, seeds=(0,), data=data(0), out=tmp_path)
    fedgg.compare([fedgg.FedAvg()], SMALL, seeds=(1,), data=data(0), out=tmp_path)
    with pytest.raises(UserError, match="other data or settings"):
        fedgg.compare([fedgg.FedAvg()], SMALL, seeds=(2,), data=data(1), out=tmp_path)
    found = fedgg.compare([fedgg.FedProx()], SMALL, seeds=(0,), data=data(0), out=tmp_path)
    assert {label: [*seeds] for label, seeds in found.final.items()} == {"FedAvg": [0, 1], "FedProx": [0]}


def test_what_never_began_is_forgotten_when_nobody_is_left_to_begin_it(tmp_path: Path) -> None:
    def stop(run: str, kind: str, what: Any) -> None:
        if kind == "ended":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, "ab", (0,), stop)
    assert listing(tmp_path)["labels"] == ["a", "b"]
    assert list(tmp_path.glob(".process-*")) == []
    go(tmp_path, "a", (0,))
    assert listing(tmp_path)["labels"] == ["a"]
    with study_folder._at_work(tmp_path):  # another process
        go(tmp_path, "b", (0,))
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path, "ab", (1,), stop)
        go(tmp_path, "a", (0,))
        assert [*listing(tmp_path)["runs"]["b"]] == ["0", "1"]
    (tmp_path / ".process-gone").touch()  # of a killed process
    go(tmp_path, "a", (0,))
    assert [*listing(tmp_path)["runs"]["b"]] == ["0"]
    assert list(tmp_path.glob(".process-*")) == []


@pytest.mark.parametrize("content", [None, "{", '{"format": 1, "labels": ["a"], "seeds": [0], "runs": {"a": {}}}'])
def test_runs_on_disk_are_listed_whatever_became_of_the_list(content: str | None, tmp_path: Path) -> None:
    go(tmp_path, "ab", (0, 1))
    (tmp_path / "study.json").unlink()
    if content is not None:
        (tmp_path / "study.json").write_text(content)
    (tmp_path / "other" / "seed-0").mkdir(parents=True)
    (tmp_path / "other" / "seed-0" / "config.toml").write_text("name = 'not a row'\n")
    go(tmp_path, "a", (2,))
    assert {label: [*runs] for label, runs in listing(tmp_path)["runs"].items()} == {
        "a": ["0", "1", "2"],
        "b": ["0", "1"],
    }


# At the same time ----------------------------------------------------------------------------------------------------


def experiment(seed: int, engine: str) -> Experiment:
    return Experiment(**SMALL, seed=seed, engine={"name": engine})


@pytest.mark.parametrize("engine", ["loop", "stacked", "workers"])
def test_a_run_of_another_process_is_left_for_last_and_waited_for(engine: str, tmp_path: Path) -> None:
    """The first of three runs is locked; the other process goes when the last of the others is done."""
    jobs = [Job(f"run {n}", experiment(n, engine), tmp_path / str(n), None) for n in range(3)]
    told: list[tuple[str, str]] = []
    other = Store(jobs[0].folder).locked()
    other.__enter__()

    def heard(run: str, kind: str, what: Any) -> None:
        if kind in ("started", "ended") or (kind == "notice" and "another process" in what):
            told.append((run, kind))
        if (run, kind) == ("run 0", "notice") and "another process" in what:
            threading.Timer(0.1, other.__exit__, (None, None, None)).start()

    run_all(jobs, 1 if engine == "loop" else 2, Events(heard))
    assert [name for name, kind in told if kind == "ended"][-1] == "run 0"
    assert told.index(("run 0", "notice")) > told.index(("run 2", "started"))
    assert sorted(name for name, kind in told if kind == "ended") == ["run 0", "run 1", "run 2"]
    assert [len(Store(job.folder).rounds()) for job in jobs] == [2, 2, 2]


@pytest.mark.slow
def test_a_pool_of_processes_leaves_it_for_last_too(tmp_path: Path) -> None:
    jobs = [Job(f"run {n}", experiment(n, "loop"), tmp_path / str(n), None) for n in range(3)]
    ended: list[str] = []
    other = Store(jobs[0].folder).locked()
    other.__enter__()

    def heard(run: str, kind: str, what: Any) -> None:
        if kind == "ended":
            ended.append(run)
        if len(ended) == 2 and kind == "ended":
            other.__exit__(None, None, None)

    run_all(jobs, 2, Events(heard))
    assert ended[-1] == "run 0"
    assert sorted(ended) == ["run 0", "run 1", "run 2"]


LABELS = "ab"
CALLS = ((0, 1), (1, 2), (2, 0))  # two calls have every seed, so that they meet


def one_call(folder: str, seeds: tuple[int, ...], rounds: int) -> None:
    """In a process of its own; says what it begins and plays."""

    def heard(run: str, kind: str, what: Any) -> None:
        if kind in ("started", "round"):
            line = [run, kind, what[0] if kind == "started" else what["round"]]
            with (Path(folder).parent / "events.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    go(Path(folder), LABELS, seeds, heard, rounds=rounds)


def killed_at_random(kills: int, chance: random.Random, start: Callable[[tuple[int, ...]], Any], look: Any) -> int:
    """Calls at the same time, each started again when it was killed; how many kills there were."""
    running, done = {seeds: start(seeds) for seeds in CALLS}, 0
    next_kill = time.monotonic() + chance.uniform(0.2, 0.6)
    while running:
        for seeds, process in list(running.items()):
            if not process.is_alive():
                assert process.exitcode == 0
                del running[seeds]
        if running and done < kills and time.monotonic() > next_kill:
            seeds = chance.choice(list(running))
            os.kill(running[seeds].pid, signal.SIGKILL)
            running[seeds].join()
            if running[seeds].exitcode == -signal.SIGKILL:
                done += 1
                running[seeds] = start(seeds)
            next_kill = time.monotonic() + chance.uniform(0.1, 0.4)
        look()
        time.sleep(0.02)
    return done


@pytest.mark.parametrize(("kills", "rounds"), [(1, 4), pytest.param(60, 12, marks=pytest.mark.slow)])
def test_three_calls_in_one_folder_killed_at_random(kills: int, rounds: int, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedgg.engines.workers.process", "fedgg.lab.study", "fedgg.analysis.collect"])
    collection = RunCollection([folder])

    def start(seeds: tuple[int, ...]) -> Any:
        process = context.Process(target=one_call, args=(str(folder), seeds, rounds))
        process.start()
        return process

    def look() -> None:
        collection.refresh()
        assert [problem for problem in collection.problems if "(yet)" not in problem.why] == []

    done = killed_at_random(kills, random.Random(kills), start, look)
    assert done > 0
    study = read_study(folder)
    assert study.labels == ("a", "b")
    assert study.seeds == (0, 1, 2)
    assert study.missing == []
    for label in LABELS:
        for seed in study.seeds:
            record = study.runs[label][seed]
            assert record.status == "finished"
            assert [line["round"] for line in record.rounds] == [*range(1, rounds + 1)]
    assert [row.finished for row in compare(study).rows] == [3, 3]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    # A kill costs one round at most: no run was played a second time.
    assert sum(kind == "round" for _, kind, _ in events) <= len(LABELS) * 3 * rounds + done
    for name in {name for name, _, _ in events}:
        begun = [number for of, kind, number in events if of == name and kind == "started"]
        assert begun == sorted(begun), f"{name} began again at an earlier round"
