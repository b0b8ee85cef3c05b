"""A trained model for new inputs: takes inputs as the data had them, answers with the labels of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedgg.data.arrays import input_tensor
from fedgg.data.client_batches import Normalisation, Scaling
from fedgg.errors import UserError
from fedgg.lab.federated_data import Origin

if TYPE_CHECKING:
    pass


Output = Literal["labels", "probabilities", "logits"]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model was trained on: the shape of an example, its scaling, and the labels of the classes."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    words: bool  # whether labels are the names of the classes, rather than their numbers
    normalise: Normalisation
    scaling: Scaling

    @classmethod
    def of(cls, origin: Origin, normalise: Normalisation, scaling: Scaling) -> Inputs:
        words = origin.labels_are_words or not _are_numbers(origin.classes)
        return cls(origin.shape, origin.classes, words, normalise, scaling.to(torch.device("cpu")))

    @classmethod
    def from_json(cls, content: dict[str, Any], dtype: torch.dtype) -> Inputs:
        """KeyError, TypeError or ValueError where the content is not that of an inputs.json."""
        shift, scale = (torch.tensor(content[key], dtype=dtype) for key in ("shift", "scale"))
        classes = tuple(str(name) for name in content["classes"])
        labels = content.get("labels", "numbers" if _are_numbers(classes) else "words")
        shape = tuple(int(length) for length in content["shape"])
        return cls(shape, classes, labels == "words", content["normalise"], Scaling(shift, scale))

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "classes": list(self.classes),
            "labels": "words" if self.words else "numbers",
            "normalise": self.normalise,
            "shift": self.scaling.shift.tolist(),
            "scale": self.scaling.scale.tolist(),
        }

    def with_channel(self, x: Tensor) -> Tensor:
        """Images [N, H, W] as [N, 1, H, W], as a data set has them."""
        return x.unsqueeze(1) if (1, *x.shape[1:]) == self.shape else x

    def labels(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        return np.array(self.classes)[numbers] if self.words else numbers


class RawInputModel(nn.Module):
    """A module behind the scaling of its inputs: `forward` takes examples as the data set has them, of any type."""

    shift: Tensor
    scale: Tensor

    def __init__(self, module: nn.Module, inputs: Inputs):
        super().__init__()
        self.module = module
        self._inputs = inputs
        self.register_buffer("shift", inputs.scaling.shift.clone())
        self.register_buffer("scale", inputs.scaling.scale.clone())

    def forward(self, x: Tensor) -> Tensor:
        scaled = Scaling(self.shift, self.scale)(self._inputs.with_channel(x))
        outputs: Tensor = self.module(scaled)
        return outputs


def predict(
    model: nn.Module, inputs: Inputs, x: Any, output: Output, chunk: int, device: str | torch.device
) -> NDArray[Any]:
    """What the model makes of the examples, `chunk` of them at a time."""
    if output not in get_args(Output):
        raise UserError(f"output = {output!r}: choose from {', '.join(get_args(Output))}")
    if chunk < 1:
        raise UserError(f"chunk = {chunk}: give at least 1 example at a time")
    examples = inputs.with_channel(input_tensor(x, "x", "predict"))
    if examples.shape[1:] != inputs.shape:
        raise UserError(f"x holds examples of shape {tuple(examples.shape[1:])}; the model takes {inputs.shape}")
    if examples.is_floating_point() and not bool(torch.isfinite(examples).all()):
        first = int((~torch.isfinite(examples)).flatten(1).any(1).nonzero()[0])
        raise UserError(f"x holds NaN or infinity, first in example {first}; clean it first")
    model = model.to(device)
    with torch.inference_mode():
        parts = [model(some.to(device)).cpu() for some in examples.split(chunk)] if len(examples) else []
    logits = torch.cat(parts) if parts else torch.empty(0, len(inputs.classes), dtype=inputs.scaling.shift.dtype)
    match output:
        case "labels":
            return inputs.labels(logits.argmax(1).numpy())
        case "probabilities":
            return logits.softmax(1).numpy()
        case _:
            return logits.numpy()


def _are_numbers(classes: tuple[str, ...]) -> bool:
    return classes == tuple(map(str, range(len(classes))))
