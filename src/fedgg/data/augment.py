"""Random crops and flips of image batches, the same in every engine: drawn for (seed, round, client), step by step.

none       images as they are;
flip       each image mirrored left to right with probability one half;
crop       four black pixels around, then a random window of the original size;
crop_flip  both (what fits the paper's CIFAR-10 numbers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedgg.core.seeds import stream

Augmentation = Literal["none", "flip", "crop", "crop_flip"]

MARGIN = 4  # pixels of black on each side before a crop


@dataclass(frozen=True)
class Draws:
    """Where each image of one batch is cut and whether it is mirrored."""

    top: Tensor  # [B] 0 .. 2 * MARGIN
    left: Tensor
    mirror: Tensor  # [B] bool


def draw(kind: Augmentation, seed: int, round_: int, client: int, sizes: list[int]) -> list[Draws] | None:
    """The draws of a client's whole round, one for each batch."""
    if kind == "none":
        return None
    numbers = stream(seed, "augment", round_, client)
    count = sum(sizes)
    corner = numbers.integers(0, 2 * MARGIN + 1, size=(2, count)) if "crop" in kind else np.full((2, count), MARGIN)
    mirror = numbers.random(count) < 0.5 if "flip" in kind else np.zeros(count, bool)
    parts = zip(*(torch.from_numpy(part).split(sizes) for part in (corner[0], corner[1], mirror)), strict=True)
    return [Draws(*part) for part in parts]


def augment(images: Tensor, draws: Draws) -> Tensor:
    """`[B, C, H, W]` of any type, moved by one gather; black is 0, so this comes before normalisation."""
    height, width = images.shape[-2:]
    device = images.device
    rows = torch.arange(height, device=device) + draws.top.to(device)[:, None] - MARGIN  # [B, H]
    columns = torch.arange(width, device=device).expand(len(images), width)
    columns = torch.where(draws.mirror.to(device)[:, None], width - 1 - columns, columns)
    columns = columns + draws.left.to(device)[:, None] - MARGIN  # [B, W]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    flat = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]  # [B, H, W]
    source = images.flatten(2)
    moved = source.gather(2, flat.flatten(1)[:, None].expand(-1, images.shape[1], -1)).view_as(images)
    return moved * inside[:, None].to(images.dtype)
