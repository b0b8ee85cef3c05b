"""Transforms of inputs: normalisation of all, random crops and flips of training images.

none      as the source has them;
unit      divided by a fully bright pixel, so that images lie in 0..1 (what fits the paper's SVHN numbers);
standard  each channel (or feature) with mean 0 and deviation 1 over the training set;
auto      the default: standard for the data sets with a name, none for a user's own arrays. An experiment replaces it
          by the one it stands for.

none       images as they are;
flip       each image mirrored left to right with probability one half;
crop       four black pixels around, then a random window of the original size;
crop_flip  both (what fits the paper's CIFAR-10 numbers).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedgg.core.sampling import stream
from fedgg.data.dataset import Dataset

Normalisation = Literal["auto", "none", "unit", "standard"]


@dataclass(frozen=True)
class Scaling:
    """x -> (x - shift) * scale, with one value for each channel or for all."""

    shift: Tensor
    scale: Tensor

    @cached_property
    def numbers(self) -> tuple[object, ...]:
        """The same for the same scaling, wherever it lies; asked of a GPU once, not in every round."""
        return self.shift.dtype, tuple(self.shift.shape), self.shift.tolist(), self.scale.tolist()

    def __call__(self, x: Tensor) -> Tensor:
        return (x.to(self.shift.dtype) - self.shift).mul_(self.scale)  # the difference is our own: no third copy

    def to(self, device: torch.device) -> Scaling:
        return Scaling(self.shift.to(device), self.scale.to(device))


def scaling(kind: Normalisation, dataset: Dataset, dtype: torch.dtype) -> Scaling:
    if kind == "none":
        return Scaling(torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype))
    if kind == "unit":
        return Scaling(torch.zeros(1, dtype=dtype), torch.full((1,), 1 / dataset.peak, dtype=dtype))
    assert kind == "standard", "an experiment knows what auto stands for"
    mean, deviation = dataset.moments
    spatial = [1] * (dataset.x_train.ndim - 2)
    steady = torch.where(deviation > 0, deviation, 1)  # a constant feature stays constant
    return Scaling(mean.view(-1, *spatial).to(dtype), (1 / steady).view(-1, *spatial).to(dtype))


Augmentation = Literal["none", "flip", "crop", "crop_flip"]

MARGIN = 4  # pixels of black on each side before a crop


@dataclass(frozen=True)
class Draws:
    """Where each image is cut and whether it is mirrored: three tensors of one shape."""

    top: Tensor  # 0 .. 2 * MARGIN
    left: Tensor
    mirror: Tensor  # 0 or 1

    def __getitem__(self, which: Any) -> Draws:
        return Draws(self.top[which], self.left[which], self.mirror[which])


def draw(kind: Augmentation, seed: int, round_: int, client: int, count: int) -> Draws | None:
    """The draws of a client's whole round, one for each example in the order in which it sees them."""
    if kind == "none":
        return None
    numbers = stream(seed, "augment", round_, client)
    corner = numbers.integers(0, 2 * MARGIN + 1, size=(2, count)) if "crop" in kind else np.full((2, count), MARGIN)
    mirror = numbers.random(count) < 0.5 if "flip" in kind else np.zeros(count, bool)
    top, left, mirrored = (torch.from_numpy(part.astype(np.int8)) for part in (*corner, mirror))
    return Draws(top, left, mirrored)


def augment(images: Tensor, draws: Draws) -> Tensor:
    """`[B, C, H, W]` of any type, moved by one gather; black is 0, so this comes before normalisation."""
    height, width = images.shape[-2:]
    device = images.device
    rows = torch.arange(height, device=device) + draws.top.to(device)[:, None] - MARGIN  # [B, H]
    columns = torch.arange(width, device=device).expand(len(images), width)
    columns = torch.where(draws.mirror.to(device)[:, None] == 1, width - 1 - columns, columns)
    columns = columns + draws.left.to(device)[:, None] - MARGIN  # [B, W]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    flat = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]  # [B, H, W]
    source = images.flatten(2)
    moved = source.gather(2, flat.flatten(1)[:, None].expand(-1, images.shape[1], -1)).view_as(images)
    return moved * inside[:, None].to(images.dtype)
