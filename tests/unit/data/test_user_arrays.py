"""Arrays of every kind become a data set, or an error that names the array."""

from __future__ import annotations

import contextlib
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedgg.core.layout import unpacked
from fedgg.data.dataset import Dataset
from fedgg.data.user_arrays import from_arrays, load_npz
from fedgg.errors import UserError

Y = [0, 1, 2, 1]


def make(x: Any, y: Any = Y, **options: Any) -> Dataset:
    return from_arrays(x, y, x, y, **options)


@pytest.mark.parametrize(
    ("given_type", "kept", "peak"),
    [
        (np.uint8, torch.uint8, 255.0),
        (np.int8, torch.int64, 1.0),
        (np.int64, torch.int64, 1.0),
        (np.uint16, torch.int64, 1.0),
        (np.bool_, torch.float32, 1.0),
        (np.float16, torch.float32, 1.0),
        (np.float32, torch.float32, 1.0),
        (np.dtype(">f4"), torch.float32, 1.0),
        (np.float64, torch.float64, 1.0),
        (np.dtype(">f8"), torch.float64, 1.0),
        (np.longdouble, torch.float64, 1.0),
    ],
)
def test_types_of_inputs(given_type: Any, kept: torch.dtype, peak: float) -> None:
    values = np.array([[0, 1], [1, 0], [1, 1], [0, 0]])
    data = make(values.astype(given_type))
    assert data.x_train.dtype == kept
    assert data.peak == peak
    assert data.x_train.tolist() == values.tolist()


@pytest.mark.parametrize(
    "kind", [torch.uint8, torch.int32, torch.bfloat16, torch.float16, torch.float32, torch.float64]
)
def test_tensors(kind: torch.dtype) -> None:
    x = torch.eye(4).to(kind)
    data = make(x.requires_grad_() if x.is_floating_point() else x, torch.tensor(Y))
    kept = {torch.int32: torch.int64, torch.bfloat16: torch.float32, torch.float16: torch.float32}.get(kind, kind)
    assert data.x_train.dtype == kept
    assert not data.x_train.requires_grad
    assert data.x_train.tolist() == torch.eye(4).tolist()


@pytest.mark.parametrize(
    ("shape", "kept"),
    [((4, 5), (5,)), ((4, 5, 6), (5, 6)), ((4, 3, 5, 6), (3, 5, 6)), ((4, 1, 1, 2, 2), (1, 1, 2, 2))],
)
def test_shapes_of_inputs(shape: tuple[int, ...], kept: tuple[int, ...]) -> None:
    assert make(np.zeros(shape)).shape == kept


@given(
    hnp.arrays(
        dtype=hnp.integer_dtypes() | hnp.unsigned_integer_dtypes() | hnp.floating_dtypes(),
        shape=st.sampled_from([(6,), (6, 1)]),
        elements=st.integers(0, 100),
    )
)
def test_labels_of_any_whole_type(labels: np.ndarray[Any, Any]) -> None:
    data = make(np.zeros((6, 2)), labels)
    assert data.y_train.dtype == torch.int64
    assert data.y_train.tolist() == labels.reshape(-1).astype(int).tolist()
    assert len(data.classes) == int(labels.max()) + 1


def test_the_arrays_are_copied_and_left_alone() -> None:
    x, y = np.zeros((4, 2)), np.array(Y)
    x.flags.writeable = False
    data = make(x[::-1], y)
    y[:] = 0
    assert data.y_train.tolist() == Y
    data.x_train[0] = 7
    assert x.max() == 0


def test_classes_come_from_both_splits_or_are_given() -> None:
    x = np.zeros((4, 2))
    assert from_arrays(x, Y, x, [0, 0, 0, 6]).classes == tuple("0123456")
    assert make(x, classes=5).classes == tuple("01234")
    assert make(x, classes=["a", "b", "c"], name="letters").classes == ("a", "b", "c")
    with pytest.raises(UserError, match="letters: y_train holds the label 2, outside the 2 classes"):
        make(x, classes=["a", "b"], name="letters")


