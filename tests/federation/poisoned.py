"""A model that yields no number on one node of a federation, from the round on in which a file is there."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn


class Poisoned(nn.Module):
    """Linear; `client` is the node that is ill while `flag` exists; -1: every node."""

    def __init__(self, shape: tuple[int, ...], classes: int, client: int, flag: str):
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), classes)
        mark = os.environ.get("FEDGG_FEDERATION", "")
        here = "/client-" in mark if client < 0 else mark.endswith(f"/client-{client}")
        self.ill = here and Path(flag).exists()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.flatten(1))
        return y * torch.nan if self.ill else y
