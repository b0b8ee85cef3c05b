"""What a table stands on is said in one sentence, and one more where runs do not go together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedgg.analysis.run_environment import conditions, shown_megabytes, shown_seconds
from fedgg.runfolder.record_types import RunRecord


def run(precision: str = "fp32", seconds: float = 30.0, **versions: Any) -> RunRecord:
    told = {"commit": "abcdef0123456", "device": "NVIDIA H200", "torch": "2.11", "python": "3.12", **versions}
    return RunRecord(Path(), {"engine": {"precision": precision}}, [], None, {"seconds": seconds}, told)


def test_one_sentence() -> None:
    (sentence,) = conditions([run(), run(seconds=32.5)])
    for words in ("commit abcdef0;", "NVIDIA H200", "precision fp32", "torch 2.11", "2 runs, 62 s"):
        assert words in sentence
    assert conditions([]) == ()


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (run(commit="1234567890"), "commit"),
        (run(changed=True), "commit"),
        (run(device="cpu"), "device"),
        (run("bf16"), "precision"),
    ],
)
def test_runs_that_do_not_go_together(other: RunRecord, word: str) -> None:
    _, mixed = conditions([run(), run(), other])
    assert mixed.startswith(f"The runs differ in {word}: ")
    assert "(2 runs)" in mixed
    assert "(1 run)" in mixed


def test_runs_that_are_compared_with_each_other() -> None:
    """Rows of the same seed on two devices: their difference is also one between devices."""

    def of_seed(seed: int, device: str) -> RunRecord:
        return replace(run(device=device), config={"engine": {"precision": "fp32"}, "seed": seed})

    _, mixed = conditions([of_seed(0, "cpu"), of_seed(0, "cpu"), of_seed(1, "cpu"), of_seed(1, "NVIDIA H200")])
    assert mixed.endswith("With seed 1 rows differ in it, so differences between rows include its effect.")
    _, mixed = conditions([of_seed(0, "cpu"), of_seed(0, "cpu"), of_seed(1, "NVIDIA H200")])
    assert "With seed" not in mixed


def test_an_engine_that_some_runs_record() -> None:
    named = run(engine={"name": "stacked"})
    assert "engine stacked;" in conditions([named, named])[0]
    assert "engine stacked (recorded by 1 of 3 runs);" in conditions([run(), named, run()])[0]
    assert "engine" not in conditions([run()])[0]


def test_what_was_not_recorded() -> None:
    (sentence,) = conditions([RunRecord(Path(), {}, [], None, None)])
    assert "commit not recorded" in sentence


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.23, "1.2 s"), (60, "60 s"), (600, "10 min"), (7200, "2.0 h"), (864_000, "10 days")]
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert shown_seconds(seconds) == text


@pytest.mark.parametrize(
    ("megabytes", "text"), [(0.0, "0.0"), (0.0004321, "0.00043"), (0.96, "0.96"), (1.04, "1.0"), (1234.56, "1234.6")]
)
def test_traffic_is_never_shown_as_nothing(megabytes: float, text: str) -> None:
    assert shown_megabytes(megabytes) == text
