"""Data sets: four tensors and the names of the outputs, whichever source they come from; and loading one by name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgg.core.layout import InputPart
from fedgg.core.tasks import Targets
from fedgg.data import DATASETS, registered_name
from fedgg.data.catalog import data_folder
from fedgg.errors import UserError
from fedgg.registry import accepted_settings


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set, in memory, as their publisher wrote them: nothing is normalised here."""

    name: str
    x_train: Tensor  # [N, ...] uint8 (pixels), floating point or int64 (tokens); images are [N, C, H, W]
    y_train: Tensor  # [N, ...], see `targets`
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]  # the names of a model's outputs
    peak: float = 1.0  # the value of a fully bright pixel: 255 for bytes, 16 for digits, 1 where inputs are no pixels
    owners: Tensor | None = None  # [N] int64: the client that holds each training example, where the data say so
    client_names: tuple[str, ...] | None = None  # of the owners 0, 1, ..., where these are not their numbers
    words: bool = False  # whether labels came as words, the names of the classes
    targets: Targets = "classes"
    parts: tuple[InputPart, ...] = ()  # of several inputs, which lie side by side in the rows of x
    shape: tuple[int, ...] = field(init=False)  # of one example
    labels: Tensor = field(init=False)  # [N] the class of each training example; 0 for all where they have none
    label_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        for split, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if x.ndim < 2 or len(x) == 0:
                raise UserError(f"{self.name}: x_{split} must hold examples [N, ...], got shape {tuple(x.shape)}")
            if len(y) != len(x) if y.ndim else True:
                raise UserError(
                    f"{self.name}: y_{split} has shape {tuple(y.shape)} but x_{split} holds {len(x)} examples"
                )
            if x.dtype not in (torch.uint8, torch.int64) and not x.is_floating_point():
                raise UserError(f"{self.name}: x_{split} must be bytes, int64 or floating point, got {x.dtype}")
            if x.is_floating_point() and not bool(torch.isfinite(x).all()):
                bad = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
                raise UserError(f"{self.name}: x_{split} holds NaN or infinity, first in example {bad}; clean it first")
            self._check_targets(f"y_{split}", y)
        for key, train, test in (("x", self.x_train, self.x_test), ("y", self.y_train, self.y_test)):
            if train.shape[1:] != test.shape[1:]:
                shapes = f"{tuple(train.shape[1:])} and {tuple(test.shape[1:])}"
                what = "examples" if key == "x" else "targets"
                raise UserError(f"{self.name}: {key}_train and {key}_test hold {what} of different shapes, {shapes}")
            if train.dtype != test.dtype:
                raise UserError(f"{self.name}: {key}_train is {train.dtype} but {key}_test is {test.dtype}")
        has_classes = self.y_train.ndim == 1 and not self.y_train.is_floating_point()
        labels = self.y_train if has_classes else torch.zeros(len(self.y_train), dtype=torch.int64)
        object.__setattr__(self, "shape", tuple(self.x_train.shape[1:]))
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "label_names", self.classes if has_classes else ("examples",))

    def _check_targets(self, key: str, y: Tensor) -> None:
        """UserError where targets are not what `targets` says."""
        title, low = f"{self.name}: {key}", 0
        dimensions: tuple[int, ...]
        match self.targets:
            case "classes":
                dimensions, kind = (1,), "the number of a class for each example, [N]"
            case "tokens":
                dimensions, kind, low = (2,), "the number of a token at every place, [N, T]", -(2**63)
            case "labels":
                dimensions, kind = (2,), "0 or 1 for every label, [N, labels]"
            case "values":
                dimensions, kind = (1, 2), "floating point numbers, [N] or [N, values]"
            case _:
                dimensions, kind = tuple(range(1, 10)), "numbers"
        whole = self.targets in ("classes", "tokens", "labels")
        if y.ndim not in dimensions or (whole and y.dtype != torch.int64):
            raise UserError(f"{title} is {y.dtype} of shape {tuple(y.shape)}; the task needs {kind}")
        if self.targets == "values" and not y.is_floating_point():
            raise UserError(f"{title} is {y.dtype} of shape {tuple(y.shape)}; the task needs {kind}")
        if y.is_floating_point():
            if not bool(torch.isfinite(y).all()):
                bad = int((~torch.isfinite(y)).reshape(len(y), -1).any(1).nonzero()[0])
                raise UserError(f"{title} holds NaN or infinity, first in example {bad}; clean it first")
        elif whole:
            above = 2 if self.targets == "labels" else len(self.classes)
            smallest, largest = int(y.min()), int(y.max())
            if smallest < low or largest >= above:
                outside = smallest if smallest < low else largest
                what = "0 and 1" if self.targets == "labels" else f"the {above} classes 0 to {above - 1}"
                raise UserError(f"{title} holds the label {outside}, outside {what}")

    @cached_property
    def in_floating_point(self) -> Dataset:
        """The same data with inputs that are int64 as float32."""
        return replace(self, x_train=self.x_train.float(), x_test=self.x_test.float())

    @cached_property
    def as_images(self) -> Dataset:
        """Examples `[H, W]` as images of one channel, `[1, H, W]`."""
        return replace(self, x_train=self.x_train.unsqueeze(1), x_test=self.x_test.unsqueeze(1))

    def to(self, device: torch.device) -> Dataset:
        """The same data on another device, where several experiments can share it."""
        moved = {name: getattr(self, name).to(device) for name in ("x_train", "y_train", "x_test", "y_test")}
        return replace(self, **moved)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every value, so that a resumed run notices other data."""
        digest = hashlib.sha256()
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
            if tensor is self.x_train or tensor is self.x_test:  # as earlier versions converted inputs
                tensor = tensor.float() if tensor.dtype == torch.int64 else tensor
                tensor = tensor.unsqueeze(1) if tensor.ndim == 3 else tensor
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().reshape(-1).view(np.uint8).data)
        if self.owners is not None:
            digest.update(b"owners" + self.owners.numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel of the training set; in chunks, so that no copy of all bytes is made.

        Like the fingerprint they are computed once, however many runs of a study share the data.
        """
        x = self.x_train
        axes = [0, *range(2, x.ndim)]
        total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        square = torch.zeros_like(total)
        for chunk in x.split(8192):
            values = chunk.double()
            total += values.sum(axes)
            square += values.square().sum(axes)
        count = x.numel() / x.shape[1]
        mean = total / count
        return mean, (square / count - mean.square()).clamp_min(0).sqrt()


def load(name: str, folder: Path | None = None, targets: Targets = "classes", **settings: Any) -> Dataset:
    """The registered data set `name`, read from `folder` or the folder that `data_folder()` names.

    `settings` are parameters of its loader.
    """
    registered = registered_name(name) if ":" in name else name
    if registered not in DATASETS:
        raise unknown_data_set(name)
    loader = DATASETS[registered]
    if registered != name:
        return loader(name.partition(":")[2], targets=targets, **settings)
    if "folder" in accepted_settings(loader):
        settings["folder"] = data_folder(folder)
    return loader(**settings)


def unknown_data_set(name: str) -> UserError:
    """The error for a name that is not registered, with the most similar one."""
    suggestion = f"did you mean 'npz:{name}'?" if name.endswith(".npz") else DATASETS.suggestion(name)
    return UserError(f"unknown data set {name!r}: {suggestion}")
