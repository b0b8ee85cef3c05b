"""SVHN from small MATLAB files written on the spot, whole and broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from fedgg.data.readers import load_svhn
from fedgg.errors import UserError


def write(path: Path, count: int = 20, compressed: bool = True, **changes: Any) -> np.ndarray[Any, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    labels = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]
    content = {"X": images.transpose(1, 2, 3, 0), "y": labels, **changes}
    savemat(path, {key: array for key, array in content.items() if array is not None}, do_compression=compressed)
    return images


@pytest.mark.parametrize("below", ["", "svhn"])
@pytest.mark.parametrize("compressed", [True, False])
def test_pixels_and_labels(tmp_path: Path, below: str, compressed: bool) -> None:
    images = write(tmp_path / below / "train_32x32.mat", 20, compressed)
    write(tmp_path / below / "test_32x32.mat", 10, compressed)
    data = load_svhn(tmp_path)
    assert data.x_train.shape == (20, 3, 32, 32)
    assert data.x_train.dtype == torch.uint8
    np.testing.assert_array_equal(data.x_train.numpy(), images.transpose(0, 3, 1, 2))
    assert data.y_train.tolist() == [*range(1, 10), 0] * 2  # the tenth is a zero, published as 10
    assert data.x_test.shape == (10, 3, 32, 32)
    assert data.peak == 255.0
    assert data.classes == tuple("0123456789")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train_32x32\.mat .*fedgg data fetch svhn"):
        load_svhn(tmp_path / "nowhere")
    write(tmp_path / "train_32x32.mat")
    with pytest.raises(UserError, match=r"svhn: test_32x32\.mat is not in"):
        load_svhn(tmp_path)


@pytest.mark.parametrize("compressed", [True, False])
def test_truncation_anywhere_is_a_user_error(tmp_path: Path, compressed: bool) -> None:
    write(tmp_path / "train_32x32.mat", 3, compressed)
    whole = tmp_path / "test_32x32.mat"
    write(whole, 3, compressed)
    raw = whole.read_bytes()
    for length in [0, 1, 100, 127, 128, 129, 136, 140, *range(200, len(raw) - 1, 499), len(raw) - 1]:
        whole.write_bytes(raw[:length])
        with pytest.raises(UserError, match=r"test_32x32\.mat: ") as caught:
            load_svhn(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"<html>not found</html>" * 50, b"\x00" * 500, b"\x89HDF\r\n\x1a\n" + b"\x00" * 500]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "test_32x32.mat")
    (tmp_path / "train_32x32.mat").write_bytes(content)
    with pytest.raises(UserError, match=r"train_32x32\.mat: .*fetch svhn again"):
        load_svhn(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"y": None}, "no array 'y'"),
        ({"X": None}, "no array 'X'"),
        ({"X": np.zeros((20, 32, 32, 3), np.uint8)}, "expected uint8"),
        ({"X": np.zeros((32, 32, 3, 20))}, "expected uint8"),
        ({"y": np.ones((19, 1), np.uint8)}, "20 images but 19 labels"),
        ({"y": np.full((20, 1), 11, np.uint8)}, "label 11 is not a digit"),
        ({"y": np.full((20, 1), 1.5)}, r"label 1\.5 is not a digit"),
        ({"y": np.full((20, 1), np.nan)}, "label nan is not a digit"),
        ({"y": np.array(["a"] * 20)}, "labels"),
    ],
)
def test_wrong_content_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    write(tmp_path / "train_32x32.mat", **changes)
    write(tmp_path / "test_32x32.mat")
    with pytest.raises(UserError, match=complaint):
        load_svhn(tmp_path)
