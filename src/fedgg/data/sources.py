"""The data sets by name."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from fedgg.data.catalog import data_folder
from fedgg.errors import UserError

if TYPE_CHECKING:
    from fedgg.data.dataset import Dataset


SOURCES: dict[str, str] = {
    "digits": "handwritten digits, 1,797 images 1x8x8 in 10 classes; comes with scikit-learn, no download",
    "cifar10": "CIFAR-10, 60,000 images 3x32x32 in 10 classes; 170 MB to fetch",
    "cifar100": "CIFAR-100, 60,000 images 3x32x32 in 100 classes; 169 MB to fetch",
    "svhn": "SVHN, 99,289 house-number digits 3x32x32 in 10 classes; 246 MB to fetch",
    "npz:FILE": "your own arrays: an .npz file with x_train, y_train, x_test, y_test; clients too, for the split given",
}


def are_own_arrays(name: str) -> bool:
    """Whether a source is a user's own arrays, from a file or from Python, rather than a data set with a name."""
    return name.startswith(("npz:", "python:"))


def load(name: str, folder: Path | None = None) -> Dataset:
    """The data set called `name`, from `folder` where it has files (without it, the folder `data_folder()` names)."""
    # Each source brings its own libraries; only the one asked for is imported.
    if name == "digits":
        from fedgg.data.readers import load_digits

        return load_digits()
    if name.startswith("npz:"):
        from fedgg.data.arrays import load_npz

        file = name.removeprefix("npz:")
        if not file:
            raise UserError("npz: names no file; write npz:FILE, for instance npz:mine.npz")
        return load_npz(file)

    check_name(name)

    where = data_folder(folder)
    if name == "svhn":
        from fedgg.data.readers import load_svhn

        return load_svhn(where)
    from fedgg.data.readers import load_cifar10, load_cifar100

    return load_cifar10(where) if name == "cifar10" else load_cifar100(where)


def check_name(name: str) -> None:
    """Refuse a name that is no source, with the nearest that is one."""
    if (name in SOURCES and name != "npz:FILE") or name.startswith("npz:"):
        return
    if name.endswith(".npz"):
        hint = f"did you mean npz:{name}? "
    else:
        near = difflib.get_close_matches(name.lower().replace("-", ""), SOURCES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"unknown data set {name!r}: {hint}choose from {', '.join(SOURCES)}")
