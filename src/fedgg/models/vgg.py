"""VGG-16 for 32 x 32 images: thirteen 3x3 convolutions (Simonyan and Zisserman 2015, configuration D), a classifier.

The paper says "VGG-16" and no more. Two classifiers are in use on CIFAR: `hidden` (dropout, 512, ReLU, dropout, 512,
ReLU, classes), which without batch normalisation fits the paper's accuracies, and `linear` (one layer). Convolutions
start from a normal distribution of variance 2 / (9 * channels out).
"""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

from fedgg.errors import UserError

CHANNELS = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")


def vgg16(
    shape: tuple[int, ...],
    classes: int,
    batch_norm: bool = False,
    classifier: Literal["hidden", "linear"] = "hidden",
    dropout: float = 0.5,
) -> nn.Module:
    """Thirteen 3x3 convolutions with or without BatchNorm, then a classifier: the paper's for CIFAR-100."""
    if len(shape) != 3 or min(shape[1:]) < 32:
        raise UserError(f"vgg16 needs images of 32 x 32 pixels or more, got examples of shape {shape}: take cnn or mlp")
    if classifier not in ("hidden", "linear"):
        raise UserError(f"vgg16 has no classifier {classifier!r}: choose hidden or linear")
    if not 0 <= dropout < 1:
        raise UserError(f"dropout must lie in 0 <= dropout < 1, got {dropout}")
    layers: list[nn.Module] = []
    incoming = shape[0]
    for width in CHANNELS:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(_convolution(incoming, width))
        if batch_norm:
            layers.append(nn.BatchNorm2d(width))
        layers.append(nn.ReLU())
        incoming = width
    features = 512 * (shape[1] // 32) * (shape[2] // 32)
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
