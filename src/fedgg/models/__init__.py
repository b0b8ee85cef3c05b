"""Ordinary `nn.Module`s, by name: each takes the shape of an example and the number of classes."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedgg.models.cnn import cnn
from fedgg.models.mlp import linear, mlp
from fedgg.models.vgg import vgg16

MODELS: dict[str, Callable[..., nn.Module]] = {"linear": linear, "mlp": mlp, "cnn": cnn, "vgg16": vgg16}

__all__ = ["MODELS", "cnn", "linear", "mlp", "vgg16"]
