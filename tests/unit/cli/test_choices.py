"""What is typed behind --set and --grid."""

from __future__ import annotations

import pytest

from fedgg.cli.choices import parsed, variants
from fedgg.errors import UserError


@pytest.mark.parametrize(
    ("typed", "value"),
    [("0.1", 0.1), ("3", 3), ("true", True), ("inf", float("inf")), ("median", "median"), ("nan", "nan"), ('"3"', "3")],
)
def test_values_are_read_as_toml_and_words_as_text(typed: str, value: object) -> None:
    assert parsed(typed) == value
    assert type(parsed(typed)) is type(value)


def test_an_algorithm_from_a_file_is_labelled_by_its_class() -> None:
    typed = ["fedavg", "algos.py:FedLESAM", "algos.py:FedLESAM:rho=0.1", "mine@algos.py:FedLESAM", "pack.age:FedNew"]
    assert list(variants(typed)) == ["fedavg", "FedLESAM", "FedLESAM rho=0.1", "mine", "FedNew"]
    assert variants(typed)["FedLESAM rho=0.1"] == {"algorithm.name": "algos.py:FedLESAM", "algorithm.rho": 0.1}


def test_classes_of_one_name_in_two_files_are_told_apart() -> None:
    assert list(variants(["a.py:New", "b.py:New:mu=1"])) == ["New (a.py)", "New (b.py) mu=1"]
    assert list(variants(["one/a.py:New", "two/a.py:New"])) == ["New (one/a.py)", "New (two/a.py)"]
    assert list(variants(["a.py:New", "old/a.py:New"])) == ["New (a.py)", "New (old/a.py)"]
    assert list(variants(["fedavg", "a.py:fedavg"])) == ["fedavg", "fedavg (a.py)"]
    with pytest.raises(UserError, match=r"two algorithms have the label 'New'.*again@a\.py:New'"):
        variants(["New@fedavg", "a.py:New"])


def test_a_study_that_is_continued_keeps_its_labels() -> None:
    assert list(variants(["fedavg", "a.py:New"], recorded=["fedavg", "a.py:New"])) == ["fedavg", "a.py:New"]
