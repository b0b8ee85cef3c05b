"""Figures: real files, the same bytes every time, and no name or shape that breaks them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.image import imread
from written_folders import write_run, write_study

from fedgg.analysis.labels import shortened
from fedgg.data.dataset import Dataset
from fedgg.errors import UserError
from fedgg.report.data_figures import compact, samples_figure, split_figure
from fedgg.report.figure_style import save
from fedgg.report.run_figures import clients_figure, common_rounds, curves_figure, diagnostics_figure, score_figure
from fedgg.runfolder.read import read_run, read_study
from fedgg.runfolder.record_types import StudyRecord

NASTY = r"<b>_&%$x$ \frac$"


def assert_real_png(file: Path) -> None:
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(file)
    assert min(pixels.shape[:2]) > 100
    assert pixels[..., :3].std() > 0.01


@pytest.fixture
def study(tmp_path: Path) -> StudyRecord:
    rising = [[0.1 * seed + 0.1 * number for number in range(1, 5)] for seed in range(3)]
    curves: dict[str, list[list[float] | None]] = {
        "Avg": [*rising],
        "_hidden?": [*rising],
        NASTY: [rising[0], [0.1], None],
        "Gone": [None, [0.1], None],
    }
    statuses = {(NASTY, 1): "diverged", ("Gone", 1): "diverged"}
    return read_study(write_study(tmp_path / "study", curves, reference="Avg", statuses=statuses))


def test_a_split_of_data_without_classes_names_none() -> None:
    x, y = torch.zeros(6, 2), torch.zeros(6)
    names = Dataset("own", x, y, x, y, classes=("value",), targets="values").label_names
    axes = split_figure(np.array([[4], [2]]), names, "").axes[0]
    assert axes.get_xlabel() == "examples (the data have no classes)"
    assert [label.get_text() for label in axes.get_xticklabels()] == []
    assert split_figure(np.array([[4], [2]]), ["cat"], "").axes[0].get_xlabel() == "class"


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (10, 10), (20, 100), (100, 10)])
def test_splits_of_all_sizes(tmp_path: Path, clients: int, classes: int) -> None:
    counts = np.arange(clients * classes).reshape(clients, classes) * 7
    names = [NASTY] * classes if classes == 10 else [str(label) for label in range(classes)]
    assert_real_png(save(split_figure(counts, names, f"{NASTY} split"), tmp_path / "new" / "split.png"))


def test_counts_are_written_only_where_they_fit() -> None:
    def texts(clients: int, classes: int) -> int:
        figure = split_figure(np.ones((clients, classes)), ["c"] * classes, "")
        return len(figure.axes[0].texts)

    assert texts(12, 12) == 144
    assert texts(13, 12) == 0
    assert texts(12, 13) == 0


def test_accuracy_of_a_study(tmp_path: Path, study: StudyRecord) -> None:
    figure = score_figure(study)
    assert_real_png(save(figure, tmp_path / "accuracy.png"))
    names = [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]
    assert names[:2] == ["Avg", "_hidden?"]
    assert names[2] == f"{NASTY} (1 of 3 seeds, 1 diverged)"
    assert "lowest to highest" in figure.axes[0].get_title(loc="left")
    assert figure.axes[0].lines[0].get_ydata() == pytest.approx([0.2, 0.3, 0.4, 0.5])


def test_means_are_over_common_rounds(tmp_path: Path) -> None:
    longer, shorter = write_run(tmp_path / "a", [0.1, 0.2, 0.3]), write_run(tmp_path / "b", [0.3, None])
    runs = [read_run(longer), read_run(shorter)]
    rounds, accuracies = common_rounds(runs)
    assert rounds.tolist() == [1]
    assert accuracies.tolist() == [[0.1], [0.3]]


@pytest.mark.parametrize("accuracies", [[], [0.5], [None, None], [0.1, None, 0.4]])
def test_curves_of_one_run(tmp_path: Path, accuracies: list[float | None]) -> None:
    run = read_run(write_run(tmp_path / "run", accuracies, name=NASTY))
    assert_real_png(save(curves_figure(run), tmp_path / "curves.png"))


@pytest.mark.parametrize(("channels", "kind"), [(1, np.uint8), (3, np.uint8), (1, np.float32), (3, np.float32)])
def test_samples(tmp_path: Path, channels: int, kind: type) -> None:
    ramp = np.linspace(0, 255, 40 * channels * 64).reshape(40, channels, 8, 8)
    images = ramp.astype(kind) if kind is np.uint8 else (ramp / 60 - 2).astype(kind)
    figure = samples_figure(images, np.arange(40) % 13, [NASTY] * 13, "samples")
    assert_real_png(save(figure, tmp_path / "samples.png"))
    assert "first 10 of 13 classes" in figure.axes[0].get_title(loc="left")


def test_files_are_the_same_every_time(tmp_path: Path, study: StudyRecord) -> None:
    for suffix in ("png", "svg"):
        first, second = (save(score_figure(study), tmp_path / f"{turn}.{suffix}") for turn in "ab")
        assert first.read_bytes() == second.read_bytes()
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def test_the_users_settings_stay(study: StudyRecord) -> None:
    before = dict(matplotlib.rcParams)
    score_figure(study)
    assert dict(matplotlib.rcParams) == before


def test_compact_counts() -> None:
    told = [compact(count) for count in (0, 999, 1000, 1249, 9949, 9950, 12_400, 999_499, 999_500, 3_400_000)]
    assert told == ["0", "999", "1.0k", "1.2k", "9.9k", "10k", "12k", "999k", "1.0M", "3.4M"]


def test_mistakes_are_named(tmp_path: Path) -> None:
    figure = split_figure([[1, 2]], ["a", "b"], "")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "figure.docx", tmp_path / "file" / "figure.png"):
        with pytest.raises(UserError, match=path.name):
            save(figure, path)
    with pytest.raises(UserError, match="classes"):
        split_figure([[1, 2]], ["a"], "")
    with pytest.raises(UserError, match="shape"):
        samples_figure(np.zeros((2, 4, 4)), [0, 0], ["a"], "")
    with pytest.raises(UserError, match="labels"):
        samples_figure(np.zeros((2, 1, 4, 4)), [0, 5], ["a"], "")


def test_names_are_cut_and_never_lost() -> None:
    assert shortened("dirichlet_unbalanced", 14) == "dirichlet_unb…"
    assert shortened("dirichlet_client", 16) == "dirichlet_client"
    assert shortened("two  words", 8) == "two wor…"
    assert shortened("one two", 5) == "one…"


def test_signs_the_type_does_not_have_make_no_noise(tmp_path: Path) -> None:
    curves = {"Avg \U0001f680": [[0.1, 0.5]], "\u4e2d\u6587": [[0.2, 0.6]]}
    study = read_study(write_study(tmp_path / "study", curves, reference="Avg \U0001f680"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert save(score_figure(study), tmp_path / "a.png").stat().st_size > 1000


def test_long_names_leave_room_for_the_curves(tmp_path: Path) -> None:
    long = "a label and then more of it, " * 20
    folder = write_study(tmp_path / "study", {long: [[0.1, 0.5]]}, reference=long)
    for history in folder.rglob("rounds.jsonl"):
        lines = [json.loads(line) for line in history.read_text().splitlines()]
        told = {"readings": {long: 1.0, long + "2": 2.0}, "clients": [{"client": 0, "loss": 0.5}]}
        history.write_text("".join(json.dumps(line | told) + "\n" for line in lines))
    study = read_study(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (score_figure(study), diagnostics_figure(study), clients_figure(study, 0)):
            save(figure, tmp_path / "a.png")
            assert all(axes.get_position().width > 0.2 for axes in figure.axes)
