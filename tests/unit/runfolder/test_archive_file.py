"""An archive gives back what tables and figures read in the run folders; a broken one is named in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from written_folders import write_run, write_study

from fedgg.analysis.compare import compare
from fedgg.errors import UserError
from fedgg.runfolder.archive_file import archive_of, read_archive, records_in, write_archive
from fedgg.runfolder.read import read_run, read_study
from fedgg.runfolder.record_types import RunRecord, StudyRecord

INF = float("inf")


@pytest.fixture
def runs(tmp_path: Path) -> list[RunRecord]:
    """Three runs of different settings, one evaluated every other round, one diverged, with traffic and readings."""
    folders = [
        write_run(tmp_path / "a" / "seed-0", [0.1, 1 / 3, 0.7000000000000001], name="a"),
        write_run(tmp_path / "a" / "seed-1", [None, 0.5, None, 0.6], bytes_each_way=7, name="b", split_hash="other"),
        write_run(tmp_path / "b" / "seed-0", [0.2], status="diverged", name="c"),
    ]
    for number, folder in enumerate(folders):
        (folder / "versions.json").write_text(json.dumps({"commit": f"c{number // 2}", "device": "cpu", "model": "x"}))
        (folder / "config.toml").write_text(
            f"name = 'n'\nseed = {number}\nengine.precision = 'fp32'\nalgorithm = {{name='fedgg', mu={number / 10}}}\n"
        )
    return [read_run(folder) for folder in folders]


def through_json(runs: list[RunRecord]) -> list[RunRecord]:
    return records_in(json.loads(json.dumps(archive_of(runs))))


def test_everything_tables_and_figures_use_comes_back(runs: list[RunRecord]) -> None:
    for before, after in zip(runs, through_json(runs), strict=True):
        for one, other in zip(before.accuracy(), after.accuracy(), strict=True):
            assert np.array_equal(one, other)
        assert np.array_equal(before.megabytes(), after.megabytes())
        assert np.array_equal(before.megabytes(("up",)), after.megabytes(("up",)))
        assert after.numbers("train_loss")[1] == pytest.approx(before.numbers("train_loss")[1], rel=1e-5)
        assert before.numbers("test_loss")[0].tolist() == after.numbers("test_loss")[0].tolist()
        assert before.config == after.config
        assert before.partition == after.partition
        assert (before.status, before.summary) == (after.status, after.summary)
        assert after.versions is not None
        assert before.versions is not None
        assert after.versions == {key: value for key, value in before.versions.items() if key != "model"}


def test_shared_settings_splits_and_conditions_are_stored_once(runs: list[RunRecord]) -> None:
    content = archive_of(runs, note="why")
    assert content["base"] == {"name": "n", "algorithm.name": "fedgg", "engine.precision": "fp32"}
    assert [run["settings"] for run in content["runs"]][2] == {"seed": 2, "algorithm.mu": 0.2}
    assert len(content["conditions"]) == 2
    assert set(content["splits"]) == {"same", "other"}
    assert content["runs"][0]["bytes_up"] == 500_000  # one number where every round has the same


def test_readings_and_seconds(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line |= {"readings": {"cosine": 0.25 + number, "weight": None}, "seconds": {"train": 1.5, "evaluate": 0.5}}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text('{"status": "finished", "seconds": 4.0}')
    record = read_run(folder)
    (after,) = through_json([record])
    assert [line["readings"] for line in after.rounds] == [line["readings"] for line in record.rounds]
    assert record.seconds == after.seconds == 4.0


def test_a_run_that_is_not_over_is_left_out(tmp_path: Path) -> None:
    running = read_run(write_run(tmp_path / "run", [0.1], status=None))
    assert archive_of([running])["runs"] == []
    assert through_json([]) == []


def test_a_comparison_of_archived_runs_is_the_same(tmp_path: Path) -> None:
    curves = {"FedAvg": [[0.1, 0.5], [0.2, 0.4]], "Fast": [[0.5, 0.6], [0.1, 0.3]]}
    study = read_study(write_study(tmp_path / "study", curves, reference="FedAvg"))
    after: dict[str, dict[int, RunRecord]] = {label: {} for label in study.labels}
    for label, by_seed in study.runs.items():
        after[label] = dict(zip(by_seed, through_json(list(by_seed.values())), strict=True))
    again = StudyRecord(study.path, study.labels, study.seeds, study.reference, after)
    assert compare(again) == compare(study)


def test_the_file_has_a_line_for_each_run(tmp_path: Path, runs: list[RunRecord]) -> None:
    file = tmp_path / "deep" / "archive.json"
    assert write_archive(runs, file) == 3
    assert sum(line.startswith('{"place"') for line in file.read_text().splitlines()) == 3
    assert [record.config for record in read_archive(file)] == [record.config for record in runs]
    empty = tmp_path / "empty.json"
    write_archive([], empty)
    assert read_archive(empty) == []


def test_infinite_settings_are_plain_json(tmp_path: Path, runs: list[RunRecord]) -> None:
    """`Infinity`, which Python's json writes, is refused by other readers."""
    for mu, record in zip((INF, -INF, [0.5, INF]), runs, strict=True):
        record.config["algorithm"]["mu"] = mu
    file = tmp_path / "archive.json"
    write_archive(runs, file)
    json.loads(file.read_text(), parse_constant=pytest.fail)
    assert [record.config["algorithm"]["mu"] for record in read_archive(file)] == [INF, -INF, [0.5, INF]]


@pytest.mark.parametrize(
    "content", ["no json", "[]", "{}", '{"format": 99, "runs": []}', '{"format": 1, "runs": [{}]}']
)
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(UserError, match=r"bad\.json") as caught:
        read_archive(file)
    assert "\n" not in str(caught.value)
