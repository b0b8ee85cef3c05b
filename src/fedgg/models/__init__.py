"""Ordinary `nn.Module`s by name: each takes the shape of an example and the number of classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedgg.registry import Registry

if TYPE_CHECKING:
    from torch import nn

MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "model",
    {
        "linear": "fedgg.models.mlp:linear",
        "mlp": "fedgg.models.mlp:mlp",
        "cnn": "fedgg.models.cnn:cnn",
        "vgg16": "fedgg.models.vgg:vgg16",
    },
    code="CLASS",
)
