"""Folders are read as they are, torn last lines and running runs included; broken ones are named in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from written_folders import write_run, write_study

import fedgg
from fedgg.errors import UserError
from fedgg.runfolder import read as folders
from fedgg.runfolder.read import read_run, read_study
from fedgg.runfolder.validation import check_summary


def one_line(caught: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_is_read_back(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [None, 0.5, None, 0.75]))
    rounds, accuracy = run.accuracy()
    assert rounds.tolist() == [2, 4]
    assert accuracy.tolist() == [0.5, 0.75]
    assert run.megabytes().tolist() == [2.0, 4.0]
    assert run.numbers("test_loss")[0].tolist() == [2, 4]
    assert run.numbers("train_loss")[1].tolist() == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert run.status == "finished"
    assert run.config["split"]["scheme"] == "iid"
    assert run.partition is not None
    assert run.partition["hash"] == "same"


def test_the_document_has_every_key_and_every_number_is_checked() -> None:
    """Of a run with each optional section and feature that adds keys."""
    more: list[dict[str, Any]] = [{"data": {"holdout": 0.2}}, {"privacy": {}}, {"attack": {"kind": "nan"}}]
    for sections in more:
        run = fedgg.run(fedgg.Experiment(rounds=1, split={"clients": 3}, local={"epochs": 1}, **sections))
        text = (Path(__file__).parents[3] / "docs" / "run-folder.md").read_text(encoding="utf-8")
        assert [key for key in (*run.summary, *run.rounds[0]) if f"`{key}`" not in text] == []
        check_summary(run.summary)
        for key, value in run.summary.items():
            if isinstance(value, int | float):
                with pytest.raises(ValueError, match=f"has {key} = 'x'"):
                    check_summary(run.summary | {key: "x"})


def test_a_run_that_has_just_started(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("name = 'young'\n")
    run = read_run(tmp_path)
    assert run.status == "unfinished"
    assert run.partition is None
    assert run.rounds == []
    assert [len(array) for array in (*run.accuracy(), run.megabytes())] == [0, 0, 0]


@pytest.mark.parametrize("torn", [b'{"round": 3, "test_accu', b'{"round": 3, "why": "\xc3', b'{"round"\n'])
def test_a_torn_last_line_is_left_out(tmp_path: Path, torn: bytes) -> None:
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    with (folder / "rounds.jsonl").open("ab") as file:
        file.write(torn)
    assert [line["round"] for line in read_run(folder).rounds] == [1, 2]


def test_not_a_number_is_not_an_evaluation(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.1, float("nan"), 0.3])
    assert read_run(folder).accuracy()[0].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("config.toml", "name = ", "config.toml"),
        ("rounds.jsonl", '{"round": 1\n{"round": 2}\n', "line 1"),
        ("rounds.jsonl", '{"round": 1}\n[2]\n', "line 2"),
        ("rounds.jsonl", '{"round": 1}\n{"round": 1}\n', "round 1 after round 1"),
        ("summary.json", "{", "summary.json"),
        ("partition.json", "[]", "partition.json"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, file: str, text: str, named: str) -> None:
    folder = write_run(tmp_path / "run", [0.1])
    (folder / file).write_text(text)
    with pytest.raises(UserError) as caught:
        read_run(folder)
    assert named in one_line(caught)


def test_what_is_no_folder_is_named(tmp_path: Path) -> None:
    for read, place in ((read_run, tmp_path / "none"), (read_run, tmp_path), (read_study, tmp_path)):
        with pytest.raises(UserError) as caught:
            read(place)
        assert str(place) in one_line(caught)


def test_a_study_is_read_with_its_runs(tmp_path: Path) -> None:
    folder = write_study(tmp_path, {"A": [[0.1], [0.2]], "B": [[0.3], None], "C": [None, [0.4]]}, reference="A")
    (folder / "run-2" / "seed-0").mkdir()
    study = read_study(folder)
    assert study.labels == ("A", "B", "C")
    assert study.seeds == (0, 1)
    assert study.runs["A"][1].accuracy()[1].tolist() == [0.2]
    assert study.missing == [("B", 1), ("C", 0)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": 2}, "format 2"),
        ({"labels": []}, "labels"),
        ({"labels": ["A", "A"]}, "twice"),
        ({"seeds": ["0"]}, "seeds"),
        ({"reference": "Z"}, "'Z'"),
        ({"runs": {}}, "runs"),
        ({"runs": {"A": {"0": "../elsewhere"}}}, "../elsewhere"),
        ({"runs": {"A": {"0": "/etc"}}}, "/etc"),
        ({"runs": {"A": {"0": "nothing-here"}}}, "none of the runs"),
    ],
)
def test_broken_studies_are_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    file = write_study(tmp_path, {"A": [[0.1]]}, reference="A") / "study.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError) as caught:
        read_study(tmp_path)
    assert named in one_line(caught)


def test_this_room_needs_no_torch_and_no_other_room() -> None:
    # A bare `fedgg` stands in for the real one, whose front door may import the whole library: what is asked here is
    # what the report room itself imports.
    script = (
        "import importlib.util, sys, types\n"
        "bare = types.ModuleType('fedgg')\n"
        "bare.__path__ = importlib.util.find_spec('fedgg').submodule_search_locations\n"
        "sys.modules['fedgg'] = bare\n"
        "import fedgg.analysis.compare, fedgg.report.run_figures, fedgg.runfolder.read, fedgg.report.tables\n"
        "rooms = {'.'.join(name.split('.')[:2]) for name in sys.modules if name.startswith('fedgg.')}\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert 'matplotlib.pyplot' not in sys.modules, 'pyplot'\n"
        "names = ('analysis', 'errors', 'files', 'older_python', 'report', 'runfolder')\n"
        "assert rooms == {f'fedgg.{name}' for name in names}, rooms\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr


def test_a_run_that_ends_while_it_is_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last round and its summary come between two files that are read."""
    folder = write_run(tmp_path / "run", [0.1], status=None)
    whole = write_run(tmp_path / "whole", [0.1, 0.2])

    def read_and_end(file: Path, *_: Any) -> bytes:
        content = file.read_bytes()
        if file.name == "rounds.jsonl":
            for name in ("rounds.jsonl", "summary.json"):
                (folder / name).write_bytes((whole / name).read_bytes())
        return content

    monkeypatch.setattr(folders, "read_bytes", read_and_end)
    assert read_run(folder).status == "unfinished"
    assert read_run(folder).status == "finished"
