"""Data sets: four tensors and the names of the classes, whichever source they come from; and loading one by name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgg.data import DATASETS, registered_name
from fedgg.data.catalog import data_folder
from fedgg.errors import UserError
from fedgg.registry import accepted_settings


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set, in memory, as their publisher wrote them: nothing is normalised here."""

    name: str
    x_train: Tensor  # [N, ...] uint8 or floating point; images are [N, C, H, W]
    y_train: Tensor  # [N] int64, 0 .. classes - 1
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]
    peak: float = 1.0  # the value of a fully bright pixel: 255 for bytes, 16 for digits, 1 where inputs are no pixels
    owners: Tensor | None = None  # [N] int64: the client that holds each training example, where the data say so
    client_names: tuple[str, ...] | None = None  # of the owners 0, 1, ..., where these are not their numbers
    words: bool = False  # whether labels came as words, the names of the classes
    shape: tuple[int, ...] = field(init=False)  # of one example

    def __post_init__(self) -> None:
        for split, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if x.ndim < 2 or len(x) == 0:
                raise UserError(f"{self.name}: x_{split} must hold examples [N, ...], got shape {tuple(x.shape)}")
            if y.shape != x.shape[:1]:
                raise UserError(
                    f"{self.name}: y_{split} has shape {tuple(y.shape)} but x_{split} holds {len(x)} examples"
                )
            if y.dtype != torch.int64:
                raise UserError(f"{self.name}: y_{split} must be whole numbers (int64), got {y.dtype}")
            if x.dtype != torch.uint8 and not x.is_floating_point():
                raise UserError(f"{self.name}: x_{split} must be bytes or floating point, got {x.dtype}")
            if x.is_floating_point() and not bool(torch.isfinite(x).all()):
                bad = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
                raise UserError(f"{self.name}: x_{split} holds NaN or infinity, first in example {bad}; clean it first")
            low, high = int(y.min()), int(y.max())
            if low < 0 or high >= len(self.classes):
                raise UserError(
                    f"{self.name}: y_{split} holds the label {low if low < 0 else high}, outside the "
                    f"{len(self.classes)} classes 0 to {len(self.classes) - 1}"
                )
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            shapes = f"{tuple(self.x_train.shape[1:])} and {tuple(self.x_test.shape[1:])}"
            raise UserError(f"{self.name}: x_train and x_test hold examples of different shapes, {shapes}")
        if self.x_train.dtype != self.x_test.dtype:
            raise UserError(f"{self.name}: x_train is {self.x_train.dtype} but x_test is {self.x_test.dtype}")
        object.__setattr__(self, "shape", tuple(self.x_train.shape[1:]))

    def to(self, device: torch.device) -> Dataset:
        """The same data on another device, where several experiments can share it."""
        moved = {name: getattr(self, name).to(device) for name in ("x_train", "y_train", "x_test", "y_test")}
        return replace(self, **moved)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every value, so that a resumed run notices other data."""
        digest = hashlib.sha256()
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
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


def load(name: str, folder: Path | None = None, **settings: Any) -> Dataset:
    """The registered data set `name`, read from `folder` or the folder that `data_folder()` names.

    `settings` are parameters of its loader.
    """
    registered = registered_name(name) if ":" in name else name
    if registered not in DATASETS:
        raise unknown_data_set(name)
    loader = DATASETS[registered]
    if registered != name:
        return loader(name.partition(":")[2], **settings)
    if "folder" in accepted_settings(loader):
        settings["folder"] = data_folder(folder)
    return loader(**settings)


def unknown_data_set(name: str) -> UserError:
    """The error for a name that is not registered, with the most similar one."""
    suggestion = f"did you mean 'npz:{name}'?" if name.endswith(".npz") else DATASETS.suggestion(name)
    return UserError(f"unknown data set {name!r}: {suggestion}")
