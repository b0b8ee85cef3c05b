"""Panels show what they are given, also where it is nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from written_folders import write_run

from fedgg.paper.figures import Panel, curve_panels
from fedgg.report.data_figures import SplitPanel, split_panels
from fedgg.runfolder.read import read_run
from fedgg.runfolder.record_types import RunRecord


def runs(folder: Path, *curves: list[float | None], status: str = "finished") -> list[RunRecord]:
    return [read_run(write_run(folder / str(at), curve, status=status)) for at, curve in enumerate(curves)]


def test_lines_are_means_and_bands_reach_from_lowest_to_highest(tmp_path: Path) -> None:
    panel = Panel("one", {"A": runs(tmp_path / "a", [0.1, 0.2], [0.3, 0.6]), "B": runs(tmp_path / "b", [0.5, 0.5])})
    axes = curve_panels([[panel]]).axes[0]
    assert np.asarray(axes.lines[0].get_ydata()).tolist() == [0.2, 0.4]
    assert len(axes.collections) == 1  # one seed has no band
    (band,) = axes.collections
    assert np.asarray(band.get_paths()[0].vertices)[:, 1].max() == 0.6


def test_diverged_runs_are_not_drawn_and_empty_panels_say_so(tmp_path: Path) -> None:
    panel = Panel("wild", {"A": runs(tmp_path / "a", [0.1], status="diverged")})
    axes = curve_panels([[panel]]).axes[0]
    assert not axes.lines
    assert [text.get_text() for text in axes.texts] == ["no finished run"]


def test_the_same_label_looks_the_same_everywhere(tmp_path: Path) -> None:
    one, two = runs(tmp_path / "a", [0.1, 0.2]), runs(tmp_path / "b", [0.3, 0.4])
    figure = curve_panels([[Panel("x", {"A": one, "B": two}), Panel("y", {"B": two})]])
    assert figure.axes[0].lines[1].get_color() == figure.axes[1].lines[0].get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A", "B"]


def test_a_legend_in_each_panel(tmp_path: Path) -> None:
    one = runs(tmp_path / "a", [0.1, 0.2])
    figure = curve_panels([[Panel("x", {"R": one, "B": one}), Panel("y", {"R": one})]], "R", own_legends=True)
    assert not figure.legends
    legends = [legend for axes in figure.axes if (legend := axes.get_legend())]
    assert [len(legend.get_texts()) for legend in legends] == [2, 1]
    assert figure.axes[1].lines[0].get_color() == "#888888"


def test_splits_in_rows_of_different_length() -> None:
    panel = SplitPanel("a", [[0, 3], [5, 0]])
    figure = split_panels([[panel, panel], [panel]])
    shown = [axes for axes in figure.axes if axes.images]
    assert len(shown) == 3
    assert np.asarray(shown[0].images[0].get_array()).tolist() == [[0, 3], [5, 0]]
