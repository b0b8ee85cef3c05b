"""SVHN, house numbers cut into digits, from the publisher's two MATLAB files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgg.data.catalog import SVHN, places_to_look
from fedgg.data.dataset import Dataset
from fedgg.errors import UserError
from fedgg.files import open_regular

TRAIN, TEST = (file.name for file in SVHN.files)


def load_svhn(folder: str | Path) -> Dataset:
    """SVHN, 99,289 house-number digits 3x32x32 in 10 classes; a download of 246 MB.

    From train_32x32.mat and test_32x32.mat in `folder` or one level below.
    """
    files = find_files(Path(folder))
    for name in (TRAIN, TEST):
        if name not in files:
            raise UserError(
                f"svhn: {name} is not in {folder} or one level below; "
                "run `fedgg data fetch svhn` or say with --data-folder or FEDGG_DATA which folder holds it"
            )
    x_train, y_train = read_split(files[TRAIN])
    x_test, y_test = read_split(files[TEST])
    return Dataset("svhn", x_train, y_train, x_test, y_test, SVHN.classes, peak=255.0)


def find_files(folder: Path) -> dict[str, Path]:
    """Where the two files are, those of the two that are there."""
    try:
        places = places_to_look(folder)
        found = {name: [place / name for place in places if (place / name).is_file()] for name in (TRAIN, TEST)}
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); choose another folder or its rights") from error
    return {name: paths[0] for name, paths in found.items() if paths}


def read_split(path: Path) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] and labels [N] of one file; the publisher labels the digit 0 as 10."""
    from scipy.io import loadmat

    try:
        with open_regular(path) as file:
            content = loadmat(file, variable_names=["X", "y"])
    except Exception as error:  # damaged bytes make scipy fail in any of a dozen ways
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: damaged or not a MATLAB file ({reason}); fetch svhn again") from error
    for key in ("X", "y"):
        if not isinstance(content.get(key), np.ndarray):
            raise UserError(f"{path}: no array {key!r}, it is cut short or not SVHN; fetch svhn again")
    images, labels = content["X"], content["y"].reshape(-1)
    if images.ndim != 4 or images.shape[:3] != (32, 32, 3) or images.dtype != np.uint8:
        raise UserError(f"{path}: X is {images.dtype} of shape {images.shape}, expected uint8 [32, 32, 3, N]")
    if len(labels) != images.shape[3] or labels.dtype.kind not in "iuf":
        raise UserError(f"{path}: {images.shape[3]} images but {len(labels)} labels of type {labels.dtype}")
    wrong = labels[~np.isin(labels, np.arange(11))]
    if len(wrong):
        raise UserError(f"{path}: label {wrong[0]} is not a digit (1 to 9, and 10 for 0); fetch svhn again")
    pixels = np.ascontiguousarray(images.transpose(3, 2, 0, 1))
    return torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64) % 10)
