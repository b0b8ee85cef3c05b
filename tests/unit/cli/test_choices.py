"""What is typed behind --set and --grid."""

from __future__ import annotations

import pytest

from fedgg.cli.options import algorithm_settings, parsed, split_values, variants
from fedgg.errors import UserError
from fedgg.lab.config import Experiment


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("0.1", 0.1),
        ("3", 3),
        ("true", True),
        ("inf", float("inf")),
        ("median", "median"),
        ("[1, inf]", [1, float("inf")]),
        ('"3"', "3"),
        ('"nan"', "nan"),
    ],
)
def test_values_are_read_as_toml_and_words_as_text(typed: str, value: object) -> None:
    assert parsed(typed) == value
    assert type(parsed(typed)) is type(value)


def test_nan_is_a_kind_of_attack_and_otherwise_refused() -> None:
    attacked = Experiment().changed({"attack.kind": parsed("nan")})
    assert attacked.attack is not None
    assert attacked.attack.kind == "nan"
    for key in ("algorithm.mu", "model.scale", "local.lr"):
        with pytest.raises(UserError, match=f"{key} = nan"):
            Experiment().changed({key: parsed("nan")})


def test_commas_within_lists_and_quotes_separate_no_values() -> None:
    assert split_values("1,2, 3") == ["1", "2", " 3"]
    assert split_values("[16,16],[32]") == ["[16,16]", "[32]"]
    assert split_values('"a,b",c') == ['"a,b"', "c"]
    assert split_values("") == [""]
    own = algorithm_settings("own.py:Own:widths=[16,[8,inf]],lr=0.1")
    assert own == {"algorithm.name": "own.py:Own", "algorithm.widths": [16, [8, float("inf")]], "algorithm.lr": 0.1}


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


def test_settings_of_an_algorithm_follow_a_colon() -> None:
    with pytest.raises(UserError, match=r"settings follow a colon, as in my\.py:Mine:rho=1"):
        variants(["LABEL@my.py:Mine,rho=1"])
    assert variants(["fedgg:mu=0.1,lam=0"])["fedgg mu=0.1 lam=0"]["algorithm.mu"] == 0.1
