"""Runs found again in archived files, in one precision for a whole table; the time of missing runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedgg.paper import find_or_run
from fedgg.paper.find_or_run import ArchivedRuns, Estimate
from fedgg.paper.items import chosen_items
from fedgg.paper.plan import PlannedMethod, ReproductionPlan
from fedgg.runfolder.archive_file import write_archive
from fedgg.runfolder.record_types import RunRecord

PLAN = ReproductionPlan(chosen_items(["table1"]), ("cifar10",), (0,))
METHODS = PLAN.table_methods("cifar10", "beta 0.5")


def record(method: PlannedMethod, precision: str) -> RunRecord:
    experiment = method.experiment(0).changed({"engine.device": "cuda", "engine.precision": precision})
    config = experiment.model_dump(mode="json", exclude_none=True)
    rounds = [{"round": 1, "test_accuracy": 0.5, "readings": {}}]
    return RunRecord(Path("a/b/c"), config, rounds, None, {"status": "finished"})


def found(archived: ArchivedRuns) -> list[str]:
    records = [archived.record(method, 0) for method in METHODS]
    return ["" if one is None else one.config["engine"]["precision"] for one in records]


def test_the_precision_of_most_runs_is_taken_for_all(tmp_path: Path) -> None:
    write_archive([record(method, "fp32") for method in METHODS[:2]], tmp_path / "a.json")
    write_archive([record(method, "bf16") for method in METHODS[:3]], tmp_path / "b.json")
    assert found(ArchivedRuns(tmp_path)) == ["bf16", "bf16", "bf16", ""]
    assert found(ArchivedRuns(tmp_path, "fp32")) == ["fp32", "fp32", "bf16", ""]


def test_the_time_of_an_item_does_not_depend_on_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same data set and model, and steps of other numbers and sizes."""
    monkeypatch.setattr(find_or_run, "seconds_a_step", lambda experiment, runs=1: experiment.local.batch / 1000)
    names = ["table1", "literature-cpu", "niid-bench"]

    def estimate(chosen: list[str]) -> dict[str, float]:
        plan = ReproductionPlan(chosen_items(chosen), ("cifar10",), (0,))
        times = Estimate(plan, tmp_path, processes=2)
        return {item.name: times.missing([item]).seconds for item in plan.items}

    together = estimate(names)
    assert together == {name: estimate([name])[name] for name in names}
    # 100 rounds of an epoch of ten clients of 500 images in batches of 50, of each of thirty rows, two at a time.
    assert together["literature-cpu"] == pytest.approx(30 * 100 * 10 * 10 * 0.05 / 2)
