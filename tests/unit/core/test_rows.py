"""Rows: stacked and split without loss, and checked for what algorithms may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgg.core.tensor_rows import check, dot, length, message_bytes, read_only, split, stack


@given(clients=st.integers(1, 5), width=st.integers(0, 4), names=st.sets(st.text(min_size=1, max_size=3), max_size=3))
def test_split_and_stack_are_inverse(clients: int, width: int, names: set[str]) -> None:
    rows = {name: torch.arange(clients * width, dtype=torch.float64).view(clients, width) for name in names}
    parts = split(rows, clients)
    assert [part.keys() for part in parts] == [rows.keys()] * clients
    again = stack(parts)
    assert again.keys() == rows.keys()
    assert all(torch.equal(again[name], rows[name]) for name in rows)


def test_counters_of_one_dimension_are_stacked_too() -> None:
    assert stack([{"n": torch.tensor([3])}, {"n": torch.tensor([5])}])["n"].tolist() == [3, 5]


def test_different_names_are_not_stacked() -> None:
    with pytest.raises(ValueError, match="different names"):
        stack([{"a": torch.zeros(1, 2)}, {"b": torch.zeros(1, 2)}])


@pytest.mark.parametrize(
    ("rows", "kind", "word"),
    [
        (torch.zeros(2, 3), TypeError, "dict of tensors, got Tensor"),
        (None, TypeError, "NoneType"),
        ({"a": 1.0}, TypeError, "'a'"),
        ({"a": {"b": torch.zeros(2, 1)}}, TypeError, "dict"),
        ({1: torch.zeros(2, 1)}, TypeError, "1"),
        ({"a": torch.zeros(2)}, ValueError, r"\[2, 1\]"),
        ({"a": torch.zeros(())}, ValueError, r"\(\)"),
        ({"a": torch.zeros(3, 1)}, ValueError, r"\(3, 1\)"),
    ],
)
def test_check_says_what_is_wrong(rows: Any, kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        check(rows, 2, "finish() up")


def test_check_hands_back_what_is_right() -> None:
    rows = {"a": torch.zeros(2, 1), "b": torch.zeros(2, 3, 4)}
    assert check(rows, 2, "x") == rows
    assert type(check(read_only(rows, "client.notes"), 2, "x")) is dict
    assert check({}, 2, "x") == {}


def test_lengths_and_products_are_columns() -> None:
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[1.0, 2.0], [5.0, 6.0]])
    assert dot(a, b).tolist() == [[11.0], [0.0]]
    assert length(a).tolist() == [[5.0], [0.0]]


def test_bytes_of_a_message() -> None:
    rows = {"a": torch.tensor([[1.0, 0.0, 2.0, 0.0]]), "b": torch.zeros(1, 2, dtype=torch.float64)}
    rows |= {"c": torch.zeros(1, dtype=torch.int64)}
    assert message_bytes(rows, {}) == 16 + 16 + 8
    assert message_bytes(rows, {"b": 1}) == 16 + (8 + 4) + 8  # a value and its position
    assert message_bytes(rows, {"a": 2, "b": 2}) == 16 + 16 + 8  # in full, where that is less
    assert message_bytes(rows, {"a": 1}) == 16 + 16 + 8  # in full, where there are more values than declared
    assert message_bytes({}, {}) == 0
