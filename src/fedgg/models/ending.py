"""How a classifier ends: with one linear layer, or with a projection head before it, as MOON's paper has it.

The head is a part of the model, not of an algorithm: what is compared with MOON is then the same network.
"""

from __future__ import annotations

from torch import nn

from fedgg.errors import UserError


def ending(features: int, classes: int, projection: int) -> list[nn.Module]:
    """The last layer; with `projection` behind two more that lead to so many numbers (256 in Li et al. 2021)."""
    if projection < 0:
        raise UserError(f"projection = {projection}: give the size of the projection head, or 0 for none")
    if not projection:
        return [nn.Linear(features, classes)]
    head = (nn.Linear(features, features), nn.ReLU(), nn.Linear(features, projection))
    return [*head, nn.Linear(projection, classes)]
