"""What travels comes back as it was, and nothing else is taken for it."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedgg.core.rows import payload
from fedgg.flower.messages import (
    DTYPES,
    RAW,
    About,
    Answer,
    BadRecord,
    about_of,
    answer_of,
    check_finite,
    check_kinds,
    difference,
    from_record,
    kinds,
    numbers_of,
    payload_of,
    to_record,
    write,
)

CPU = torch.device("cpu")
ABOUT = About("abc", "experiment", round=3, attempt=1, client=2, settled=1, met=2)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits of any type, NaN and infinities among them."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = (1, *draw(st.lists(st.integers(0, 4), max_size=3)))
    count = int(np.prod(shape)) * dtype.itemsize
    bits = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype is torch.bool:
        bits = bytearray(bit & 1 for bit in bits)
    return torch.frombuffer(bits, dtype=dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@given(st.dictionaries(st.text(max_size=8), tensors(), max_size=4))
def test_rows_come_back_bit_for_bit(rows: dict[str, Tensor]) -> None:
    record = to_record(rows)
    back = from_record(record, CPU)
    assert kinds(back) == kinds(rows)
    for name, tensor in rows.items():
        assert _bits(back[name]) == _bits(tensor)
    assert payload_of(RecordDict({"rows": record})) == payload(rows.values())


def test_a_row_that_lies_across_memory_travels_too() -> None:
    rows = {"w": torch.arange(12.0).view(3, 4).t()[:1]}
    assert torch.equal(from_record(to_record(rows), CPU)["w"], rows["w"])


def array(**changes: Any) -> ArrayRecord:
    good: dict[str, Any] = {"dtype": "float32", "shape": (1, 2), "stype": RAW, "data": bytes(8)}
    return ArrayRecord({"w": Array(**(good | changes))})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"stype": "numpy.ndarray"}, "written as 'numpy.ndarray'"),
        ({"dtype": "object"}, "no type of numbers"),
        ({"dtype": "complex128"}, "no type of numbers"),
        ({"shape": (2, 1)}, "no row of one client"),
        ({"shape": ()}, "no row of one client"),
        ({"shape": (1, -2)}, "no row of one client"),
        ({"shape": (1, 3)}, "8 bytes where its shape needs 12"),
        ({"data": b""}, "0 bytes where its shape needs 8"),
        ({"shape": (1, 2**40), "data": bytes(8)}, "bytes where its shape needs"),
    ],
    ids=str,
)
def test_arrays_of_another_kind_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadRecord, match=complaint):
        from_record(array(**changes), CPU)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("unpickled",)


def test_nothing_is_unpickled() -> None:
    objects = io.BytesIO()
    np.save(objects, np.array([Bomb()], dtype=object), allow_pickle=True)
    for stype in ("numpy.ndarray", RAW):
        for data in (objects.getvalue(), pickle.dumps(Bomb())):
            with pytest.raises(BadRecord):
                from_record(array(stype=stype, data=data, dtype="object"), CPU)
            with pytest.raises(BadRecord):
                from_record(array(stype=stype, data=data), CPU)


WANTED = kinds({"delta": torch.zeros(1, 3), "c": torch.zeros(1, 3)})


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ({"delta": torch.zeros(1, 3)}, "lacks c"),
        ({"delta": torch.zeros(1, 3), "c": torch.zeros(1, 3), "more": torch.zeros(1, 1)}, "holds more"),
        ({"delta": torch.zeros(1, 4), "c": torch.zeros(1, 3)}, r"delta is torch.float32 \[1, 4\] where"),
        ({"delta": torch.zeros(1, 3).double(), "c": torch.zeros(1, 3)}, "delta is torch.float64"),
    ],
)
def test_rows_that_were_not_asked_for_are_refused(rows: dict[str, Tensor], complaint: str) -> None:
    with pytest.raises(BadRecord, match=complaint):
        check_kinds(rows, WANTED, "its message")


def test_what_is_not_finite_is_named() -> None:
    with pytest.raises(BadRecord, match=r"^not finite: b$"):
        check_finite({"a": torch.zeros(1, 2), "b": torch.tensor([[0.0, float("inf")]])}, "")


def test_what_stands_on_a_message_comes_back() -> None:
    content = write(ABOUT, {"up": to_record({"x": torch.ones(1, 2)})}, answer=Answer(note="so"), numbers={"loss": 0.1})
    assert about_of(content) == ABOUT
    assert answer_of(content) == Answer(note="so")
    assert numbers_of(content, {"loss"}) == {"loss": 0.1}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 99}, "format 99"),
        ({"round": "3"}, "its 'round' is '3', not int"),
        ({"client": True}, "its 'client' is True"),
        ({"run": b"abc"}, "its 'run'"),
    ],
)
def test_headers_of_another_kind_are_refused(changes: dict[str, Any], complaint: str) -> None:
    content = write(ABOUT)
    content.config_records["about"].update(changes)
    with pytest.raises(BadRecord, match=complaint):
        about_of(content)
    with pytest.raises(BadRecord, match="no message of fedgg's"):
        about_of(RecordDict())
    with pytest.raises(BadRecord, match="no message of fedgg's"):
        about_of(RecordDict({"about": MetricRecord({"round": 3})}))


@pytest.mark.parametrize(
    "numbers", [{}, {"loss": 1.0, "more": 2.0}, {"loss": 1}, {"loss": [1.0]}, {"reading drift": 1.0}], ids=str
)
def test_numbers_that_were_not_asked_for_are_refused(numbers: Any) -> None:
    content = RecordDict({"numbers": MetricRecord(numbers)})
    with pytest.raises(BadRecord, match="it told"):
        numbers_of(content, {"loss"})
    with pytest.raises(BadRecord, match="it told"):
        numbers_of(RecordDict({"numbers": ConfigRecord({"loss": 1.0})}), {"loss"})


def test_a_reply_to_something_else_is_told_apart() -> None:
    assert difference(ABOUT, ABOUT) is None
    assert difference(ABOUT, About("abc", "experiment", 3, 1, 2)) is None  # what only the server knows is not repeated
    for changes, words in (
        ({"run": "other"}, "the run other instead of abc"),
        ({"round": 2}, "round 2 instead of 3"),
        ({"attempt": 2}, "attempt 2 instead of 1"),
        ({"client": 1}, "client 1 instead of 2"),
        ({"experiment": "x"}, "the experiment x"),
    ):
        found = difference(ABOUT, About(**(vars(ABOUT) | changes)))
        assert found is not None
        assert words in found


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
