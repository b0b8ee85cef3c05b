"""Fully connected models: a linear one, and the paper's MLP for SVHN (3072-512-10, ReLU)."""

from __future__ import annotations

import math

from torch import nn

from fedgg.errors import UserError
from fedgg.models.ending import ending


def linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    """One linear layer on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: tuple[int, ...], classes: int, hidden: int = 512, projection: int = 0) -> nn.Module:
    """One hidden layer with ReLU: the paper's "three-layer MLP", which counts input, hidden and output."""
    if hidden < 1:
        raise UserError(f"the mlp needs a hidden layer of at least one unit, got hidden = {hidden}")
    body = (nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU())
    return nn.Sequential(*body, *ending(hidden, classes, projection))
