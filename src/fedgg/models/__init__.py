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
        "linear": "fedgg.models.paper_models:linear",
        "mlp": "fedgg.models.paper_models:mlp",
        "cnn": "fedgg.models.paper_models:cnn",
        "vgg16": "fedgg.models.paper_models:vgg16",
        "resnet18": "fedgg.models.resnet:resnet18",
        "resnet20": "fedgg.models.resnet:resnet20",
        "vit": "fedgg.models.vision_transformer:vit",
        "char_lstm": "fedgg.models.language:char_lstm",
        "transformer": "fedgg.models.language:transformer",
    },
    code="CLASS",
)
