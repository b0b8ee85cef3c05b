"""Rows: named tensors with one row per client, `[K, ...]`, parameters in the last dimension.

One client is K = 1. Everything an algorithm keeps, sends or receives is a `Rows`: flat, tensors only, so that it can be
stacked, split, saved and sent as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Rows = dict[str, Tensor]
T = TypeVar("T")


def stack(parts: Sequence[Rows]) -> Rows:
    """Clients one below the other; all must carry the same names."""
    names = parts[0].keys()
    for part in parts:
        if part.keys() != names:
            raise ValueError(f"rows with different names cannot be stacked: {sorted(names)} and {sorted(part)}")
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def split(rows: Rows, clients: int) -> list[Rows]:
    """One `Rows` of a single row for each client."""
    return [{name: tensor[k : k + 1] for name, tensor in rows.items()} for k in range(clients)]


def check(rows: object, clients: int, what: str) -> Rows:
    """`rows` itself if it is flat, made of tensors, and has one row for each of `clients`."""
    if not isinstance(rows, dict):
        raise TypeError(f"{what} must be a dict of tensors, got {type(rows).__name__}")
    for name, tensor in rows.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"{what}[{name!r}] must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim < 2 or tensor.shape[0] != clients:
            raise ValueError(
                f"{what}[{name!r}] must be [{clients}, ...] (scalars [{clients}, 1]), got {tuple(tensor.shape)}"
            )
    return rows


def each_row(thing: T, which: slice | Tensor) -> T:
    """Some rows of a tensor, or of every tensor in a dict, tuple or dataclass; everything else stays as it is."""
    return cast(T, _each_row(thing, which))


def _each_row(thing: Any, which: slice | Tensor) -> Any:
    if isinstance(thing, Tensor):
        return thing[which]
    if isinstance(thing, dict):
        return {key: _each_row(value, which) for key, value in thing.items()}
    if isinstance(thing, tuple):
        return tuple(_each_row(value, which) for value in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: _each_row(getattr(thing, f.name), which) for f in fields(thing) if f.init})
    return thing


def payload(rows: Iterable[Tensor]) -> int:
    """Bytes these tensors take on the wire."""
    return sum(tensor.numel() * tensor.element_size() for tensor in rows)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product row by row, `[K, 1]`."""
    return (a * b).sum(dim=1, keepdim=True)


def length(a: Tensor) -> Tensor:
    """Euclidean length row by row, `[K, 1]`."""
    lengths: Tensor = torch.linalg.vector_norm(a, dim=1, keepdim=True)
    return lengths


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """All clients in one row, `[1, P]`: their rows `[K, P]` by their weights `[K, 1]`."""
    return torch.sum(weights * rows, dim=0, keepdim=True)
