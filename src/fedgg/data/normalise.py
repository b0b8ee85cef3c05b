"""Named ways to scale inputs before they reach a model.

none      as the source has them;
unit      divided by a fully bright pixel, so that images lie in 0..1 (what fits the paper's SVHN numbers);
standard  each channel (or feature) with mean 0 and deviation 1 over the training set;
auto      the default: standard for the data sets with a name, none for a user's own arrays. An experiment replaces it
          by the one it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fedgg.data.dataset import Dataset

Normalisation = Literal["auto", "none", "unit", "standard"]


@dataclass(frozen=True)
class Scaling:
    """x -> (x - shift) * scale, with one value for each channel or for all."""

    shift: Tensor
    scale: Tensor

    @cached_property
    def numbers(self) -> tuple[object, ...]:
        """The same for the same scaling, wherever it lies; asked of a GPU once, not in every round."""
        return self.shift.dtype, tuple(self.shift.shape), self.shift.tolist(), self.scale.tolist()

    def __call__(self, x: Tensor) -> Tensor:
        return (x.to(self.shift.dtype) - self.shift).mul_(self.scale)  # the difference is our own: no third copy

    def to(self, device: torch.device) -> Scaling:
        return Scaling(self.shift.to(device), self.scale.to(device))


def scaling(kind: Normalisation, dataset: Dataset, dtype: torch.dtype) -> Scaling:
    if kind == "none":
        return Scaling(torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype))
    if kind == "unit":
        return Scaling(torch.zeros(1, dtype=dtype), torch.full((1,), 1 / dataset.peak, dtype=dtype))
    assert kind == "standard", "an experiment knows what auto stands for"
    mean, deviation = dataset.moments
    spatial = [1] * (dataset.x_train.ndim - 2)
    steady = torch.where(deviation > 0, deviation, 1)  # a constant feature stays constant
    return Scaling(mean.view(-1, *spatial).to(dtype), (1 / steady).view(-1, *spatial).to(dtype))
