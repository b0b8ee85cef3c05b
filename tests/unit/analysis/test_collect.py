"""Runs, comparisons, whole trees and archives are found; what cannot be read is a problem with a name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from written_folders import write_run, write_study

from fedgg.analysis.collect import RunCollection
from fedgg.errors import UserError
from fedgg.runfolder.archive_file import write_archive
from fedgg.runfolder.read import read_study


def looked(*paths: Path) -> RunCollection:
    collection = RunCollection(paths)
    collection.refresh()
    return collection


def configured(folder: Path, name: str, algorithm: str, seed: int = 0, **more: Any) -> Path:
    write_run(folder, [0.1, 0.2])
    config = {"name": name, "seed": seed, "algorithm": {"name": algorithm}, "data": {"source": "digits"}, **more}
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    return folder


def test_a_comparison(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", {"A": [[0.1], [0.2]], "B": [[0.3], None]}, reference="B")
    (group,) = looked(folder).groups
    assert (group.study.labels, group.study.seeds, group.study.reference) == (("A", "B"), (0, 1), "B")
    assert group.study.missing == [("B", 1)]
    assert group.grouped_by is None


def test_single_runs_are_put_together(tmp_path: Path) -> None:
    paths = [
        configured(tmp_path / "a", "", "fedgg", split={"beta": 0.1}),
        configured(tmp_path / "b", "", "fedavg", split={"beta": 0.5}),
        configured(tmp_path / "c", "", "fedgg", 1, split={"beta": 0.1}),
    ]
    (group,) = looked(*paths).groups
    assert group.study.labels == ("fedavg", "fedgg")
    assert group.study.reference == "fedavg"
    assert sorted(group.study.runs["fedgg"]) == [0, 1]


def test_algorithms_from_files_and_from_python_are_named_by_their_classes(tmp_path: Path) -> None:
    names = {"a": "algos.py:New", "b": "python:main.<locals>.Mine", "c": "pack.age:Other"}
    paths = [configured(tmp_path / folder, "", algorithm) for folder, algorithm in names.items()]
    (group,) = looked(*paths).groups
    assert group.study.labels == ("New", "Mine", "Other")
    again = configured(tmp_path / "d", "", "old/algos.py:New")
    (group,) = looked(*paths, again).groups
    assert group.study.labels == ("New (algos.py)", "Mine", "Other", "New (old/algos.py)")


def test_what_would_share_a_name_is_told_apart(tmp_path: Path) -> None:
    rates = [configured(tmp_path / f"lr-{lr}", "", "fedavg", local={"lr": lr}) for lr in (0.1, 0.2)]
    (group,) = looked(*rates).groups
    assert group.study.labels == ("fedavg lr=0.1", "fedavg lr=0.2")
    twins = [configured(tmp_path / name, "same", "fedavg") for name in ("x", "y")]
    (group,) = looked(*twins).groups
    assert group.study.labels == (f"same ({tmp_path / 'x'})", f"same ({tmp_path / 'y'})")


def test_a_tree_of_runs_falls_into_its_data_and_splits(tmp_path: Path) -> None:
    for beta in (0.1, 0.5):
        for name, algorithm in (("FedAvg", "fedavg"), ("FedGG, text", "fedgg")):
            place = tmp_path / "digits" / f"{algorithm}-{beta}" / "seed-0"
            configured(place, f"{name}, beta {beta}", algorithm, split={"beta": beta})
    write_study(tmp_path / "deep" / "study", {"A": [[0.1]]}, reference="A")
    collection = looked(tmp_path)
    assert [group.study.labels for group in collection.groups] == [("A",)] + [("FedAvg", "FedGG, text")] * 2
    assert collection.problems == []


def test_archives_of_runs(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path / "study", {"A": [[0.1], [0.2]]}, reference="A"))
    file = tmp_path / "archive.json"
    write_archive([run for by_seed in study.runs.values() for run in by_seed.values()], file)
    (group,) = looked(file).groups
    assert sum(len(by_seed) for by_seed in group.study.runs.values()) == 2
    results = tmp_path / "results"
    results.mkdir()
    (results / "other.json").write_text("{}")
    assert "it holds no run" in looked(results).problems[0].why
    shutil.copy(file, results / "one.json")
    assert len(looked(results).groups) == 1
    assert looked(results).problems == []
    file.write_text("{}")
    assert "not an archive of runs" in looked(file).problems[0].why


def test_a_broken_run_is_a_problem_and_the_rest_stands(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", {"A": [[0.1], [0.2]], "B": [[0.3], [0.4]]}, reference="A")
    (folder / "run-0" / "seed-0" / "rounds.jsonl").write_text('{"round": 1}\n{"round": 1}\n')
    collection = looked(folder)
    (problem,) = collection.problems
    assert problem.path.endswith("seed-0")
    assert "line 2 has round 1 after round 1" in problem.why
    assert (problem.what, problem.shown) == ("is damaged and excluded from the averages", True)
    assert collection.groups[0].study.damaged("A") == [0]


@pytest.mark.parametrize(
    "line",
    [
        {"round": 1, "clients": [{"no": "client"}]},
        {"round": 1, "clients": 5},
        {"round": 1, "seconds": {"train": "long"}},
        {"round": 1, "readings": [1]},
        {"round": 1, "lost": [3]},
        {"round": 1, "bytes_up": "many"},
    ],
    ids=str,
)
def test_what_no_run_writes_is_a_problem(tmp_path: Path, line: dict[str, Any]) -> None:
    folder = write_run(tmp_path / "run", [0.1])
    (folder / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    collection = looked(folder)
    (problem,) = collection.problems
    assert problem.shown
    assert "rounds.jsonl is broken: line 1" in problem.why
    assert collection.groups[0].study.damaged("demo") == [0]
    assert not collection.refresh()


def test_a_split_of_words_is_a_problem(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.1])
    (folder / "partition.json").write_text('{"hash": "x", "counts": [["many"]]}')
    collection = looked(folder)
    assert "partition.json is broken" in collection.problems[0].why
    assert collection.groups[0].study.runs["demo"][0].complete  # all else is as it was


def test_folders_come_and_go(tmp_path: Path) -> None:
    collection = RunCollection([tmp_path / "later"])
    assert collection.refresh()
    assert not collection.refresh()
    assert "does not exist (yet)" in collection.problems[0].why
    (tmp_path / "later").mkdir()
    assert collection.refresh()
    assert "holds no run (yet)" in collection.problems[0].why
    run = write_run(tmp_path / "later" / "run", [0.1])
    assert collection.refresh()
    assert len(collection.groups) == 1
    run.rename(tmp_path / "elsewhere")
    assert collection.refresh()
    assert collection.groups == []


def test_nothing_named() -> None:
    with pytest.raises(UserError, match="name at least one folder"):
        RunCollection([])
