"""The paper's CNN for CIFAR-10: 5x5 convolutions of 6 and 16 channels, each with a 2x2 max-pool, then 120 and 84."""

from __future__ import annotations

from torch import nn

from fedgg.errors import UserError
from fedgg.models.ending import ending


def cnn(shape: tuple[int, ...], classes: int, projection: int = 0) -> nn.Module:
    """5x5 convolutions of 6 and 16 channels with max-pools, then 120 and 84: the paper's for CIFAR-10."""
    if len(shape) == 3 and shape[2] <= 4 < shape[0]:
        raise UserError(f"examples of shape {shape} look like [H, W, C]: put the channels first, as [C, H, W]")
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise UserError(f"the cnn needs images of 16 x 16 pixels or more, got examples of shape {shape}: take mlp")
    channels, height, width = shape
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * rows * columns, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        *ending(84, classes, projection),
    )
