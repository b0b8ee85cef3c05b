"""A comparison over several splits is measured split by split, each against a reference of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedgg.analysis.collect import study_parts
from fedgg.analysis.compare import compare
from fedgg.runfolder.record_types import RunRecord, StudyRecord

SEEDS = (0, 1, 2)


def record(seed: int, final: float, beta: float, **algorithm: Any) -> RunRecord:
    config = {"seed": seed, "data": {"source": "digits"}, "split": {"beta": beta}, "algorithm": algorithm}
    rounds = [{"round": 1, "test_accuracy": final + 0.1 * seed, "bytes_up": 1, "bytes_down": 1}]
    return RunRecord(Path("x"), config, rounds, {"hash": f"{beta} {seed}"}, {"status": "finished", "rounds_done": 1})


def study(rows: dict[str, dict[str, Any]], reference: str) -> StudyRecord:
    runs = {label: {seed: record(seed, **own) for seed in SEEDS} for label, own in rows.items()}
    return StudyRecord(Path("study"), tuple(rows), SEEDS, reference, runs)


TWO_BETAS = {
    f"{name}, {beta}": {"final": final - beta, "beta": beta, "name": name}
    for beta in (0.5, 0.1)
    for name, final in (("fedavg", 0.6), ("fedgg", 0.61), ("moon", 0.5))
}


def test_each_split_has_its_own_reference() -> None:
    first, second = study_parts(study(TWO_BETAS, "fedavg, 0.5"))
    assert (first.title, second.title) == ("split.beta = 0.5", "split.beta = 0.1")
    assert (first.study.reference, second.study.reference) == ("fedavg, 0.5", "fedavg, 0.1")
    assert second.study.labels == ("fedavg, 0.1", "fedgg, 0.1", "moon, 0.1")
    assert all(row.against_reference is None or row.against_reference.paired for row in compare(second.study).rows)


def test_a_sweep_or_what_has_no_second_reference_stays_whole() -> None:
    grid = {f"{m} {b}": {"final": 0.5, "beta": b, "name": "fedgg", "mu": m} for b in (0.1, 1.0) for m in (1, 2)}
    lone = {label: own for label, own in TWO_BETAS.items() if label != "fedavg, 0.1"}
    one = {label: own for label, own in TWO_BETAS.items() if own["beta"] == 0.5}
    single = one | {"fedavg, 0.1": TWO_BETAS["fedavg, 0.1"]}
    for rows in (grid, lone, one, single):
        whole = study(rows, next(iter(rows)))
        (part,) = study_parts(whole)
        assert (part.title, part.study) == ("", whole)
    begun = study(TWO_BETAS, "fedavg, 0.5")
    begun.runs["moon, 0.1"].clear()
    assert len(study_parts(begun)) == 1
