"""Messages are read as they were written; messages with other content are rejected."""

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

from fedgg.flower.messages import (
    DTYPES,
    RAW,
    InvalidMessage,
    MessageHeader,
    ReplyStatus,
    array_bytes,
    check_finite,
    check_specs,
    from_record,
    header_mismatch,
    header_of,
    message_content,
    metrics_of,
    specs_of,
    status_of,
    to_record,
)

CPU = torch.device("cpu")
HEADER = MessageHeader("abc", "experiment", round=3, attempt=1, client=2, settled=1, met=2)


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
    assert specs_of(back) == specs_of(rows)
    for name, tensor in rows.items():
        assert _bits(back[name]) == _bits(tensor)
    assert array_bytes(RecordDict({"rows": record})) == sum(tensor.nbytes for tensor in rows.values())


def test_a_tensor_that_is_not_contiguous() -> None:
    rows = {"w": torch.arange(12.0).view(3, 4).t()[:1]}
    assert torch.equal(from_record(to_record(rows), CPU)["w"], rows["w"])


def array(**changes: Any) -> ArrayRecord:
    good: dict[str, Any] = {"dtype": "float32", "shape": (1, 2), "stype": RAW, "data": bytes(8)}
    return ArrayRecord({"w": Array(**(good | changes))})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stype": "numpy.ndarray"}, "serialized as 'numpy.ndarray'"),
        ({"dtype": "object"}, "unsupported dtype"),
        ({"dtype": "complex128"}, "unsupported dtype"),
        ({"shape": (2, 1)}, r"expected \[1, ...\]"),
        ({"shape": ()}, r"expected \[1, ...\]"),
        ({"shape": (1, -2)}, r"expected \[1, ...\]"),
        ({"shape": (1, 3)}, "8 bytes, its shape needs 12"),
        ({"data": b""}, "0 bytes, its shape needs 8"),
        ({"shape": (1, 2**40), "data": bytes(8)}, "bytes, its shape needs"),
    ],
    ids=str,
)
def test_malformed_arrays_are_rejected(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        from_record(array(**changes), CPU)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("unpickled",)


def test_nothing_is_unpickled() -> None:
    objects = io.BytesIO()
    np.save(objects, np.array([Bomb()], dtype=object), allow_pickle=True)
    for stype in ("numpy.ndarray", RAW):
        for data in (objects.getvalue(), pickle.dumps(Bomb())):
            with pytest.raises(InvalidMessage):
                from_record(array(stype=stype, data=data, dtype="object"), CPU)
            with pytest.raises(InvalidMessage):
                from_record(array(stype=stype, data=data), CPU)


EXPECTED = specs_of({"delta": torch.zeros(1, 3), "c": torch.zeros(1, 3)})


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ({"delta": torch.zeros(1, 3)}, "lacks c"),
        ({"delta": torch.zeros(1, 3), "c": torch.zeros(1, 3), "more": torch.zeros(1, 1)}, "unexpected entry more"),
        ({"delta": torch.zeros(1, 4), "c": torch.zeros(1, 3)}, r"delta is torch.float32 \[1, 4\], expected"),
        ({"delta": torch.zeros(1, 3).double(), "c": torch.zeros(1, 3)}, "delta is torch.float64"),
    ],
)
def test_unexpected_tensors_are_rejected(rows: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        check_specs(rows, EXPECTED, "its message")


def test_tensors_that_are_not_finite_are_named() -> None:
    with pytest.raises(InvalidMessage, match=r"^not finite: b$"):
        check_finite({"a": torch.zeros(1, 2), "b": torch.tensor([[0.0, float("inf")]])}, "")


def test_header_status_and_metrics_are_read_as_written() -> None:
    content = message_content(
        HEADER, {"up": to_record({"x": torch.ones(1, 2)})}, status=ReplyStatus(note="so"), metrics={"loss": 0.1}
    )
    assert header_of(content) == HEADER
    assert status_of(content) == ReplyStatus(note="so")
    assert metrics_of(content, {"loss"}) == {"loss": 0.1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 99}, "format is 99"),
        ({"round": "3"}, "its 'round' is '3', not int"),
        ({"client": True}, "its 'client' is True"),
        ({"run": b"abc"}, "its 'run'"),
    ],
)
def test_malformed_headers_are_rejected(changes: dict[str, Any], reason: str) -> None:
    content = message_content(HEADER)
    content.config_records["about"].update(changes)
    with pytest.raises(InvalidMessage, match=reason):
        header_of(content)
    with pytest.raises(InvalidMessage, match="fedgg did not write it"):
        header_of(RecordDict())
    with pytest.raises(InvalidMessage, match="fedgg did not write it"):
        header_of(RecordDict({"about": MetricRecord({"round": 3})}))


@pytest.mark.parametrize(
    "metrics", [{}, {"loss": 1.0, "more": 2.0}, {"loss": 1}, {"loss": [1.0]}, {"reading drift": 1.0}], ids=str
)
def test_unexpected_metrics_are_rejected(metrics: Any) -> None:
    content = RecordDict({"numbers": MetricRecord(metrics)})
    with pytest.raises(InvalidMessage, match="metric"):
        metrics_of(content, {"loss"})
    with pytest.raises(InvalidMessage, match="metric"):
        metrics_of(RecordDict({"numbers": ConfigRecord({"loss": 1.0})}), {"loss"})


def test_a_reply_with_another_header_is_detected() -> None:
    assert header_mismatch(HEADER, HEADER) is None
    assert (
        header_mismatch(HEADER, MessageHeader("abc", "experiment", 3, 1, 2)) is None
    )  # the other fields are not compared
    for changes, words in (
        ({"run": "other"}, "run other instead of abc"),
        ({"round": 2}, "round 2 instead of 3"),
        ({"attempt": 2}, "attempt 2 instead of 1"),
        ({"client": 1}, "client 1 instead of 2"),
        ({"experiment": "x"}, "experiment x"),
    ):
        mismatch = header_mismatch(HEADER, MessageHeader(**(vars(HEADER) | changes)))
        assert mismatch is not None
        assert words in mismatch


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
