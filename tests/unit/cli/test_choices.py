"""What is typed behind --set and --grid."""

from __future__ import annotations

import pytest

from fedgg.cli.choices import parsed


@pytest.mark.parametrize(
    ("typed", "value"),
    [("0.1", 0.1), ("3", 3), ("true", True), ("inf", float("inf")), ("median", "median"), ("nan", "nan"), ('"3"', "3")],
)
def test_values_are_read_as_toml_and_words_as_text(typed: str, value: object) -> None:
    assert parsed(typed) == value
    assert type(parsed(typed)) is type(value)
