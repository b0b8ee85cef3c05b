"""What privacy was spent stands beside what it bought, in every form of the tables, and only where some was."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from written_folders import write_run, write_study

from fedgg.analysis.collect import Group
from fedgg.analysis.compare import compare
from fedgg.report.export import write_tables
from fedgg.report.page_data import page_group
from fedgg.report.tables import runs_table, score_table
from fedgg.runfolder.archive_file import archive_of, records_in
from fedgg.runfolder.read import read_run
from fedgg.runfolder.record_types import StudyRecord

CURVE = [0.1, 0.2]


@pytest.fixture
def study(tmp_path: Path) -> StudyRecord:
    runs = {
        "open": {0: read_run(write_run(tmp_path / "open", CURVE))},
        "noisy": {
            0: read_run(write_run(tmp_path / "noisy-0", CURVE, epsilons=[3.0, 5.125])),
            1: read_run(write_run(tmp_path / "noisy-1", CURVE, epsilons=[3.0, 6.0], status="spent")),
        },
        "clipped": {0: read_run(write_run(tmp_path / "clipped", CURVE, epsilons=[None, None]))},
        "young": {0: read_run(write_run(tmp_path / "young", CURVE, epsilons=[1.0, 2.0], status=None))},
    }
    return StudyRecord(tmp_path, tuple(runs), (0, 1), "open", runs)


def test_a_run_knows_what_it_spent(study: StudyRecord) -> None:
    assert [study.runs[label][0].epsilon for label in study.labels] == [None, 5.125, math.inf, 2.0]
    assert study.runs["noisy"][0].delta == 1e-5
    assert study.runs["open"][0].delta is None


def test_a_lost_history_spends_no_less(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", CURVE, epsilons=[3.0, 5.0])
    first = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)[0]
    (folder / "rounds.jsonl").write_text(first)
    assert read_run(folder).epsilon == 5.0


def test_the_accuracy_table(study: StudyRecord) -> None:
    table = score_table(compare(study))
    at = table.columns.index("epsilon")
    assert [row[at] for row in table.rows] == ["–", "6.00", "infinite", "–"]
    assert any("at delta 1e-05" in note for note in table.notes)


def test_the_accountant_is_named(study: StudyRecord, tmp_path: Path) -> None:
    """A run from before accountants were named had Rényi's."""
    assert [study.runs[label][0].accountant for label in study.labels] == [None, "rdp", None, "rdp"]
    (note,) = (note for note in score_table(compare(study)).notes if note.startswith("epsilon: "))
    assert note.endswith("Accountant: rdp.")
    tight = read_run(write_run(tmp_path / "tight", CURVE, epsilons=[1.0, 2.0], accountant="pld, secret cohorts"))
    assert tight.accountant == "pld, secret cohorts"
    (back,) = records_in(archive_of([tight]))
    assert back.accountant == "pld, secret cohorts"
    both = StudyRecord(tmp_path, ("a", "b"), (0,), "a", {"a": study.runs["noisy"], "b": {0: tight}})
    (note,) = (note for note in score_table(compare(both)).notes if note.startswith("epsilon: "))
    assert "Accountant: pld, secret cohorts and rdp (bounds of different tightness" in note


def test_every_form_of_every_table(study: StudyRecord, tmp_path: Path) -> None:
    write_tables([Group(study)], tmp_path / "tables")
    for name in ("accuracy", "runs"):
        for form in ("md", "tex", "csv"):
            text = (tmp_path / "tables" / f"{name}.{form}").read_text(encoding="utf-8")
            assert "epsilon" in text
            assert "infinite" in text
    with (tmp_path / "tables" / "runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["epsilon"] for row in rows] == ["–", "5.125", "6.0", "infinite", "2.0"]
    assert [row["delta"] for row in rows] == ["–", *["1e-05"] * 4]


def test_the_page(study: StudyRecord) -> None:
    data = page_group(Group(study)).data
    assert data["private"]
    assert [row["epsilon"] for row in data["results"]["test_accuracy"]["rows"]] == [None, "6.00", "infinite", None]
    assert any(note.startswith("epsilon: ") for note in data["results"]["test_accuracy"]["notes"])


def test_nothing_private_no_column(tmp_path: Path) -> None:
    folder = write_study(tmp_path, {"A": [CURVE]}, reference="A")
    run = read_run(folder / "run-0" / "seed-0")
    study = StudyRecord(tmp_path, ("A",), (0,), "A", {"A": {0: run}})
    assert "epsilon" not in score_table(compare(study)).columns
    assert "epsilon" not in runs_table(study).columns
    assert not page_group(Group(study)).data["private"]


def test_folded_runs_keep_it(study: StudyRecord) -> None:
    (back,) = records_in(archive_of([study.runs["noisy"][0]]))
    assert (back.epsilon, back.delta) == (5.125, 1e-5)
