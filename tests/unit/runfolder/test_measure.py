"""Measures: how values are compared and written, and those over clients against NumPy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_folders import RMSE, metric, write_run, write_study

from fedgg.analysis.collect import RunCollection
from fedgg.core.metrics import METRICS
from fedgg.errors import UserError
from fedgg.runfolder.archive_file import archive_of, records_in
from fedgg.runfolder.measure import ACCURACY, LARGEST_VALUE, SHARES, Measure, first_score, three_digits
from fedgg.runfolder.read import read_run, read_study
from fedgg.runfolder.record_types import RunRecord

ERROR = Measure("rmse", "holdout", higher_is_better=False, percent=False)


def run_of(scores: list[dict[str, Any]], metrics: list[dict[str, Any]] | None = None) -> RunRecord:
    rounds = [{"round": number, **line} for number, line in enumerate(scores, start=1)]
    return RunRecord(Path("run"), {}, rounds, None, None, {"metrics": metrics} if metrics else None)


def test_a_run_without_a_list_of_metrics_has_accuracy() -> None:
    run = run_of([{"test_accuracy": 0.5, "test_loss": 1.0}, {"train_loss": 2.0}])
    assert run.metrics == (ACCURACY,)
    assert [*run.measures] == ["test_accuracy", "test_loss", "train_loss"]
    assert [*map(list, run.scores(ACCURACY))] == [[1], [0.5]]


def test_measures_are_those_that_rounds_have_the_primary_one_first() -> None:
    by_client = {"0": 0.5, "1": 0.7}
    line = {"personal_accuracy": 0.6, "personal_accuracy_by_client": by_client, "unseen_accuracy": 0.4}
    line |= {"test_accuracy": 0.5, "test_top5": 0.9, "test_top5_by_class": {"a": 0.9}, "test_loss": 1.0}
    run = run_of([line], [metric("top5"), metric("accuracy")])
    over, of_clients = (
        [f"{where}_accuracy{end}" for end in ("", "_worst_client", "_worst_decile", "_spread")]
        for where in ("personal", "client")
    )
    assert [*run.measures] == ["test_top5", "test_accuracy", *over, "unseen_accuracy", *of_clients, "test_loss"]
    titles = [run.measures[key].title for key in ("test_top5", "personal_accuracy", over[1], "unseen_accuracy")]
    worst = "personal accuracy of the worst client"
    assert titles == ["test top-5 accuracy", "personal accuracy", worst, "unseen-client accuracy"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=45), st.booleans())
def test_measures_over_clients_agree_with_numpy(values: list[float], higher: bool) -> None:
    line = {"holdout_x_by_client": {str(client): value for client, value in enumerate(values)}}
    run = run_of([line], [metric("x", higher_is_better=higher, percent=False)])
    worst, decile, deviation = (
        run.measures[f"holdout_x_{over}"] for over in ("worst_client", "worst_decile", "spread")
    )
    worst_first = np.sort(values) if higher else np.sort(values)[::-1]
    assert worst.at(line) == worst_first[0]
    assert decile.at(line) == pytest.approx(np.mean(worst_first[: max(1, len(values) // 10)]), abs=1e-9)
    assert deviation.at(line) == pytest.approx(np.std(values), rel=1e-9, abs=1e-7)
    assert (worst.higher_is_better, decile.higher_is_better, deviation.higher_is_better) == (higher, higher, False)


def test_the_worst_tenth_is_of_whole_clients_and_at_least_one() -> None:
    scores = [{"holdout_accuracy_by_client": {str(c): c / 100 for c in range(count)}} for count in (9, 10, 25)]
    run = run_of(scores)
    assert run.scores(run.measures["holdout_accuracy_worst_decile"])[1].tolist() == [0.0, 0.0, 0.005]


def test_a_value_that_is_no_number_or_too_large_to_square_is_missing() -> None:
    values = [0.5, None, 10 * LARGEST_VALUE]
    run = run_of([{"holdout_rmse": value, "holdout_rmse_by_client": {"0": value}} for value in values], [RMSE])
    for measure in (ERROR, replace(ERROR, over="worst_client"), replace(ERROR, over="spread")):
        assert run.scores(measure)[0].tolist() == [1]


def test_a_metric_of_another_direction_is_another_metric() -> None:
    run = run_of([{"test_x": 1.0, "holdout_x_by_client": {"0": 1.0}}], [metric("x")])
    same = run.metrics[0]
    assert run.defines(same)
    assert not run.defines(replace(same, higher_is_better=False))
    assert not run.defines(replace(same, percent=False))
    assert run.defines(run.measures["holdout_x_spread"])
    assert not run.scores(replace(same, higher_is_better=False))[0].size


@pytest.mark.parametrize(
    ("value", "written"),
    [
        *((0.3409, "0.341"), (0.34, "0.340"), (12.345, "12.3"), (1234.5, "1234"), (0, "0"), (-0.5, "-0.500")),
        *((1.234e-7, "1.23e-7"), (2.5e6, "2.50e6"), (999999, "999999"), (0.9996, "1.000")),
    ],
)
def test_numbers_have_three_digits(value: float, written: str) -> None:
    assert three_digits(value) == written


def test_values_are_written_with_their_deviation() -> None:
    assert ACCURACY.with_deviation(0.625, 0.01) == "62.5 ± 1.0"
    assert ACCURACY.difference(-0.0123, None) == "-1.2"
    assert ERROR.with_deviation(0.25061, 0.0018) == "0.2506 ± 0.0018"  # as many decimals as the deviation
    assert ERROR.with_deviation(0.25061, 0.0) == "0.251 ± 0"
    assert ERROR.with_deviation(123456.7, 0.5) == "123457 ± 0.50"
    assert ERROR.difference(-0.003, 0.013) == "-0.003 ± 0.013"
    assert ERROR.difference(0.0, None) == "+0"


def test_a_round_names_its_primary_metric_first() -> None:
    assert first_score({"round": 1, "train_loss": 2.0}) is None
    assert first_score({"round": 1, "test_accuracy": None, "test_loss": 1.0}) is None
    measure, value = first_score({"round": 1, "test_rmse": 0.5, "test_loss": 1.0}) or (ACCURACY, 0.0)
    assert (measure.title, measure.percent, value) == ("test RMSE", False, 0.5)
    personal = first_score({"round": 1, "personal_accuracy": 0.5, "personal_accuracy_by_client": {}}) or (ACCURACY, 0.0)
    assert (personal[0].title, personal[1]) == ("personal accuracy", 0.5)
    final = first_score({"status": "finished", "final_test_top5": 0.5, "highest_test_top5": 0.6}, "final_")
    assert final is not None
    assert (final[0].title, final[0].percent, final[1]) == ("test top-5 accuracy", True, 0.5)


def test_metrics_of_the_library_are_known_without_a_folder() -> None:
    assert {name for name, kind in METRICS.items() if kind.percent} == SHARES


# Folders --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ("rmse", "its metrics are 'rmse', not a list"),
        ([{"name": "rmse"}], "lacks one of name, higher_is_better, percent"),
        ([RMSE | {"percent": 1}], "metrics.percent = 1, not true or false"),
        ([RMSE | {"name": "../x"}], "metrics.name = '../x', not a name"),
    ],
)
def test_a_list_of_metrics_that_no_run_writes(tmp_path: Path, listed: Any, why: str) -> None:
    folder = write_run(tmp_path / "run", [0.5])
    (folder / "versions.json").write_text(json.dumps({"format": 1, "metrics": listed}))
    with pytest.raises(UserError, match=rf"versions\.json is broken: .*{why}"):
        read_run(folder)
    collection = RunCollection([folder])
    collection.refresh()
    (problem,) = collection.problems
    assert "versions.json is broken" in problem.why
    assert why in problem.why


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("test_rmse", "high"),
        ("personal_rmse_by_client", {"a": 1.0}),
        ("holdout_rmse_by_client", [1.0]),
        ("test_recall_by_class", {"a": "b"}),
    ],
)
def test_scores_that_no_run_writes(tmp_path: Path, key: str, value: Any) -> None:
    folder = write_run(tmp_path / "run", [0.5], metrics=[RMSE], scores=[{key: value}])
    with pytest.raises(UserError, match=f"has {key} = "):
        read_run(folder)


def test_an_archive_keeps_every_score_and_the_metrics(tmp_path: Path) -> None:
    scores = [
        {"personal_rmse": 1 / 3, "holdout_rmse_by_client": {"0": 0.1}, "test_mae": number / 7} for number in (1, 2)
    ]
    metrics = [RMSE, metric("mae", higher_is_better=False, percent=False)]
    run = read_run(write_run(tmp_path / "run", [1 / 3, 1 / 7], metrics=metrics, scores=scores))
    (again,) = records_in(json.loads(json.dumps(archive_of([run]))))
    assert again.metrics == run.metrics
    # The values of single clients are left out, as the archive's description says.
    assert [*again.measures] == ["test_rmse", "test_mae", "personal_rmse", "client_rmse", "test_loss", "train_loss"]
    for key in ("test_rmse", "test_mae", "personal_rmse"):
        assert again.scores(again.measures[key])[1].tolist() == run.scores(run.measures[key])[1].tolist()


def test_a_wrong_name_is_answered_with_those_there_are(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, {"A": [[0.5]]}, reference="A", metrics=[RMSE]))
    assert study.measure().key == "test_rmse"
    assert study.measure("test_loss").key == "test_loss"
    others = r"choose from test_rmse, test_loss, train_loss, or let runs record it \(--set metrics=accuracy,mae\)"
    with pytest.raises(UserError, match=f"do not record 'test_mae': {others}"):
        study.measure("test_mae")
    with pytest.raises(UserError, match=r"choose from test_rmse, test_loss, train_loss$"):
        study.measure("holdout_rmse")
    with pytest.raises(UserError, match="do not record 'rmse': did you mean 'test_rmse'"):
        study.measure("rmse")


def test_personal_models_are_compared_with_a_global_one_on_the_same_examples(tmp_path: Path) -> None:
    scores: dict[str, dict[str, Any]] = {
        "Avg": {"test_accuracy": 0.5, "holdout_accuracy": 0.3, "holdout_accuracy_by_client": {"0": 0.2, "1": 0.4}},
        "Per": {"personal_accuracy": 0.9, "personal_accuracy_by_client": {"0": 0.8, "1": 1.0}},
    }
    path = write_study(tmp_path, {"Avg": [[0.5]], "Per": [[0.5]]}, reference="Avg")
    for label, by_seed in read_study(path).runs.items():
        (by_seed[0].path / "rounds.jsonl").write_text(json.dumps({"round": 1, **scores[label]}) + "\n")
    study = read_study(path)
    assert study.measure().key == "client_accuracy"
    for key, expected in (("client_accuracy", [0.3, 0.9]), ("client_accuracy_worst_client", [0.2, 0.8])):
        finals = [study.runs[label][0].scores(study.measure(key))[1].tolist() for label in ("Avg", "Per")]
        assert finals == [[value] for value in expected]
