"""The digits are split once and for all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits as published

from fedgg.data import readers
from fedgg.data.readers import load_digits


def test_shapes_and_values() -> None:
    digits = load_digits()
    assert digits.x_train.shape == (1437, 1, 8, 8)
    assert digits.x_test.shape == (360, 1, 8, 8)
    assert digits.x_train.dtype == torch.float32
    assert digits.peak == 16.0 == float(digits.x_train.max())
    assert digits.classes == tuple("0123456789")


def test_every_image_is_there_once() -> None:
    digits = load_digits()
    images, labels = published(return_X_y=True)
    both = torch.cat([digits.x_train, digits.x_test]).flatten(1).numpy()
    rows = np.column_stack([both, torch.cat([digits.y_train, digits.y_test]).numpy()])
    wanted = np.column_stack([images, labels])
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, wanted.tolist()))


def test_every_class_gives_its_share() -> None:
    digits = load_digits()
    train, test = digits.y_train.bincount().numpy(), digits.y_test.bincount().numpy()
    assert np.abs(test - (train + test) * 360 / 1797).max() < 1


def test_the_split_never_changes() -> None:
    labels = load_digits().y_test.numpy().astype(np.uint8).tobytes()
    assert hashlib.sha256(labels).hexdigest()[:16] == "d12112560b51109c"


def test_the_file_is_read_as_scikit_learn_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directly, and by scikit-learn where the file is not in its place: the same arrays."""
    images, labels = published(return_X_y=True)
    monkeypatch.setattr(readers, "_digits_of_sklearn", readers._digits_of_sklearn.__wrapped__)  # type: ignore[attr-defined]  # not kept
    arrays = readers._digits_of_sklearn()
    assert arrays[0].dtype == images.dtype
    assert arrays[0].tobytes() == images.tobytes()
    np.testing.assert_array_equal(arrays[1], labels)
    read: list[Path] = []
    loadtxt = np.loadtxt

    def missing(file: Path, *more: Any, **named: Any) -> Any:
        read.append(file)
        if len(read) == 1:
            raise FileNotFoundError
        return loadtxt(file, *more, **named)

    monkeypatch.setattr("numpy.loadtxt", missing)
    assert readers._digits_of_sklearn()[0].tobytes() == images.tobytes()
    assert read[0].name == "digits.csv.gz"
