"""A sweep is recognised by its settings; rows of different algorithms are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedgg.analysis.chart_data import sweep_grid
from fedgg.runfolder.record_types import RunRecord, StudyRecord


def study(configs: dict[str, dict[str, Any]]) -> StudyRecord:
    runs = {label: {0: RunRecord(Path(label), config, [], None, None)} for label, config in configs.items()}
    return StudyRecord(Path(), tuple(runs), (0,), next(iter(runs)), runs)


def mu(value: float, **more: Any) -> dict[str, Any]:
    return {"name": f"mu={value}", "seed": 0, "algorithm": {"name": "fedgg", "mu": value}, **more}


def test_one_axis_in_order() -> None:
    found = sweep_grid(study({"b": mu(0.1), "a": mu(0.001), "c": mu(10)}))
    assert found is not None
    assert found.values == {"algorithm.mu": (0.001, 0.1, 10)}
    assert found.places == {"b": (1,), "a": (0,), "c": (2,)}


def test_classes_on_an_axis_are_shown_by_their_names() -> None:
    models = ("mlp", "nets/small.py:Net", "nets/large.py:Net")
    found = sweep_grid(study({name: mu(0.1, model={"name": name}) for name in models}))
    assert found is not None
    assert found.values == {"model.name": ("mlp", "Net (small.py)", "Net (large.py)")}


def test_two_axes_with_a_hole() -> None:
    pairs = [(m, lr) for m in (0.1, 1.0) for lr in (0.01, 0.1)][:3]
    found = sweep_grid(study({f"{m} {lr}": mu(m, local={"lr": lr}) for m, lr in pairs}))
    assert found is not None
    assert list(found.values) == ["algorithm.mu", "local.lr"]
    assert found.places["1.0 0.01"] == (1, 0)


def test_settings_that_come_with_a_choice_are_no_axis() -> None:
    rules = {"median": {"rule": "median"}, "trimmed": {"rule": "trimmed_mean", "trim": 0.1}}
    found = sweep_grid(study({label: mu(0.1, robust=robust) for label, robust in rules.items()}))
    assert found is not None
    assert found.values == {"robust.rule": ("median", "trimmed_mean")}


def test_no_sweep() -> None:
    assert sweep_grid(study({"a": mu(0.1)})) is None
    assert sweep_grid(study({"a": mu(0.1), "b": {"algorithm": {"name": "fedavg"}}})) is None
    assert sweep_grid(study({"a": {"algorithm": {"name": "fedsgd"}}, "b": {"algorithm": {"name": "fedavg"}}})) is None
    # Settings that always change together are no grid.
    assert sweep_grid(study({str(at): mu(at, local={"lr": at}) for at in range(1, 6)})) is None


def test_a_rule_that_is_off_is_a_place_on_its_axis() -> None:
    found = sweep_grid(study({"plain": mu(0.1), "median": mu(0.1, robust={"rule": "median"})}))
    assert found is not None
    assert found.values == {"robust.rule": ("none", "median")}


def test_methods_with_settings_of_their_own_are_no_sweep() -> None:
    """Four rows with four learning rates and two algorithms fill half of a grid."""
    rows = {f"{name} {lr}": (name, lr) for name, lr in (("a", 0.1), ("a", 0.2), ("b", 0.3), ("b", 0.4))}
    named = {label: {"model": {"name": name}, "local": {"lr": lr}} for label, (name, lr) in rows.items()}
    assert sweep_grid(study({label: mu(0.1, **more) for label, more in named.items()})) is None
