"""Runs found again in archived files: one precision for a whole table where several are there."""

from __future__ import annotations

from pathlib import Path

from fedgg.paper.find_or_run import ArchivedRuns
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
