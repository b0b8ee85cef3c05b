"""Ordinary `nn.Module`s by name: each takes the shape of an example and the number of classes; checks they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedgg.errors import UserError
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
        "vit": "fedgg.models.transformers:vit",
        "char_lstm": "fedgg.models.char_lstm:char_lstm",
        "transformer": "fedgg.models.transformers:transformer",
    },
    code="NAME",
)

IMAGE_MODELS = ("cnn", "vgg16", "resnet18", "resnet20", "vit")  # which take examples [H, W] as images of one channel


# Shapes of examples and settings that a model cannot take ------------------------------------------------------------


def image_shape(shape: tuple[int, ...], model: str, least: int, instead: str) -> tuple[int, int, int]:
    """Channels, height and width; UserError where examples are not images of `least` x `least` pixels or more."""
    if len(shape) == 3 and shape[2] <= 4 < shape[0]:
        raise UserError(f"examples of shape {shape} look like [H, W, C]: put the channels first, as [C, H, W]")
    if len(shape) != 3 or min(shape[1:]) < least:
        raise UserError(
            f"{model} needs images of {least} x {least} pixels or more, got examples of shape {shape}: take {instead}"
        )
    return shape[0], shape[1], shape[2]


def sequence_length(shape: tuple[int, ...], model: str) -> int:
    """T; UserError where examples are not sequences `[T]`."""
    if len(shape) != 1 or shape[0] < 1:
        raise UserError(
            f"{model} needs sequences of tokens, as examples of shape [T], got examples of shape {shape}: take a model "
            f"for images or tables, as cnn or mlp"
        )
    return shape[0]


def check_choice(model: str, setting: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{model} has no {setting} {value!r}: choose {' or '.join(choices)}")


def check_positive(model: str, **settings: int) -> None:
    for setting, value in settings.items():
        if value < 1:
            raise UserError(f"{model} needs {setting} of at least 1, got {setting} = {value}")


def check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise UserError(f"dropout must lie in 0 <= dropout < 1, got {dropout}")


def check_divides(model: str, setting: str, value: int, whole: str, size: int) -> None:
    """UserError where `size`, which `whole` describes, is no multiple of the setting."""
    if size % value:
        raise UserError(f"{model} with {setting} = {value} needs {whole} that {value} divides, got {size}")


def number_of_tokens(model: str, vocabulary: int, classes: int) -> int:
    if vocabulary < 0:
        raise UserError(f"{model}: vocabulary = {vocabulary}: give the number of different tokens, or 0 for classes")
    return vocabulary or classes
