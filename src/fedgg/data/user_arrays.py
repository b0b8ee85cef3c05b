"""Data sets from arrays a user already has: NumPy, torch, nested lists, or an .npz file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.data.dataset import Dataset
from fedgg.errors import UserError
from fedgg.files import open_regular

KEYS = ("x_train", "y_train", "x_test", "y_test")
_MOST_CLASSES = 1_000_000  # beyond this, labels are surely identifiers rather than class numbers


def from_arrays(
    x_train: Any,
    y_train: Any,
    x_test: Any,
    y_test: Any,
    name: str = "arrays",
    classes: int | Sequence[str] | None = None,
    clients: Any = None,
) -> Dataset:
    """A data set from arrays, which are copied.

    Inputs: bytes stay bytes (a bright pixel is 255) and float64 stays float64, so that float64 runs are exact; every
    other number becomes float32. [N, H, W] becomes [N, 1, H, W], any other shape is left alone. Labels: whole numbers
    of any type, [N] or [N, 1]; or words, which are the names of the classes. `classes` is their number or their names;
    without it, the largest label plus one, or the words in alphabetical order.
    `clients` says who holds each training example, by numbers or names [N]: clients are then numbered in the order of
    these, for the split `given`, and keep them as their names.
    """
    _refuse_several_inputs(x_train, y_train, "x_train", name)
    _refuse_several_inputs(x_test, y_test, "x_test", name)
    inputs = {"x_train": input_tensor(x_train, "x_train", name), "x_test": input_tensor(x_test, "x_test", name)}
    words = [_words(y_train), _words(y_test)]
    if words[0] is not None and words[1] is not None:
        y_train, y_test, classes = _numbered(words[0], words[1], classes, name)
    labels = {"y_train": _labels(y_train, "y_train", name), "y_test": _labels(y_test, "y_test", name)}
    if classes is None:
        classes = 1 + max(int(numbers.max()) if len(numbers) else 0 for numbers in labels.values())
        if classes > _MOST_CLASSES:
            raise UserError(f"{name}: the largest label is {classes - 1}; number the classes from 0 without gaps")
    names = tuple(str(i) for i in range(classes)) if isinstance(classes, int) else tuple(str(word) for word in classes)
    peak = 255.0 if inputs["x_train"].dtype == torch.uint8 else 1.0
    owners, client_names = (None, None) if clients is None else _owners(clients, len(inputs["x_train"]), name)
    named = words[0] is not None and words[1] is not None
    return Dataset(
        name=name,
        classes=names,
        peak=peak,
        owners=owners,
        client_names=client_names,
        words=named,
        x_train=inputs["x_train"],
        y_train=labels["y_train"],
        x_test=inputs["x_test"],
        y_test=labels["y_test"],
    )


def load_npz(path: str | Path) -> Dataset:
    """Your own arrays: an .npz file with x_train, y_train, x_test, y_test; with `clients` for the split `given`."""
    if not str(path):
        raise UserError("npz: names no file; write npz:FILE, for instance npz:mine.npz")
    path = Path(path).expanduser()
    key = ""
    try:
        arrays = {}
        with open_regular(path) as file:
            with zipfile.ZipFile(file) as archive:
                held = {name.removesuffix(".npy") for name in archive.namelist()}
            absent = [wanted for wanted in KEYS if wanted not in held]
            if absent:
                raise UserError(f"{path}: no array {absent[0]!r}; an .npz data set holds {', '.join(KEYS)}")
            file.seek(0)
            with np.load(file, allow_pickle=False) as content:
                for key in (*KEYS, *(["clients"] if "clients" in held else [])):
                    arrays[key] = content[key]
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; give the path of an .npz file as npz:FILE") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError, MemoryError, NotImplementedError) as error:
        reason = "objects, not numbers" if "allow_pickle" in str(error) else " ".join(str(error).split())
        at = f" in {key!r}" if key else ""
        raise UserError(f"{path}: cannot be read as .npz{at} ({reason}); write it again with numpy.savez") from error
    return from_arrays(**arrays, name=path.name)


def _as_array(values: Any, key: str, name: str) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{name}: {key} is not an array ({' '.join(str(error).split())})") from error
    if array.dtype.kind not in "buif":
        raise UserError(f"{name}: {key} holds {array.dtype}, not numbers; convert it first")
    return array


def _refuse_several_inputs(x: Any, y: Any, key: str, name: str) -> None:
    """A mapping, or arrays of which each has an entry for every example; a list of examples is one input."""
    several = isinstance(x, Mapping)
    if isinstance(x, tuple | list) and hasattr(y, "__len__"):
        several = 0 < len(x) != len(y) and all(tuple(getattr(part, "shape", ()))[:1] == (len(y),) for part in x)
    if several:
        raise UserError(
            f"{name}: {key} holds several arrays, and models with several inputs are not supported yet: give one "
            f"array, for instance the inputs side by side (numpy.concatenate), and take it apart in forward()"
        )


def input_tensor(values: Any, key: str, name: str) -> Tensor:
    """Inputs as a data set holds them, in a copy."""
    array = _as_array(values, key, name)
    if array.dtype.kind == "f" and array.dtype.itemsize >= 8:
        wanted: type[np.generic] = np.float64
    else:
        wanted = np.uint8 if array.dtype == np.uint8 else np.float32
    with np.errstate(over="ignore"):  # a value too large for float32 becomes infinity, which Dataset reports
        tensor = torch.from_numpy(np.array(array, dtype=wanted, order="C"))
    return tensor.unsqueeze(1) if tensor.ndim == 3 else tensor


def _owners(clients: Any, examples: int, name: str) -> tuple[Tensor, tuple[str, ...] | None]:
    """The number of each example's client, and the clients' names where these are others than their numbers."""
    owners = np.asarray(clients.detach().cpu() if isinstance(clients, Tensor) else clients)
    if owners.shape != (examples,) or owners.dtype.kind not in "iuUS":
        raise UserError(
            f"{name}: clients is {owners.dtype} of shape {owners.shape}; give a number or a name for each of the "
            f"{examples} training examples"
        )
    values, numbers = np.unique(owners, return_inverse=True)
    names = tuple(one.decode(errors="replace") if isinstance(one, bytes) else str(one) for one in values.tolist())
    is_numbered = names == tuple(map(str, range(len(names))))
    return torch.from_numpy(numbers.astype(np.int64)), None if is_numbered else names


def _words(values: Any) -> NDArray[np.str_] | None:
    """Labels that are words; None if they are not."""
    if isinstance(values, Tensor):
        return None
    try:
        labels = np.asarray(values)
    except (ValueError, TypeError):
        return None  # `_labels` says what is wrong
    return labels if labels.dtype.kind == "U" else None


def _numbered(
    train: NDArray[np.str_], test: NDArray[np.str_], classes: int | Sequence[str] | None, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """Words as numbers of classes: of those that are named, or of all there are."""
    known = sorted({*train.ravel().tolist(), *test.ravel().tolist()})
    names = known if classes is None or isinstance(classes, int) else [str(word) for word in classes]
    strange = [word for word in known if word not in names]
    if strange or (isinstance(classes, int) and len(known) > classes):
        missing = f"{strange[0]!r} is none of the classes" if strange else f"{len(known)} words for {classes} classes"
        raise UserError(f"{name}: the labels are words, and {missing}")
    number = {word: at for at, word in enumerate(names)}
    numbers = [
        np.array([number[word] for word in words.ravel().tolist()], np.int64).reshape(words.shape)
        for words in (train, test)
    ]
    return numbers[0], numbers[1], names


def _labels(values: Any, key: str, name: str) -> Tensor:
    array = _as_array(values, key, name)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise UserError(f"{name}: {key} has shape {array.shape}; give one class number per example, [N] or [N, 1]")
    with np.errstate(invalid="ignore"):
        whole = array.astype(np.int64)
    changed = np.flatnonzero(whole != array)
    if len(changed):
        first = int(changed[0])
        raise UserError(f"{name}: {key}[{first}] is {array[first]}; labels must be whole numbers")
    return torch.from_numpy(whole)
