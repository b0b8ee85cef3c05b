"""Pickles of arrays are read, whoever wrote them; anything that asks for more is refused and named."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedgg.data.safe_pickle import load_pickle
from fedgg.errors import UserError


class Calls:
    """An object whose pickle asks for a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def python2_batch(rows: np.ndarray[Any, Any], labels: list[int]) -> bytes:
    """A batch in the bytes of Python 2 and an old NumPy, the form in which CIFAR was published."""

    def text(word: bytes) -> bytes:
        return b"U" + bytes([len(word)]) + word

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    shape = b"".join(b"M" + struct.pack("<H", side) for side in rows.shape) + b"\x86"
    content = b"T" + struct.pack("<i", rows.size) + rows.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01" + shape + dtype + b"\x89" + content + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def test_the_published_form_is_read_without_a_warning() -> None:
    rows = np.arange(12, dtype=np.uint8).reshape(3, 4)
    batch = load_pickle(python2_batch(rows, [1, 2, 3]), "batch")
    np.testing.assert_array_equal(batch[b"data"], rows)
    assert batch[b"data"].dtype == np.uint8
    assert batch[b"labels"] == [1, 2, 3]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_what_python_3_writes_is_read(protocol: int) -> None:
    content = {
        b"data": np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
        "scalar": np.float32(1.5),
        "bytes": b"\xff\x00",
        "plain": [1, 2.5, None, True, "text", 2**70, (1, 2), {"a": []}],
    }
    got = load_pickle(pickle.dumps(content, protocol=protocol), "batch")
    np.testing.assert_array_equal(got[b"data"], content[b"data"])
    assert got["scalar"] == content["scalar"]
    assert got["bytes"] == content["bytes"]
    assert got["plain"] == content["plain"]


def test_both_names_of_numpys_module_are_known() -> None:
    written = pickle.dumps(np.arange(3), protocol=2)  # NumPy 1 and NumPy 2 write different names
    old = written.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    new = old.replace(b"numpy.core.multiarray", b"numpy._core.multiarray")
    assert written in (old, new)
    assert b"numpy._core" in new
    assert b"numpy._core" not in old
    for raw in (new, old):
        np.testing.assert_array_equal(load_pickle(raw, "batch"), np.arange(3))


@given(
    hnp.arrays(
        dtype=hnp.unsigned_integer_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes() | hnp.boolean_dtypes(),
        shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=4),
    ),
    st.integers(0, 4),
)
def test_every_array_of_numbers_survives(array: np.ndarray[Any, Any], protocol: int) -> None:
    raw = pickle.dumps(array, protocol=protocol)
    got, wanted = load_pickle(raw, "batch"), pickle.loads(raw)
    assert (got.dtype, got.shape, got.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


@pytest.mark.parametrize(
    ("hostile", "name"),
    [
        (Calls(os.system, "touch owned"), r"(posix|nt)\.system"),
        (Calls(eval, "open('owned', 'w')"), r"builtins?(__)?\.eval"),
        (Calls(getattr, "x", "upper"), r"builtins?(__)?\.getattr"),
        (Calls(open, "owned", "w"), r"io\.open"),
        (Calls(np.load, "x"), r"numpy\.load"),
        (Calls(np.fromfile, "x"), r"numpy\.fromfile"),
        (print, r"builtins?(__)?\.print"),
        (Calls(bytearray, 10), r"builtins?(__)?\.bytearray"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_pickle_is_refused_and_named(
    hostile: Any, name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = pickle.dumps({b"data": np.zeros(2), b"labels": hostile}, protocol=protocol)
    with pytest.raises(UserError, match=rf"^data_batch_1: refused, it asks for \w*{name}, ") as caught:
        load_pickle(raw, "data_batch_1")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_posix_system_by_hand() -> None:
    with pytest.raises(UserError, match=r"batch: refused, it asks for posix\.system"):
        load_pickle(b"cposix\nsystem\n(S'true'\ntR.", "batch")


@pytest.mark.parametrize(
    "raw",
    [
        pickle.dumps(np.array([print, None], dtype=object), protocol=2).replace(b"print", b"prinx"),
        pickle.dumps(np.array([None], dtype=object), protocol=2),
        pickle.dumps(np.array(["text"]), protocol=2),
        pickle.dumps(np.zeros(2, dtype=[("a", "u1")]), protocol=2),
        b"c_codecs\nencode\n(S'x'\nS'zlib_codec'\ntR.",
        b"cnumpy\nndarray\n((I3\ntS'O'\ntR.",  # the constructor itself
    ],
)
def test_objects_text_and_records_are_refused(raw: bytes) -> None:
    with pytest.raises(UserError, match="batch: "):
        load_pickle(raw, "batch")


def test_an_array_cannot_be_filled_a_second_time_or_beyond_its_shape() -> None:
    good = pickle.dumps(np.arange(4, dtype=np.uint8), protocol=2)
    memory = b"(K\x01K\x01\x85" + good[good.index(b"cnumpy\ndtype") : good.index(b"\x89")] + b"\x89U\x01xtb."
    twice = good.removesuffix(b".") + memory
    with pytest.raises(UserError):
        load_pickle(twice, "batch")
    with pytest.raises(UserError, match="does not fill"):
        load_pickle(python2_batch(np.zeros((2, 3), np.uint8), []).replace(b"M\x02\x00", b"M\xff\x00"), "batch")


def test_truncation_anywhere_is_a_user_error() -> None:
    raw = python2_batch(np.zeros((3, 40), np.uint8), [1, 2, 3])
    for length in range(len(raw)):
        with pytest.raises(UserError, match="batch: "):
            load_pickle(raw[:length], "batch")


@given(st.binary(max_size=60))
def test_garbage_is_read_or_a_user_error_of_one_line(raw: bytes) -> None:
    complaint = ""
    try:
        load_pickle(raw, "batch")
    except UserError as error:
        complaint = str(error)
    assert "\n" not in complaint


def test_a_name_cannot_break_the_line() -> None:
    with pytest.raises(UserError, match=r"asks for os\\n\.system"):
        load_pickle(b"\x80\x04\x8c\x03os\n\x8c\x06system\x93.", "batch")


@pytest.mark.parametrize("raw", [b"Nr\xff\xff\xff\xff.", b"Np4000000000\n.", b"\x96" + b"\xff" * 7 + b"\x00."])
def test_a_few_bytes_cannot_claim_the_memory(raw: bytes) -> None:
    with pytest.raises(UserError, match="batch: damaged"):
        load_pickle(raw, "batch")
