"""Data sets from arrays a user already has: NumPy, torch, nested lists, or an .npz file."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.core.layout import InputPart
from fedgg.core.tasks import Targets
from fedgg.data.dataset import Dataset
from fedgg.errors import UserError
from fedgg.files import open_regular

UNREADABLE_NPZ = (  # what NumPy raises for a damaged file or one that is none
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,  # of a header, from Python 3.12 on
    EOFError,
    ValueError,
    OSError,
    MemoryError,
    NotImplementedError,
)
KEYS = ("x_train", "y_train", "x_test", "y_test")
EXACT = 2**24  # whole numbers up to this are exact in single precision
_MOST_CLASSES = 1_000_000  # beyond this, labels are surely identifiers rather than class numbers


def from_arrays(
    x_train: Any,
    y_train: Any,
    x_test: Any,
    y_test: Any,
    name: str = "arrays",
    classes: int | Sequence[str] | None = None,
    clients: Any = None,
    targets: Targets = "classes",
) -> Dataset:
    """A data set from arrays, which are copied.

    Inputs keep their shape: bytes are pixels (a bright one is 255), other whole numbers become int64, float64 stays
    float64, so that float64 runs are exact, and every other number becomes float32. A model with several inputs takes a
    dict of arrays (its keyword arguments) or a tuple of them (its arguments).
    Targets are what the task needs. For classes: whole numbers of any type, [N] or [N, 1]; or words, which are the
    names of the classes. `classes` is the number of outputs or their names; without it, the largest label plus one, or
    the words in alphabetical order.
    `clients` says who holds each training example, by numbers or names [N]: clients are then numbered in the order of
    these, for the split `given`, and keep them as their names.
    """
    x, parts = _inputs(x_train, x_test, y_train, y_test, name)
    words = [_words(y_train), _words(y_test)] if targets == "classes" else [None, None]
    is_named = words[0] is not None and words[1] is not None
    if words[0] is not None and words[1] is not None:
        y_train, y_test, classes = _numbered(words[0], words[1], classes, name)
    y = [_targets(values, key, name, targets) for key, values in (("y_train", y_train), ("y_test", y_test))]
    if classes is None:
        classes = _outputs(y, targets)
        if classes > _MOST_CLASSES:
            raise UserError(f"{name}: the largest label is {classes - 1}; number the classes from 0 without gaps")
    names = tuple(str(i) for i in range(classes)) if isinstance(classes, int) else tuple(str(word) for word in classes)
    owners, client_names = (None, None) if clients is None else _owners(clients, len(x[0]), name)
    return Dataset(
        name=name,
        classes=names,
        peak=255.0 if x[0].dtype == torch.uint8 else 1.0,
        owners=owners,
        client_names=client_names,
        words=is_named,
        x_train=x[0],
        y_train=y[0],
        x_test=x[1],
        y_test=y[1],
        targets=targets,
        parts=parts,
    )


def _outputs(y: Sequence[Tensor], targets: Targets) -> int:
    """How many outputs the targets ask for: one for each class, token, label or value."""
    if targets in ("classes", "tokens") or (targets == "any" and not y[0].is_floating_point()):
        return 1 + max((int(numbers.max()) for numbers in y if numbers.numel()), default=0)
    return 1 if y[0].ndim == 1 else int(y[0].shape[1])


def load_npz(path: str | Path, targets: Targets = "classes") -> Dataset:
    """Your own arrays: an .npz file with x_train, y_train, x_test, y_test; with `clients` for the split `given`.

    Several inputs have the names of their parts: x_train.image, x_test.image, x_train.age, ...
    """
    if not str(path):
        raise UserError("npz: names no file; write npz:FILE, for instance npz:mine.npz")
    path = Path(path).expanduser()
    key = ""
    try:
        arrays: dict[str, Any] = {}
        with open_regular(path) as file:
            with zipfile.ZipFile(file) as archive:
                held = {name.removesuffix(".npy") for name in archive.namelist()}
            parts = sorted(key.partition(".")[2] for key in held if key.startswith("x_train."))
            wanted_keys = [f"{key}.{part}" for key in ("x_train", "x_test") for part in parts] or KEYS[::2]
            wanted_keys = [*wanted_keys, "y_train", "y_test"]
            absent = [wanted for wanted in wanted_keys if wanted not in held]
            if absent:
                raise UserError(f"{path}: no array {absent[0]!r}; an .npz data set holds {', '.join(KEYS)}")
            file.seek(0)
            with np.load(file, allow_pickle=False) as content:
                for key in (*wanted_keys, *(["clients"] if "clients" in held else [])):
                    arrays[key] = content[key]
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; give the path of an .npz file as npz:FILE") from error
    except UNREADABLE_NPZ as error:
        reason = "objects, not numbers" if "allow_pickle" in str(error) else " ".join(str(error).split())
        at = f" in {key!r}" if key else ""
        raise UserError(f"{path}: cannot be read as .npz{at} ({reason}); write it again with numpy.savez") from error
    for key in KEYS[::2] if parts else ():
        arrays[key] = {part: arrays.pop(f"{key}.{part}") for part in parts}
    return from_arrays(**arrays, name=path.name, targets=targets)


def _as_array(values: Any, key: str, name: str) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{name}: {key} is not an array ({' '.join(str(error).split())})") from error
    if array.dtype.kind not in "buif":
        words = " (labels may be words where task.name is classification)" if key.startswith("y") else ""
        raise UserError(f"{name}: {key} holds {array.dtype}, not numbers; convert it first{words}")
    return array


def _inputs(
    x_train: Any, x_test: Any, y_train: Any, y_test: Any, name: str
) -> tuple[tuple[Tensor, Tensor], tuple[InputPart, ...]]:
    """Training and test inputs; where there are several, packed into one tensor `[N, ...]` of their parts."""
    several = {"x_train": several_inputs(x_train, y_train), "x_test": several_inputs(x_test, y_test)}
    if not any(several.values()):
        return (input_tensor(x_train, "x_train", name), input_tensor(x_test, "x_test", name)), ()
    if list(several["x_train"]) != list(several["x_test"]):
        raise UserError(f"{name}: x_train has the inputs {list(several['x_train'])}, x_test {list(several['x_test'])}")
    tensors = {
        key: {
            part: torch.from_numpy(_as_array(values, f"{key}[{part!r}]", name).copy()) for part, values in parts.items()
        }
        for key, parts in several.items()
    }
    for key, count in (("x_train", len(y_train)), ("x_test", len(y_test))):
        for part, tensor in tensors[key].items():
            if tensor.ndim == 0 or len(tensor) != count:
                raise UserError(f"{name}: {key}[{part!r}] has shape {tuple(tensor.shape)}, for {count} examples")
    parts = tuple(
        InputPart(part if isinstance(part, str) else None, tuple(tensor.shape[1:]), tensor.dtype)
        for part, tensor in tensors["x_train"].items()
    )
    for part, tensor in tensors["x_test"].items():
        if tensor.shape[1:] != tensors["x_train"][part].shape[1:]:
            raise UserError(f"{name}: x_train[{part!r}] and x_test[{part!r}] hold examples of different shapes")
    return (
        packed(list(tensors["x_train"].values()), name),
        packed(list(tensors["x_test"].values()), name),
    ), parts


def inputs_packed(x: Any, parts: tuple[InputPart, ...], name: str) -> Tensor:
    """Several inputs of new examples, packed as those of a data set."""
    values = inputs_of_parts(x, parts, name)
    keys = [f"x[{place if part.keyword is None else part.keyword!r}]" for place, part in enumerate(parts)]
    arrays = [torch.from_numpy(_as_array(one, key, name).copy()) for one, key in zip(values, keys, strict=True)]
    shapes = [tuple(array.shape[1:]) for array in arrays]
    if shapes != [part.shape for part in parts]:
        raise UserError(f"x holds inputs of shapes {shapes}; the model takes {[part.shape for part in parts]}")
    for array, key in zip(arrays, keys, strict=True):
        if len(array) != len(arrays[0]):
            raise UserError(f"{name}: {key} has shape {tuple(array.shape)}, for {len(arrays[0])} examples")
    return packed(arrays, name)


def inputs_of_parts(x: Any, parts: tuple[InputPart, ...], name: str) -> list[Any]:
    """The inputs of a model that takes several, in its order; UserError where these are others than it takes."""
    keywords = [part.keyword for part in parts if part.keyword is not None]
    if isinstance(x, tuple | list) and len(x) == len(parts):
        return list(x)
    if keywords and isinstance(x, Mapping):
        if set(x) != set(keywords):
            raise UserError(
                f"{name}: the model takes the inputs {', '.join(keywords)}; x has {', '.join(map(str, x)) or 'none'}"
            )
        return [x[keyword] for keyword in keywords]
    wanted = f"a dict with the inputs {', '.join(keywords)}" if keywords else f"a tuple of {len(parts)} inputs"
    raise UserError(f"{name}: the model takes {wanted}; x is of type {type(x).__name__}")


def several_inputs(x: Any, y: Any) -> dict[str | int, Any]:
    """Arrays by keyword or position, where there are several; a list of examples is one input."""
    if isinstance(x, Mapping):
        return {str(key): values for key, values in x.items()}
    several = isinstance(x, tuple | list) and hasattr(y, "__len__") and 0 < len(x) != len(y)
    if several and all(tuple(getattr(part, "shape", ()))[:1] == (len(y),) for part in x):
        return dict(enumerate(x))
    return {}


def packed(tensors: Sequence[Tensor], name: str) -> Tensor:
    """Side by side, `[N, values]`: int64 where all are whole numbers, else floating point."""
    whole = [not tensor.is_floating_point() for tensor in tensors]
    if all(whole):
        dtype = torch.int64
    else:
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    for tensor, is_whole in zip(tensors, whole, strict=True):
        if is_whole and dtype != torch.int64 and tensor.numel() and int(tensor.long().abs().max()) > EXACT:
            raise UserError(
                f"{name}: one of several inputs holds whole numbers above {EXACT}, which do not fit beside "
                f"floating point inputs: number them anew, from 0"
            )
    return torch.cat([tensor.reshape(len(tensor), -1).to(dtype) for tensor in tensors], 1)


def input_tensor(values: Any, key: str, name: str) -> Tensor:
    """Inputs as a data set holds them, in a copy."""
    array = _as_array(values, key, name)
    if array.dtype.kind == "f" and array.dtype.itemsize >= 8:
        wanted: type[np.generic] = np.float64
    elif array.dtype.kind in "iu":
        wanted = np.uint8 if array.dtype == np.uint8 else np.int64
    else:
        wanted = np.float32
    with np.errstate(over="ignore"):  # a value too large for float32 becomes infinity, which Dataset reports
        return torch.from_numpy(np.array(array, dtype=wanted, order="C"))


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


def _targets(values: Any, key: str, name: str, targets: Targets) -> Tensor:
    """Whole numbers as int64, others as they are."""
    array = _as_array(values, key, name)
    if targets == "values" or (targets == "any" and array.dtype.kind == "f"):
        return torch.from_numpy(np.array(array, dtype=np.float64 if array.dtype.kind != "f" else array.dtype))
    if targets == "classes":
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim != 1:
            raise UserError(
                f"{name}: {key} has shape {array.shape}; give one class number per example, [N] or [N, 1], or another "
                f"task.name (multilabel, next_token, regression)"
            )
    with np.errstate(invalid="ignore"):
        whole = array.astype(np.int64)
    changed = np.argwhere(whole != array)
    if len(changed):
        first = changed[0].tolist()
        raise UserError(
            f"{name}: {key}[{', '.join(map(str, first))}] is {array[tuple(first)]}; labels must be whole numbers"
        )
    return torch.from_numpy(whole)
