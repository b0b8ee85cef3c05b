"""Data sets of the Hugging Face Hub, or of a folder on this machine, by the package `datasets`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from fedgg.core.random_choices import stream
from fedgg.core.tasks import Targets
from fedgg.data.dataset import Dataset
from fedgg.data.user_arrays import from_arrays
from fedgg.errors import UserError, missing_extra

LOCAL = ("/", ".", "~")  # a name that begins so is a folder
TEST_SHARE = 0.1  # of the training examples, where there is no test set
_CHUNK = 1000  # images decoded at a time


def load_hugging_face(
    name: str,
    config: Annotated[str, "its configuration, where it has several"] = "",
    train: Annotated[str, "the split to train on"] = "train",
    test: Annotated[str, "the split to test on; test, or a tenth of the training examples, by default"] = "",
    input: Annotated[str, "the column of inputs; that of images by default"] = "",
    label: Annotated[str, "the column of labels; that of classes by default"] = "",
    client: Annotated[str, "the column that names clients, for the split given"] = "",
    size: Annotated[int, "images are resized to size x size pixels; 0: they are not"] = 0,
    revision: Annotated[str, "a branch, tag or commit"] = "",
    targets: Targets = "classes",
) -> Dataset:
    """A data set of the Hugging Face Hub or of a folder, by the package `datasets`; tried with folders, not the Hub.

    `hf:OWNER/NAME`, or `hf:./FOLDER` for what `save_to_disk` wrote or a folder that `load_dataset` reads. `config`: its
    configuration, where it has several; `train`, `test`: names of its splits; without a test set a tenth of the
    training examples, always the same, is taken. `input`, `label`: columns, where there are several images or classes;
    `client`: the column that names the client of each example. `size`: images are resized to size x size pixels.
    """
    if size < 0:
        raise UserError(f"data.size = {size}: give a number of pixels, or 0 to leave images as they are")
    source = f"hf:{name}"
    splits = _opened(name, config, revision)
    if train not in splits:
        raise UserError(f"{source}: no split {train!r}; set data.train to one of {', '.join(splits)}")
    if test and test not in splits:
        raise UserError(f"{source}: no split {test!r}; set data.test to one of {', '.join(splits)}")
    if test == train:
        raise UserError(f"{source}: data.test = {test!r} is the training set; leave it out for a tenth of it")
    rows, features = splits[train], splits[train].features
    columns = _Columns(source, features, input, label, client)
    x, y, owners = columns.inputs(rows, size), columns.labels(rows), columns.clients(rows)
    test = test or ("test" if "test" in splits else "")
    if test:
        x_test, y_test = columns.inputs(splits[test], size), columns.labels(splits[test])
    else:
        held = _tenth(owners, len(y))
        x_test, y_test = [x[at] for at in np.flatnonzero(held)], y[held]
        x, y = [x[at] for at in np.flatnonzero(~held)], y[~held]
        owners = None if owners is None else owners[~held]
    inputs = _stacked(x, x_test, columns.are_images, source)
    short = Path(name).expanduser().absolute().name  # in titles and file names
    names = columns.class_names() if targets == "classes" else None
    return from_arrays(inputs[0], y, inputs[1], y_test, name=short, classes=names, clients=owners, targets=targets)


def _opened(name: str, config: str, revision: str) -> Mapping[str, Any]:
    """The splits by name. Data sets that are programs are refused: `datasets` no longer runs any."""
    if not name:
        raise UserError("hf: names no data set; write hf:OWNER/NAME, for instance hf:ylecun/mnist, or hf:./FOLDER")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error
    folder = Path(name).expanduser()
    is_local = name.startswith(LOCAL)
    if is_local and not folder.is_dir():
        raise UserError(f"hf:{name}: there is no folder {folder}")
    try:
        if is_local and any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            content = datasets.load_from_disk(str(folder))
        else:
            path = str(folder) if is_local else name
            content = datasets.load_dataset(path, config or None, revision=revision or None)
    except Exception as error:  # of the package, of the network, of a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        remedy = "; set data.config" if "Config name is missing" in reason else ""
        raise UserError(f"hf:{name}: cannot be loaded ({type(error).__name__}: {reason[:300]}){remedy}") from error
    return content if isinstance(content, dict) else {"train": content}


class _Columns:
    """The columns of a data set that are used, found by their types where they are not named."""

    def __init__(self, source: str, features: Mapping[str, Any], input: str, label: str, client: str):
        self._source, self._features = source, features
        images = [name for name, kind in features.items() if _kind(kind) == "Image"]
        classes = [name for name, kind in features.items() if _kind(kind) == "ClassLabel"]
        classes = classes or [name for name in ("label", "labels") if name in features]
        self._input = self._chosen("input", input, images, "images")
        self._label = self._chosen("label", label, classes, "classes")
        self._client = self._chosen("client", client, [client], "clients") if client else ""
        self.are_images = _kind(features[self._input]) == "Image"

    def _chosen(self, key: str, named: str, candidates: Sequence[str], what: str) -> str:
        everything = ", ".join(self._features)
        if named and named not in self._features:
            raise UserError(f"{self._source}: data.{key} = {named!r} is none of its columns: {everything}")
        if not named and len(candidates) != 1:
            amount = f"several columns of {what}: {', '.join(candidates)}" if candidates else f"no column of {what}"
            raise UserError(f"{self._source}: {amount}; set data.{key} to one of {everything}")
        return named or candidates[0]

    def inputs(self, rows: Any, size: int) -> list[NDArray[Any]]:
        """Images [H, W] or [H, W, 3], or what else the column has, of each example."""
        inputs: list[NDArray[Any]] = []
        if size and not self.are_images:
            raise UserError(f"{self._source}: data.size = {size} resizes images, and {self._input!r} has none")
        rows = rows.select_columns([self._input])
        for start in range(0, len(rows), _CHUNK):
            for value in rows[start : start + _CHUNK][self._input]:
                if value is None:
                    raise UserError(f"{self._source}: example {len(inputs)} has no {self._input!r}")
                inputs.append(self._pixels(value, size) if self.are_images else np.asarray(value))
        return inputs

    def _pixels(self, image: Any, size: int) -> NDArray[np.uint8]:
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            raise UserError(f"{self._source}: {self._input!r} has images of more than 8 bits, which are not read")
        image = image.convert("L" if image.mode in ("1", "L") else "RGB")
        return np.asarray(image.resize((size, size), resample=2) if size else image)  # 2: bilinear

    def labels(self, rows: Any) -> NDArray[Any]:
        return np.asarray(rows.select_columns([self._label])[:][self._label])

    def clients(self, rows: Any) -> NDArray[Any] | None:
        return np.asarray(rows.select_columns([self._client])[:][self._client]) if self._client else None

    def class_names(self) -> list[str] | None:
        """Those of a ClassLabel; otherwise the labels say how many there are."""
        feature = self._features[self._label]
        return list(feature.names) if _kind(feature) == "ClassLabel" else None


def _kind(feature: object) -> str:
    return type(feature).__name__


def _tenth(owners: NDArray[Any] | None, examples: int) -> NDArray[np.bool_]:
    """Of each client's examples, where clients are named; a client with one example keeps it."""
    held = np.zeros(examples, bool)
    groups = np.unique(owners, return_inverse=True)[1] if owners is not None else np.zeros(examples, np.int64)
    order = np.argsort(groups, kind="stable")
    for number, group in enumerate(np.split(order, np.cumsum(np.bincount(groups))[:-1])):
        count = min(max(1, round(TEST_SHARE * len(group))), len(group) - 1)
        held[stream(0, "hf split", number).permutation(group)[:count]] = True
    return held


def _stacked(
    train: list[NDArray[Any]], test: list[NDArray[Any]], are_images: bool, source: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Images as [N, C, H, W], in colour if one of them is; other inputs side by side."""
    if are_images and any(one.ndim == 3 for one in (*train, *test)):
        train, test = ([one if one.ndim == 3 else np.stack([one] * 3, 2) for one in part] for part in (train, test))
    shapes = dict.fromkeys(one.shape for one in (*train, *test))
    if len(shapes) > 1:
        shown = " and ".join("x".join(map(str, shape)) for shape in list(shapes)[:2])
        remedy = "; data.size = 64, for instance, resizes all of them" if are_images else ""
        raise UserError(f"{source}: its examples have different shapes, {shown}{remedy}")
    stacks = [np.stack(part) for part in (train, test)]
    if are_images:
        stacks = [np.moveaxis(part, 3, 1) if part.ndim == 4 else part[:, None] for part in stacks]
    return stacks[0], stacks[1]