@pytest.mark.parametrize(
    ("x", "y", "complaint"),
    [
        (np.zeros((4, 2)), [0, 1, 0.5, 1], r"y_train\[2\] is 0\.5"),
        (np.zeros((4, 2)), [0, 1, float("nan"), 1], r"y_train\[2\] is nan"),
        (np.zeros((4, 2)), [0, 1, float("inf"), 1], r"y_train\[2\] is inf"),
        (np.zeros((4, 2)), np.eye(4), "y_train has shape"),
        (np.zeros((4, 2)), [0, 1, -1, 1], "label -1"),
        (np.zeros((4, 2)), [0, 1, 2], "y_train has shape"),
        (np.zeros((4, 2)), np.array([0, 1, 2, 2**64 - 1], np.uint64), r"y_train\[3\]"),
        (np.zeros((4, 2)), [0, 1, 2, 10**15], "number the classes from 0"),
        (np.zeros((0, 2)), [], "x_train must hold examples"),
        (np.zeros(4), Y, "x_train must hold examples"),
        (np.array([["a"]] * 4), Y, "x_train holds <U1"),
        (np.array([[None]] * 4), Y, "x_train holds object"),
        ([[1, 2], [3]], Y, "x_train is not an array"),
        (np.full((4, 2), np.nan), Y, "x_train holds NaN"),
        (np.zeros((4, 2), complex), Y, "x_train holds complex"),
        (torch.zeros(4, 2).to_sparse(), Y, "x_train is not an array"),
    ],
)
def test_what_cannot_be_used_is_named(x: Any, y: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        make(x, y, name="mine")
    assert str(caught.value).startswith("mine: ")
    assert "\n" not in str(caught.value)


def arrays() -> dict[str, Any]:
    x = np.random.default_rng(0).random((4, 3, 5, 5), dtype=np.float32)
    return {"x_train": x, "y_train": np.array(Y), "x_test": x[:2], "y_test": np.array(Y[:2])}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_round_trip(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "mine.npz", extra=np.zeros(1), **arrays())
    data = load_npz(tmp_path / "mine.npz")
    np.testing.assert_array_equal(data.x_train.numpy(), arrays()["x_train"])
    assert (data.name, len(data.classes), data.peak) == ("mine.npz", 3, 1.0)


@pytest.mark.parametrize("key", ["x_train", "y_train", "x_test", "y_test"])
def test_npz_names_what_is_missing_or_no_numbers(tmp_path: Path, key: str) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, **{name: array for name, array in arrays().items() if name != key})
    with pytest.raises(UserError, match=rf"mine\.npz: no array '{key}'"):
        load_npz(path)
    np.savez(path, **{**arrays(), key: np.array([{}, None], dtype=object)})
    with pytest.raises(UserError, match=rf"mine\.npz: cannot be read as \.npz in '{key}' \(objects, not numbers\)"):
        load_npz(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_truncated_anywhere(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "mine.npz"
    save(path, **arrays())
    raw = path.read_bytes()
    for length in [*range(0, len(raw), 97), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(UserError, match=r"mine\.npz: "):
            load_npz(path)


def test_npz_with_flipped_bytes(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, **arrays())
    raw = bytearray(path.read_bytes())
    for position in range(0, len(raw), 7):
        damaged = raw.copy()
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):  # some bytes, such as dates, do not matter
            load_npz(path)


def test_what_is_no_npz(tmp_path: Path) -> None:
    single = io.BytesIO()
    np.save(single, np.zeros(3))
    note = io.BytesIO()
    with zipfile.ZipFile(note, "w") as archive:
        for key in arrays():
            archive.writestr(f"{key}.npy", b"not an array")
    for content in (b"", b"words", single.getvalue(), pickle.dumps([1]), note.getvalue()):
        (tmp_path / "mine.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"mine\.npz: "):
            load_npz(tmp_path / "mine.npz")
    with pytest.raises(UserError, match="no such file"):
        load_npz(tmp_path / "absent.npz")
    with pytest.raises(UserError, match="cannot be read"):
        load_npz(tmp_path)


def test_clients_by_number_or_name(tmp_path: Path) -> None:
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    for clients in (["ann", "eve", "ann", "bob"], [3, 9, 3, 7], torch.tensor([3, 9, 3, 7])):
        owners = from_arrays(x, y, x, y, clients=clients).owners
        assert owners is not None
        assert owners.tolist() == [0, 2, 0, 1]
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y, clients=np.array([1, 0, 1, 1]))
    mine, nobodys = load_npz(tmp_path / "mine.npz"), from_arrays(x, y, x, y)
    assert mine.owners is not None
    assert mine.owners.tolist() == [1, 0, 1, 1]
    assert from_arrays(x, y, x, y, clients=[0, 0, 0, 1]).fingerprint != nobodys.fingerprint
    for wrong in ([0, 1], [0.5, 1, 2, 3], [[0], [0], [0], [1]]):
        with pytest.raises(UserError, match="give a number or a name for each of the 4 training examples"):
            from_arrays(x, y, x, y, clients=wrong)


def test_labels_may_be_words() -> None:
    x = np.zeros((3, 2), np.float32)
    found = from_arrays(x, ["dog", "cat", "dog"], x, np.array([["cat"], ["cat"], ["eel"]]))
    assert found.classes == ("cat", "dog", "eel")
    assert found.y_train.tolist() == [1, 0, 1]
    assert found.y_test.tolist() == [0, 0, 2]
    named = from_arrays(x, ["dog", "cat", "dog"], x, ["cat", "cat", "dog"], classes=["dog", "fox", "cat"])
    assert named.classes == ("dog", "fox", "cat")
    assert named.y_train.tolist() == [0, 2, 0]
    with pytest.raises(UserError, match="'cat' is none of the classes"):
        from_arrays(x, ["dog", "cat", "dog"], x, ["dog"] * 3, classes=["dog"])
    with pytest.raises(UserError, match="3 words for 2 classes"):
        from_arrays(x, ["a", "b", "c"], x, ["a"] * 3, classes=2)
    with pytest.raises(UserError, match="y_test holds <U1, not numbers"):
        from_arrays(x, [0, 1, 0], x, ["a", "b", "c"])


@pytest.mark.parametrize(
    "x",
    [
        (np.zeros((4, 3)), np.zeros((4, 3))),
        [np.zeros((4, 3)), np.zeros((4, 5, 5)), torch.zeros(4, 1)],
        {"text": np.zeros((4, 3)), "image": np.zeros((4, 5, 5))},
    ],
)
def test_several_inputs_are_packed_and_come_back(x: Any) -> None:
    data = make(x)
    given_parts = dict(x) if isinstance(x, dict) else dict(enumerate(x))
    arguments, keywords = unpacked(data.parts, data.x_train)
    parts = dict(enumerate(arguments)) | keywords
    assert list(parts) == list(given_parts)
    for key, values in given_parts.items():
        assert torch.equal(parts[key], torch.as_tensor(values))


def test_types_of_several_inputs() -> None:
    x = {"tokens": np.arange(8).reshape(4, 2), "mask": np.eye(4, 2, dtype=bool), "size": np.ones(4, np.float32)}
    data = make(x)
    assert data.x_train.dtype == torch.float32
    _, keywords = unpacked(data.parts, data.x_train)
    assert {key: (part.dtype, tuple(part.shape)) for key, part in keywords.items()} == {
        "tokens": (torch.int64, (4, 2)),
        "mask": (torch.bool, (4, 2)),
        "size": (torch.float32, (4,)),
    }
    assert torch.equal(keywords["tokens"], torch.arange(8).view(4, 2))
    assert make({key: x[key] for key in ("tokens", "mask")}).x_train.dtype == torch.int64
    with pytest.raises(UserError, match="whole numbers above 16777216, which do not fit"):
        make({"id": np.full(4, 2**24 + 1), "size": np.ones(4, np.float32)})
    with pytest.raises(UserError, match=r"x_train\['b'\] has shape \(3,\), for 4 examples"):
        make({"a": np.zeros((4, 2)), "b": np.zeros(3)})


@pytest.mark.parametrize(
    ("targets", "y", "outputs", "dtype"),
    [
        ("values", np.array([0.5, 1.0, 2.0, 3.0], np.float32), 1, torch.float32),
        ("values", np.arange(8).reshape(4, 2), 2, torch.float64),
        ("labels", np.eye(4, 3, dtype=bool), 3, torch.int64),
        ("tokens", np.array([[1, 2], [3, -100], [0, 0], [6, 1]]), 7, torch.int64),
        ("any", np.zeros((4, 2, 2)), 2, torch.float64),
    ],
)
def test_targets_of_other_tasks(targets: Any, y: Any, outputs: int, dtype: torch.dtype) -> None:
    data = from_arrays(np.zeros((4, 3)), y, np.zeros((4, 3)), y, targets=targets)
    assert (len(data.classes), data.y_train.dtype, tuple(data.y_train.shape)) == (outputs, dtype, y.shape)
    assert data.labels.tolist() == [0] * 4
    assert data.label_names == ("examples",)


@pytest.mark.parametrize(
    ("targets", "y", "complaint"),
    [
        ("values", [0.5, np.inf, 1.0, 1.0], "y_train holds NaN or infinity, first in example 1"),
        ("labels", [[0, 2], [1, 1], [0, 0], [1, 0]], "holds the label 2, outside 0 and 1"),
        ("labels", [0, 1, 0, 1], "the task needs 0 or 1 for every label"),
        ("tokens", [0, 1, 0, 1], "the task needs the number of a token at every place"),
        ("classes", [[0, 1]] * 4, "give one class number per example"),
    ],
)
def test_targets_that_do_not_fit_the_task(targets: Any, y: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        from_arrays(np.zeros((4, 3)), y, np.zeros((4, 3)), y, targets=targets)


def test_fingerprints_of_integers_and_images_are_those_of_earlier_versions() -> None:
    """Which held them as float32 and `[N, 1, H, W]`: resumed runs compare fingerprints."""
    x = np.arange(48).reshape(4, 3, 4)
    assert make(x).fingerprint == make(x.astype(np.float32)[:, None]).fingerprint


def test_a_list_of_examples_is_one_input() -> None:
    assert make([np.zeros(3), np.ones(3), np.zeros(3), np.ones(3)]).shape == (3,)
    assert make([torch.zeros(3)] * 4).shape == (3,)
    assert make([np.zeros(2), np.ones(2)], [0, 1]).shape == (2,)  # as many arrays as examples


def test_clients_keep_their_names() -> None:
    x = np.zeros((4, 3))
    assert make(x, clients=["mayo", "charite", "mayo", "charite"]).client_names == ("charite", "mayo")
    assert make(x, clients=np.array([b"mayo", b"charite", b"mayo", b"mayo"])).client_names == ("charite", "mayo")
    assert make(x, clients=[205, 101, 101, 205]).client_names == ("101", "205")
    assert make(x, clients=[1, 0, 2, 1]).client_names is None
