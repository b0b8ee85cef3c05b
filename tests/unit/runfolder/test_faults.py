"""What is wrong with a run folder is said, the rest stands, and no mean takes half a run for a whole one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from written_folders import write_run, write_study

from fedgg.analysis.collect import Problem, RunCollection
from fedgg.analysis.compare import compare
from fedgg.analysis.verdict import conclude
from fedgg.report.page import report_html
from fedgg.report.tables import runs_table, score_table
from fedgg.runfolder.checksums import append_checked
from fedgg.runfolder.read import read_run
from fedgg.runfolder.record_types import RunRecord, StudyRecord

CURVE = [0.1, 0.2, 0.3, 0.4]


def looked(folder: Path) -> tuple[StudyRecord, list[Problem]]:
    collection = RunCollection([folder])
    collection.refresh()
    return collection.groups[0].study, collection.problems


def the_run(folder: Path) -> tuple[RunRecord, Problem]:
    study, (problem,) = looked(folder)
    return study.runs["demo"][0], problem


def keep_lines(run: Path, *kept: int) -> None:
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    (run / "rounds.jsonl").write_text("".join(lines[number - 1] for number in kept))


def spoil_line(run: Path, number: int) -> None:
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    lines[number - 1] = "nonsense\n"
    (run / "rounds.jsonl").write_text("".join(lines))


@pytest.mark.parametrize(
    ("damage", "said", "left"),
    [
        (lambda run: keep_lines(run, 1, 2), "ends at round 2, but summary.json counts 4 rounds", [1, 2]),
        (lambda run: keep_lines(run), "has no round, but summary.json counts 4 rounds", []),
        (lambda run: (run / "rounds.jsonl").unlink(), "has no round, but summary.json counts 4 rounds", []),
        (lambda run: keep_lines(run, 1, 2, 4), "rounds.jsonl lacks round 3", [1, 2, 4]),
        (lambda run: keep_lines(run, 3, 4), "rounds.jsonl lacks rounds 1 to 2", [3, 4]),
        (lambda run: spoil_line(run, 2), "rounds.jsonl is broken: line 2", [1, 3, 4]),
        (lambda run: spoil_line(run, 4), "rounds.jsonl is broken: line 4", [1, 2, 3]),
    ],
    ids=["short", "empty", "gone", "gap", "late", "line", "last line"],
)
def test_a_history_that_is_not_whole(
    tmp_path: Path, damage: Callable[[Path], None], said: str, left: list[int]
) -> None:
    folder = write_run(tmp_path / "run", CURVE)
    damage(folder)
    run, problem = the_run(folder)
    assert said in problem.why
    assert (problem.what, problem.shown) == ("is damaged and excluded from the averages", True)
    assert (run.status, run.complete, run.sound) == ("damaged", False, False)
    assert [line["round"] for line in run.rounds] == left  # and its curve is shown


def test_whoever_reads_a_short_history_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", CURVE)
    keep_lines(folder, 1, 2)
    assert read_run(folder).status == "damaged"


def test_a_run_under_way_is_not_damaged(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", CURVE, status=None)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "test_')
    study, problems = looked(folder)
    assert problems == []
    assert study.runs["demo"][0].status == "unfinished"


def test_half_a_run_is_in_no_mean(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", {"A": [CURVE] * 3, "B": [[0.5, 0.6, 0.7, 0.8]] * 3}, reference="A")
    keep_lines(folder / "run-1" / "seed-2", 1, 2)
    (folder / "run-1" / "seed-1" / "config.toml").unlink()
    study, problems = looked(folder)
    comparison = compare(study)
    row = comparison.rows[1]
    assert (row.finished, row.damaged, row.unfinished) == (1, 2, 0)
    assert row.final is not None
    assert (row.final.mean, row.final.n) == (0.8, 1)
    assert score_table(comparison).rows[1][1] == "1, 2 damaged"
    assert any("B: seeds 1, 2 excluded from the averages (damaged" in note for note in comparison.notes)
    said = conclude(study, comparison).text
    assert said.endswith("2 runs of B are damaged and excluded from the averages.")
    assert not said.startswith("So far")  # there is nothing to wait for
    assert [Path(problem.path).name for problem in problems] == ["seed-1", "seed-2"]
    assert "config.toml is not there" in problems[0].why
    assert any("B, seed 2: rounds.jsonl ends at round 2" in note for note in runs_table(study).notes)


def test_nothing_but_damage(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", CURVE)
    keep_lines(folder, 1)
    study, _ = looked(folder)
    assert conclude(study, compare(study)).text == "The run is damaged, so there is no result."


@pytest.mark.parametrize("name", ["rounds.jsonl", "summary.json"])
def test_a_folder_that_has_lost_its_settings(tmp_path: Path, name: str) -> None:
    """By itself, and below a folder; one that is only about to begin is no trouble."""
    run = write_run(tmp_path / "all" / "one", CURVE)
    other = write_run(tmp_path / "all" / "two", CURVE)
    for file in run.iterdir():
        if file.name != name:
            file.unlink()
    for path in (run, tmp_path / "all"):
        collection = RunCollection([path])
        collection.refresh()
        assert [problem.path for problem in collection.problems] == [str(run)]
        assert "config.toml is not there" in collection.problems[0].why
    assert collection.groups[0].study.runs["demo"][0].path == other
    (run / name).unlink()
    (run / "partition.json").write_text("{}")
    _, problems = looked(tmp_path / "all")
    assert problems == []


@pytest.mark.parametrize("content", ["", "  ", "{", "{}", "[]", "\x00", '{"status": 3}', '{"status": ["finished"]}'])
def test_a_broken_summary_hides_no_run(tmp_path: Path, content: str) -> None:
    whole, half = write_run(tmp_path / "whole", CURVE), write_run(tmp_path / "half", CURVE)
    for folder in (whole, half):
        (folder / "summary.json").write_text(content)
    keep_lines(half, 1, 2)
    run, problem = the_run(whole)
    assert run.status == "finished"
    assert "summary.json is broken" in problem.why
    assert "counts as finished, since rounds.jsonl has all rounds" in problem.why
    run, problem = the_run(half)
    assert run.status == "unfinished"
    assert "counts as unfinished" in problem.why
    assert (problem.what, problem.shown) == ("is incomplete", True)


@pytest.mark.parametrize("content", [None, "", "{", "[]"])
@pytest.mark.parametrize("name", ["partition.json", "versions.json"])
def test_other_files_that_are_missed(tmp_path: Path, name: str, content: str | None) -> None:
    folder = write_run(tmp_path / "run", CURVE)
    if content is None:
        (folder / name).unlink(missing_ok=True)
    else:
        (folder / name).write_text(content)
    study, problems = looked(folder)
    assert study.runs["demo"][0].complete
    if content is None and name == "versions.json":
        assert problems == []
    else:
        assert problems[0].why.startswith(f"{name} is")
        assert "not known" in problems[0].why


def test_what_is_wrong_stands_on_the_page(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", {"A": [CURVE, CURVE]}, reference="A")
    keep_lines(folder / "run-0" / "seed-1", 1, 2)
    collection = RunCollection([folder])
    collection.refresh()
    page = report_html(collection)
    assert "seed-1 is damaged and excluded from the averages: rounds.jsonl ends at round 2" in page
    assert not collection.refresh()


def test_what_is_mended_is_forgotten(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", CURVE)
    good = (folder / "rounds.jsonl").read_text()
    summary = (folder / "summary.json").read_text()
    spoil_line(folder, 2)
    (folder / "summary.json").write_text("")
    collection = RunCollection([folder])
    collection.refresh()
    assert len(collection.problems) == 1
    (folder / "rounds.jsonl").write_text(good)
    (folder / "summary.json").write_text(summary)
    assert collection.refresh()
    assert collection.problems == []
    assert collection.groups[0].study.runs["demo"][0].complete


def test_a_history_longer_than_its_summary_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", CURVE)
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "rounds_done": 3}))
    run, problem = the_run(folder)
    assert run.complete
    assert "ends at round 4, but summary.json counts 3 rounds" in problem.why


def test_a_changed_line_of_the_log_of_processes_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", CURVE)
    events = folder / "federation" / "events.jsonl"
    events.parent.mkdir()
    for client in (1, 2):
        append_checked(events, {"when": "now", "after_round": 1, "who": f"client {client}", "what": "ended"})
    assert looked(folder)[1] == []
    whole = events.read_text()
    events.write_text(whole.replace("client 1", "client 3"))
    assert "federation/events.jsonl is damaged: line 1 does not fit its checksum" in the_run(folder)[1].why
    # It is a log without a count: docs/run-folder.md says that missing lines at its end are not noticed.
    events.write_text(whole.splitlines(keepends=True)[0])
    assert looked(folder)[1] == []
