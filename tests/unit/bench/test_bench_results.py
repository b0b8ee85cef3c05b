"""Results computed from `bench.json`: ratios, flags, a table, a chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from fedgg.bench.results import bench_figure, bench_table, read_bench
from fedgg.errors import UserError
from fedgg.report.figure_style import save


def entry(name: str, seconds: list[float | None], accuracy: float | None = 0.5, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "label": f"the {name}",
        "kind": "loop",
        "threads": 1,
        "status": "measured",
        "why": None,
        "versions": {"torch": "2.13.0"},
        "start_seconds": 2.0,
        "first_round_seconds": 4.0,
        "round_seconds": seconds,
        "accuracy": accuracy,
        "peak_memory_bytes": 1_500_000_000,
        "idle_processor_share": 0.0,
        "others_cores": [0.0],
        **more,
    }


def write(folder: Path, *contenders: dict[str, Any], **more: Any) -> Path:
    workload = {"title": "CIFAR-10", "sentence": "FedAvg", "stand_in": False, "classes": 10}
    record = {
        "format": 1,
        "when": "2026-01-02T03:04:05+00:00",
        "finished": True,
        "machine": {"processor": "a processor", "cores": 2, "gpu": None},
        "code": {"fedgg": "0.1.0", "commit": "0123456789abcdef", "changed": False},
        "workload": workload,
        "conditions": {"device": "cpu", "load_before": 0.0, "memory": "PSS summed", "scored_after": 3},
        "reference": "tight-2",
        "contenders": list(contenders),
        **more,
    }
    file = folder / "bench.json"
    file.write_text(json.dumps(record))
    return file


def test_ratios_are_taken_turn_by_turn(tmp_path: Path) -> None:
    """A turn in which the machine was slow changes the seconds and not the ratio."""
    file = write(tmp_path, entry("tight-2", [2.0, 20.0, 2.0]), entry("other", [1.0, 10.0, None]))
    measured = read_bench(file).measured
    assert [contender.entry["name"] for contender in measured] == ["tight-2", "other"]  # by median seconds
    by_name = {contender.entry["name"]: contender for contender in measured}
    assert by_name["other"].ratio == 0.5
    assert by_name["other"].median == 5.5
    assert by_name["tight-2"].ratio == 1.0
    assert by_name["tight-2"].median == 2.0
    assert by_name["tight-2"].start == 4.0  # 2 s until ready and a first round 2 s longer than another


def test_flags(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        entry("tight-2", [2.0]),
        entry("good", [2.0], 0.48),
        entry("weak", [2.0], 0.40),
        entry("dead", [2.0], 0.11),
        entry("later", [2.0, None], status="failed", why="it fell over"),
        entry("busy", [2.0], idle_processor_share=0.5),
    )
    record = read_bench(file)
    flags = {contender.entry["name"]: contender.flag for contender in record.measured}
    assert flags["tight-2"] is flags["good"] is None
    assert "learns less" in (flags["weak"] or "")
    assert "does not learn" in (flags["dead"] or "")
    assert "it fell over" in (flags["later"] or "")
    table = bench_table(record)
    assert any("50% of a core" in note for note in table.notes)
    assert any(row[0] == "the dead (!)" for row in table.rows)


def test_without_the_reference_there_is_no_ratio(tmp_path: Path) -> None:
    table = bench_table(read_bench(write(tmp_path, entry("other", [1.0], None))))
    assert table.rows[0][3] == "–"
    assert table.rows[0][5] == "–"


def test_a_busy_machine_is_noted(tmp_path: Path) -> None:
    quiet = bench_table(read_bench(write(tmp_path, entry("tight-2", [1.0, 1.0], others_cores=[0.1, 0.02]))))
    busy = bench_table(read_bench(write(tmp_path, entry("tight-2", [1.0, 1.0], others_cores=[0.9, 0.7]))))
    assert not any("QUIET" in note for note in quiet.notes)
    assert any("0.8 cores" in note for note in busy.notes)


def test_a_stopped_benchmark_is_noted(tmp_path: Path) -> None:
    record = read_bench(write(tmp_path, entry("tight-2", [1.0]), finished=False))
    assert any("Stopped before the end" in note for note in bench_table(record).notes)


def test_the_chart_is_a_picture_and_the_same_each_time(tmp_path: Path) -> None:
    kinds = [entry(f"{kind} {i}", [1.0 + i, 2.0], kind=kind) for i, kind in enumerate(("fedgg", "loop", "peer"))]
    record = read_bench(write(tmp_path, entry("tight-2", [1.0, 1.5]), *kinds))
    first = save(bench_figure(record), tmp_path / "a.png")
    assert first.read_bytes() == save(bench_figure(record), tmp_path / "b.png").read_bytes()
    assert imread(first)[..., :3].std() > 0.01
    assert save(bench_figure(record), tmp_path / "a.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("content", ["", "[]", '{"format": 99}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(content)
    with pytest.raises(UserError, match="not a record"):
        read_bench(file)
