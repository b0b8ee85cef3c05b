"""Residual networks of He et al. 2016 ("Deep Residual Learning for Image Recognition"): ResNet-18 and ResNet-20.

Normalisation is GroupNorm unless set otherwise: averaging BatchNorm's statistics over clients with different label
distributions loses accuracy (Hsieh et al. 2020, "The Non-IID Data Quagmire"). Two groups for any number of channels is
what FL-Simulator has for its ResNet-18 (woodenchild95/FL-Simulator, models.py); Wu and He 2018, who proposed GroupNorm,
take 32. Convolutions have no bias and start from a normal distribution of variance 2 / (k * k * channels out).

Parameters and buffers have the names of torchvision's `resnet18`, whatever the normalisation: with `norm = "batch"`,
`stem = "imagenet"` and as many classes a file of its weights fits `model.start`. Shortcuts that change the shape are
option B (a 1x1 convolution with normalisation) in ResNet-18; in ResNet-20 they are option A (every second pixel, and
zeros as further channels), which He et al. use on CIFAR, or option B.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.models import check_choice, check_divides, check_positive, image_shape

Norm = Callable[[int], nn.Module]  # of so many channels
NormName = Annotated[Literal["group", "batch"], "GroupNorm or BatchNorm"]
Groups = Annotated[int, "groups of GroupNorm; they divide width"]
Stem = Annotated[Literal["cifar", "imagenet"], "a 3x3 convolution, or a 7x7 one of stride 2 and a max-pool"]
Width = Annotated[int, "channels of the first stage"]
SMALLEST = {"cifar": 8, "imagenet": 32}  # pixels a side: fewer would be a single pixel before the last stage


def resnet18(
    shape: tuple[int, ...],
    classes: int,
    norm: NormName = "group",
    groups: Groups = 2,
    stem: Stem = "cifar",
    width: Width = 64,
) -> nn.Module:
    """ResNet-18 with GroupNorm or BatchNorm; its first layer for images of CIFAR's or of ImageNet's size."""
    return _resnet("resnet18", shape, classes, norm, groups, stem, [width, 2 * width, 4 * width, 8 * width], 2, "B")


def resnet20(
    shape: tuple[int, ...],
    classes: int,
    norm: NormName = "group",
    groups: Groups = 2,
    stem: Stem = "cifar",
    shortcut: Annotated[Literal["A", "B"], "zeros as further channels, or a 1x1 convolution"] = "A",
    width: Width = 16,
) -> nn.Module:
    """ResNet-20, the residual network of 0.27 million parameters for CIFAR-10, with GroupNorm or BatchNorm."""
    return _resnet("resnet20", shape, classes, norm, groups, stem, [width, 2 * width, 4 * width], 3, shortcut)


def _resnet(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    norm: str,
    groups: int,
    stem: str,
    widths: list[int],
    blocks: int,
    shortcut: str,
) -> nn.Module:
    """Stages of so many blocks each; all but the first begin with a stride of 2."""
    check_choice(name, "norm", norm, ("group", "batch"))
    check_choice(name, "stem", stem, ("cifar", "imagenet"))
    check_choice(name, "shortcut", shortcut, ("A", "B"))
    check_positive(name, width=widths[0], groups=groups)
    channels, _, _ = image_shape(shape, name, SMALLEST[stem], "mlp or, from 16 x 16, cnn")
    if norm == "group":
        check_divides(name, "groups", groups, "a width", widths[0])
    normalise: Norm = partial(nn.GroupNorm, groups) if norm == "group" else nn.BatchNorm2d
    kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=_convolution(channels, widths[0], kernel, stride), bn1=normalise(widths[0]), relu=nn.ReLU()
    )
    if stem == "imagenet":
        parts["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    incoming = widths[0]
    for stage, width in enumerate(widths, 1):
        first = ResidualBlock(incoming, width, 1 if stage == 1 else 2, normalise, shortcut)
        further = [ResidualBlock(width, width, 1, normalise, shortcut) for _ in range(blocks - 1)]
        parts[f"layer{stage}"] = nn.Sequential(first, *further)
        incoming = width
    parts |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(incoming, classes)}
    return nn.Sequential(parts)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with normalisation, and the block's input added before the last ReLU."""

    def __init__(self, incoming: int, width: int, stride: int, normalise: Norm, shortcut: str):
        super().__init__()
        self.conv1, self.bn1 = _convolution(incoming, width, 3, stride), normalise(width)
        self.conv2, self.bn2 = _convolution(width, width, 3, 1), normalise(width)
        self.stride, self.further_channels = stride, width - incoming
        self.downsample: nn.Module | None = None
        if shortcut == "B" and (stride > 1 or width != incoming):
            self.downsample = nn.Sequential(_convolution(incoming, width, 1, stride), normalise(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.downsample is not None:
            y: Tensor = self.downsample(x)
            return y
        if self.stride == 1 and not self.further_channels:
            return x
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.further_channels))


def _convolution(incoming: int, width: int, kernel: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(incoming, width, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
