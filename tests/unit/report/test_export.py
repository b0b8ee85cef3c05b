"""Figures and tables of a report as files, and its scalars as TensorBoard's events."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from written_folders import RMSE, write_run, write_study

from fedgg.analysis.chart_data import six_digits
from fedgg.analysis.collect import Group, RunCollection
from fedgg.errors import UserError
from fedgg.report.data_figures import split_figures
from fedgg.report.export import check_tensorboard, scalars, write_events, write_figures, write_tables
from fedgg.report.run_figures import clients_figure, curves_figure, score_figure
from fedgg.runfolder.read import read_study


@pytest.fixture
def groups(tmp_path: Path) -> list[Group]:
    folder = write_study(tmp_path / "study", {"A, $x$": [[0.1, 0.2]], "A $x$": [[0.3, 0.4]]}, reference="A $x$")
    for at in (0, 1):
        place = folder / f"run-{at}" / "seed-0"
        (place / "config.toml").write_text(f"seed = 0\n[local]\nlr = {at + 0.5}\n")
        split = {"hash": "same", "counts": [[1, 2], [3, 4]], "classes": ["a", "b"]}
        (place / "partition.json").write_text(json.dumps(split))
        lines = [
            {
                "round": n,
                "test_accuracy": n / 10,
                "train_loss": 1 / n,
                "bytes_up": 5,
                "bytes_down": 6,
                "readings": {"drift": n, "odd": None},
                "clients": [{"client": 0, "loss": 1.0}, {"client": 1, "loss": 2.0}],
                "seconds": {"train": 0.5},
            }
            for n in (1, 2)
        ]
        (place / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    collection = RunCollection([folder])
    collection.refresh()
    assert collection.problems == []
    return collection.groups


def test_figures(groups: list[Group], tmp_path: Path) -> None:
    told: list[str] = []
    files = write_figures(groups, tmp_path / "figures", told.append)
    names = {"accuracy", "split-seed-0", "diagnostics", "clients-seed-0", "sweep"}
    assert {file.name for file in files} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert "drawing sweep" in told
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG" if file.suffix == ".png" else b"<?xml")
    before = {file: file.read_bytes() for file in files}
    write_figures(groups, tmp_path / "figures")
    assert {file: file.read_bytes() for file in files} == before


def test_tables(groups: list[Group], tmp_path: Path) -> None:
    files = write_tables([groups[0], groups[0]], tmp_path / "tables")
    assert len(files) == 2 * 3 * 3
    places = sorted(path.name for path in (tmp_path / "tables").iterdir())
    assert places == ["1-sweep-over-lr", "2-sweep-over-lr"]
    with (tmp_path / "tables" / places[0] / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["algorithm"], row["seed"], row["final"]) for row in rows] == [
        ("A, $x$", "0", "0.2"),
        ("A $x$", "0", "0.2"),
    ]
    assert r"A, \$x\$" in (tmp_path / "tables" / places[0] / "accuracy.tex").read_text()


def test_files_by_another_measure(tmp_path: Path) -> None:
    """An error, where lower is better: its own names, words and numbers, in tables, figures and events."""
    by_client = {str(client): client / 10 for client in range(4)}
    scores = [{"holdout_rmse": 0.15, "holdout_rmse_by_client": by_client, "test_recall_by_class": {"cat": 0.5}}]
    run = write_run(tmp_path / "run", [0.75, 0.5], metrics=[RMSE], scores=scores)
    collection = RunCollection([run])
    collection.refresh()
    (group,) = collection.groups
    (record,) = group.study.records
    first, second = (values for _, _, values in scalars(record))
    over = {"holdout_rmse_worst_client": 0.3, "holdout_rmse_worst_decile": 0.3, "holdout_rmse_spread": 0.111803}
    assert first.items() >= {"test_rmse": 0.75, "holdout_rmse": 0.15, "test_recall_by_class/cat": 0.5, **over}.items()
    assert second["test_rmse"] == 0.5
    assert "holdout_rmse" not in second
    write_tables([group], tmp_path / "tables")
    written = (tmp_path / "tables" / "test_rmse.md").read_text()
    assert "**Test RMSE over seed 0 (lower is better)**" in written
    assert "| algorithm | runs | final | lowest |" in written
    assert "| demo | 1 | 0.500 | 0.500 |" in written
    assert "final test RMSE" in (tmp_path / "tables" / "target.tex").read_text()
    assert "is at most the target" in (tmp_path / "tables" / "target.md").read_text()
    (row,) = csv.DictReader((tmp_path / "tables" / "runs.csv").read_text().splitlines())
    assert (row["final"], row["lowest"]) == ("0.5", "0.5")
    write_tables([group], tmp_path / "worst", "holdout_rmse_worst_client")
    assert "| demo | 1 | 0.300 | 0.300 |" in (tmp_path / "worst" / "holdout_rmse_worst_client.md").read_text()
    assert "test_rmse.png" in {file.name for file in write_figures([group], tmp_path / "figures")}
    axes = score_figure(group.study, group.measure("holdout_rmse_spread")).axes[0]
    assert axes.get_ylabel() == "spread of hold-out RMSE over clients"
    assert [text.get_text() for text in axes.get_yticklabels() if "%" in text.get_text()] == []
    assert clients_figure(group.study, 0).axes[0].get_ylabel() == "hold-out RMSE"
    assert [axis.get_ylabel() for axis in curves_figure(record).axes] == ["RMSE", "loss"]


def test_events(groups: list[Group], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'fedgg[tensorboard]'")
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    folder = tmp_path / "events"
    check_tensorboard(folder)
    assert write_events(groups, folder) == 2
    places = sorted(path.name for path in folder.iterdir())
    assert len(places) == 2  # names that differ in odd signs only stay apart
    (file,) = (folder / places[0] / "seed-0").iterdir()
    found = [(e.step, v.tag, v.simple_value) for e in LegacyEventFileLoader(str(file)).Load() for v in e.summary.value]
    assert (2, "test_accuracy", pytest.approx(0.2)) in found
    assert (1, "diagnostics/drift", 1.0) in found
    assert not any(tag == "diagnostics/odd" for _, tag, _ in found)
    with pytest.raises(UserError, match="already contains event files"):
        check_tensorboard(folder)


def test_events_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'fedgg\[tensorboard\]'"):
        check_tensorboard(tmp_path)


def test_rows_that_are_split_differently_have_pictures_of_their_own(groups: list[Group]) -> None:
    study = groups[0].study
    (first, second), seed = study.runs.values(), 0
    assert [name for name, _ in split_figures(study)] == ["split-seed-0"]
    second[seed] = replace(second[seed], partition=(first[seed].partition or {}) | {"hash": "another"})
    assert [name for name, _ in split_figures(study)] == ["split-seed-0", "split-seed-0-2-a-x"]


def labels_of(axes: Axes, which: str) -> list[str]:
    axes.figure.canvas.draw()
    return [tick.get_text() for tick in getattr(axes, f"get_{which}ticklabels")()]


@pytest.mark.parametrize("clients", [10, 100])
def test_the_clients_figure(clients: int, tmp_path: Path) -> None:
    """A marker for each client, or of many a sorted line; ticks that differ; nothing of an end before it is there."""
    folder = write_study(tmp_path, {"A": [[0.1, 0.2]], "B": [[0.1, 0.2]]}, reference="A", statuses={("B", 0): None})
    held = {str(client): 0.121 + client / (400 * clients) for client in range(clients)}
    for at in (0, 1):
        lines = [{"round": n, "holdout_accuracy_by_client": held} for n in (1, 2)]
        file = folder / f"run-{at}" / "seed-0" / "rounds.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (axes,) = clients_figure(read_study(folder), 0).axes
    levels = labels_of(axes, "y")
    assert len(set(levels)) == len(levels)
    assert axes.get_title(loc="left") == "seed 0, last evaluation so far (not all runs have finished)"
    if clients == 100:
        assert [np.asarray(line.get_ydata()).tolist() for line in axes.lines] == [
            [six_digits(value) for value in sorted(held.values())]
        ] * 2
        assert axes.get_xlabel() == "clients, worst to best (%)"
    else:
        assert [len(np.asarray(dots.get_offsets())) for dots in axes.collections] == [10, 10]
