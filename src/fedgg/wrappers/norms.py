"""Lengths of what clients send, and the factors that make them short enough."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedgg.core.rows import Rows
from fedgg.errors import UserError


def lengths(entries: Iterable[Tensor]) -> Tensor:
    """Euclidean length of each client's entries taken as one vector, `[K, 1]` in float64: squares cannot overflow."""
    squares = [torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64).square() for rows in entries]
    return torch.stack(squares).sum(0).sqrt()


def within(bound: float | Tensor, length: Tensor) -> Tensor:
    """What to multiply vectors by so that none is longer than `bound`: exactly 1 where that holds already."""
    return torch.where(length > bound, bound / length.clamp_min(torch.finfo(length.dtype).tiny), 1.0)


def refuse_what_is_no_vector(wrapper: str, up: Rows, parameters: int, way_out: str) -> None:
    """A number beside the update has no length that could be bounded in the update's units."""
    for name, rows in up.items():
        if rows.shape[1:] != (parameters,):
            shape = " x ".join(map(str, rows.shape[1:]))
            raise UserError(
                f"{wrapper} bounds vectors as long as the model ({parameters}), but this algorithm also sends up "
                f"{name!r} of size {shape}: {way_out}"
            )
