"""Data sets by name, and where they are looked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedgg.data import DATASETS
from fedgg.data.catalog import PUBLICATIONS, data_folder
from fedgg.data.dataset import load
from fedgg.data.download import fetch
from fedgg.errors import UserError
from fedgg.lab.config import Experiment


def test_digits_need_no_folder() -> None:
    assert len(load("digits").x_train) == 1437


def test_npz_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, x_train=np.zeros((4, 2)), y_train=[0, 1, 0, 1], x_test=np.zeros((2, 2)), y_test=[0, 1])
    assert load(f"npz:{path}").name == "mine.npz"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cifar", "cifar10"),
        ("CIFAR-10", "cifar10"),
        ("cifar1000", "cifar100"),
        ("SVHN", "svhn"),
        ("digit", "digits"),
        ("mine.npz", "npz:mine.npz"),
        ("MNIST", "mnist"),
        ("tinyimagenet", "tiny-imagenet"),
    ],
)
def test_an_unknown_name_meets_its_neighbour(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=rf"unknown data set '{name}': did you mean '{hint}'\?"):
        load(name)


def test_a_name_like_nothing_lists_what_there_is() -> None:
    with pytest.raises(UserError) as caught:
        load("zzz")
    assert "did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in DATASETS)


@pytest.mark.parametrize("attempt", [load, fetch])
def test_a_name_that_several_begin_with_lists_them(attempt: Callable[[str, Path], object], tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="choose from emnist-balanced, emnist-byclass, emnist-bymerge, emnist-digits, em"
    ):
        attempt("EMNIST", tmp_path)


def test_npz_without_a_file() -> None:
    with pytest.raises(UserError, match="npz:FILE"):
        load("npz:")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn"])
def test_missing_data_says_where_and_how(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGG_DATA", str(tmp_path / "variable"))
    with pytest.raises(UserError, match=f"{tmp_path}/variable .*`fedgg data fetch {name}`"):
        load(name)
    with pytest.raises(UserError, match=f"{tmp_path}/argument "):
        load(name, tmp_path / "argument")


def test_the_folder_is_argument_then_variable_then_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGG_DATA", str(tmp_path))
    assert data_folder("elsewhere") == Path("elsewhere")
    assert data_folder("~/data") == Path.home() / "data"
    assert data_folder() == tmp_path
    monkeypatch.setenv("FEDGG_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder().name == "fedgg"


def test_naming_the_sources_imports_no_reader() -> None:
    heavy = "{'sklearn', 'scipy.io', 'pooch', 'requests'}"
    code = f"import sys, fedgg.data.dataset; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_hf_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"this needs datasets, .*pip install 'fedgg\[datasets\]'"):
        load("hf:ylecun/mnist")


def test_names_and_settings_of_hf(tmp_path: Path) -> None:
    experiment = Experiment(data={"source": "hf:ylecun/mnist", "label": "label", "size": 32})
    assert experiment.data.normalise == "standard"
    assert experiment.data.settings == {"label": "label", "size": 32}
    with pytest.raises(UserError, match=r"'data\.lable': did you mean 'data\.label'"):
        Experiment(data={"source": "hf:ylecun/mnist", "lable": "x"})
    with pytest.raises(UserError, match="write hf:OWNER/NAME"):
        load("hf:")
    with pytest.raises(UserError, match="downloads it when it is first used"):
        fetch("hf:ylecun/mnist", tmp_path)


def test_the_page_on_data_sets_names_all_of_them_and_their_files() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    assert [name for name in DATASETS if f"`{name}`" not in page] == []
    for publication in PUBLICATIONS.values():
        for file in (*publication.files, *publication.alternatives):
            assert f"| {file.url} | `{file.sha256}` |" in page


def test_descriptions_say_what_was_not_tried_against_the_publisher() -> None:
    tried = {"digits", "cifar10", "cifar100", "svhn", "shakespeare"}
    for name in PUBLICATIONS:
        assert ("not tried against the publisher" in DATASETS.descriptions()[name]) is (name not in tried), name
