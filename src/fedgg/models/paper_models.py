"""The paper's models: a linear one, the MLP for SVHN, the CNN for CIFAR-10 and VGG-16 for 32 x 32 images.

The paper says "VGG-16" and no more. Two classifiers are in use on CIFAR: `hidden` (dropout, 512, ReLU, dropout, 512,
ReLU, classes), which without batch normalisation fits the paper's accuracies, and `linear` (one layer). Convolutions
start from a normal distribution of variance 2 / (9 * channels out).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from torch import nn

from fedgg.errors import UserError
from fedgg.models import check_choice, check_dropout, image_shape

Projection = Annotated[int, "size of a projection head before the last layer; 0: none"]


def ending(features: int, classes: int, projection: int) -> list[nn.Module]:
    """The last layer; with `projection` behind two more that lead to so many numbers (256 in Li et al. 2021)."""
    if projection < 0:
        raise UserError(f"projection = {projection}: give the size of the projection head, or 0 for none")
    if not projection:
        return [nn.Linear(features, classes)]
    head = (nn.Linear(features, features), nn.ReLU(), nn.Linear(features, projection))
    return [*head, nn.Linear(projection, classes)]


def linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    """One linear layer on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(
    shape: tuple[int, ...],
    classes: int,
    hidden: Annotated[int, "units of the hidden layer"] = 512,
    projection: Projection = 0,
) -> nn.Module:
    """One hidden layer with ReLU: the paper's "three-layer MLP", which counts input, hidden and output."""
    if hidden < 1:
        raise UserError(f"the mlp needs a hidden layer of at least one unit, got hidden = {hidden}")
    body = (nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU())
    return nn.Sequential(*body, *ending(hidden, classes, projection))


def cnn(shape: tuple[int, ...], classes: int, projection: Projection = 0) -> nn.Module:
    """5x5 convolutions of 6 and 16 channels with max-pools, then 120 and 84: the paper's for CIFAR-10."""
    channels, height, width = image_shape(shape, "the cnn", 16, "mlp")
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


CHANNELS = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")


def vgg16(
    shape: tuple[int, ...],
    classes: int,
    batch_norm: Annotated[bool, "whether BatchNorm follows each convolution"] = False,
    classifier: Annotated[
        Literal["hidden", "linear"], "two hidden layers of 512 with dropout, or one layer"
    ] = "hidden",
    dropout: Annotated[float, "before the hidden layers of the classifier"] = 0.5,
) -> nn.Module:
    """Thirteen 3x3 convolutions with or without BatchNorm, then a classifier: the paper's for CIFAR-100."""
    incoming, height, across = image_shape(shape, "vgg16", 32, "cnn or mlp")
    check_choice("vgg16", "classifier", classifier, ("hidden", "linear"))
    check_dropout(dropout)
    layers: list[nn.Module] = []
    for width in CHANNELS:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(_convolution(incoming, width))
        if batch_norm:
            layers.append(nn.BatchNorm2d(width))
        layers.append(nn.ReLU())
        incoming = width
    features = 512 * (height // 32) * (across // 32)
    return nn.Sequential(*layers, nn.Flatten(), *_classifier(features, classes, classifier, dropout))


def _convolution(incoming: int, width: int) -> nn.Conv2d:
    layer = nn.Conv2d(incoming, width, 3, padding=1)
    nn.init.normal_(layer.weight, 0, math.sqrt(2 / (9 * width)))
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def _classifier(features: int, classes: int, kind: str, dropout: float) -> list[nn.Module]:
    if kind == "linear":
        return [nn.Linear(features, classes)]
    return [
        *(nn.Dropout(dropout), nn.Linear(features, 512), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(512, 512), nn.ReLU()),
        nn.Linear(512, classes),
    ]
