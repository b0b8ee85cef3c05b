"""Data sets by name, loaded from this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedgg.data import DATASETS
from fedgg.data.catalog import data_folder
from fedgg.errors import UserError
from fedgg.registry import ARRAYS_IN_FILE, accepted_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedgg.data.dataset import Dataset


def are_own_arrays(name: str) -> bool:
    """Whether a source is the user's own data, from a file, a function or Python, rather than a registered data set."""
    return ":" in name


def load(name: str, folder: Path | None = None) -> Dataset:
    """The registered data set `name`, read from `folder` or the folder that `data_folder()` names."""
    check_name(name)
    if name.startswith(ARRAYS_IN_FILE):
        file = name.removeprefix(ARRAYS_IN_FILE)
        if not file:
            raise UserError("npz: names no file; write npz:FILE, for instance npz:mine.npz")
        return DATASETS["npz:FILE"](file)
    return call_loader(DATASETS[name], folder)


def call_loader(loader: Callable[..., Dataset], folder: Path | None) -> Dataset:
    """Functions that read files have a parameter `folder`."""
    return loader(folder=data_folder(folder)) if "folder" in accepted_settings(loader) else loader()


def check_name(name: str) -> None:
    """UserError with the most similar name where no data set of this name is registered."""
    if name.startswith(ARRAYS_IN_FILE) or (name in DATASETS and ":" not in name):
        return
    suggestion = f"did you mean 'npz:{name}'?" if name.endswith(".npz") else DATASETS.suggestion(name)
    raise UserError(f"unknown data set {name!r}: {suggestion}")
