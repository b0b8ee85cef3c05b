"""How a property says no."""

from __future__ import annotations

import torch
from torch import Tensor

from fedgg.core.rows import Rows


class Broken(Exception):
    """The property does not hold; the message says where."""


class Skipped(Exception):
    """The property does not apply to this algorithm; the message says why."""


def demand(truth: bool, otherwise: str) -> None:
    if not truth:
        raise Broken(otherwise)


def demand_equal(a: Tensor, b: Tensor, what: str, tolerance: float = 0.0) -> None:
    """Equal bit for bit, or within a tolerance, which is relative for numbers larger than one."""
    demand(a.shape == b.shape, f"{what}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if tolerance == 0:
        demand(torch.equal(a, b), f"{what}: differs by up to {_gap(a, b):.3g}, must be equal")
    else:
        size = max(1.0, float(b.double().abs().max()) if b.numel() else 0.0)
        demand(_gap(a, b) <= tolerance * size, f"{what}: differs by up to {_gap(a, b):.3g}, more than {tolerance:g}")


def demand_equal_rows(a: Rows, b: Rows, what: str, tolerance: float = 0.0) -> None:
    demand(a.keys() == b.keys(), f"{what}: names {sorted(a)} and {sorted(b)}")
    for name in a:
        demand_equal(a[name], b[name], f"{what}[{name!r}]", tolerance)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
