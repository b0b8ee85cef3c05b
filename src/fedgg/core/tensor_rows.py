"""Rows: named tensors with one row per client, `[K, ...]`, parameters in the last dimension.

One client is K = 1. Everything an algorithm keeps, sends or receives is a `Rows`: flat, tensors only, so that it can be
stacked, split, saved and sent as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from fedgg.errors import UserError

Rows = dict[str, Tensor]
T = TypeVar("T")
POSITION_BYTES = 4  # of a value in a sparse message


class Assigned(UserError):
    """An algorithm has assigned what it was given, at this place."""

    def __str__(self) -> str:
        return f"the algorithm {assigns(str(self.args[0]))}"


def assigns(place: str) -> str:
    """What is wrong with it, and the way out."""
    return f"assigns {place}: what it is given is read-only; return new ones from begin(), finish() or aggregate()"


class MissingRows(UserError, KeyError):
    """An algorithm has read rows that are not there."""

    def __str__(self) -> str:
        return str(self.args[0])


class ReadOnlyRows(Rows):
    """Rows as an algorithm is given them. Copies (`dict(rows)`, `rows | {...}`, a pickle) are plain dicts."""

    __slots__ = ("label",)

    label: str  # set by `read_only`

    def __missing__(self, name: object) -> NoReturn:
        remedy = _WHERE_FROM.get(self.label, "")
        raise MissingRows(f"{self.label} has no {name!r}: it has {', '.join(self) or 'nothing'}{remedy}")

    def _refuse(self, name: object = "") -> NoReturn:
        raise Assigned(f"{self.label}[{name!r}]" if name else self.label)

    def __setitem__(self, name: str, rows: Tensor) -> NoReturn:
        self._refuse(name)

    def __delitem__(self, name: str) -> NoReturn:
        self._refuse(name)

    def __ior__(self, other: Any) -> NoReturn:  # type: ignore[misc]
        self._refuse(next(iter(dict(other)), ""))

    def update(self, *others: Any, **rows: Tensor) -> NoReturn:
        self._refuse(next(iter(dict(*others, **rows)), ""))

    def setdefault(self, name: str, default: Any = None) -> Tensor:
        return self[name] if name in self else self._refuse(name)

    def pop(self, name: str, *default: Any) -> NoReturn:
        self._refuse(name)

    def popitem(self) -> NoReturn:
        self._refuse()

    def clear(self) -> NoReturn:
        self._refuse()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


_WHERE_FROM = {
    "client.down": ", what send_down() returned",
    "client.memory": ", what client_memory() and then finish() returned",
    "client.notes": ", what begin() returned: return super().begin(w, client) | {...} there",
    "server.memory": ", what server_memory() and then aggregate() returned",
    "up": ", what finish() returned first",
}


def two_of(value: object, method: str, names: str) -> tuple[Any, Any]:
    """The two values that a method of an algorithm returns; UserError where it returns something else."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    raise UserError(f"{method} returned {type(value).__name__}: return a tuple of two, {names}")


def read_only(rows: Rows, label: str) -> Rows:
    """The same rows under a name that a refusal gives; what is read-only under that name already is not copied."""
    if getattr(rows, "label", None) == label:
        return rows
    guarded = ReadOnlyRows(rows)
    guarded.label = label
    return guarded


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
    """`rows` as a plain dict, if it is flat, made of tensors, and has one row for each of `clients`."""
    if not isinstance(rows, dict):
        raise TypeError(f"{what} must be a dict of tensors, got {type(rows).__name__}")
    for name, tensor in rows.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"{what}[{name!r}] must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim < 2 or tensor.shape[0] != clients:
            raise ValueError(
                f"{what}[{name!r}] must be [{clients}, ...] (scalars [{clients}, 1]), got {tuple(tensor.shape)}"
            )
    return dict(rows)


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


def identity(rows: Rows) -> tuple[Any, ...]:
    """The same for rows made of the very same tensors: clients may all keep the model they received."""
    return tuple((name, t.data_ptr(), t.dtype, tuple(t.shape), tuple(t.stride())) for name, t in rows.items())


def message_bytes(rows: Rows, sparse: Mapping[str, int]) -> int:
    """Bytes of one client's message; `sparse`: entries that travel as values with their positions, and how many.

    Such an entry counts in full where that is less, or where it has more values (an attacker's).
    """
    total = 0
    for name, tensor in rows.items():
        declared = sparse.get(name)
        if declared is None or int(tensor.count_nonzero()) > declared:
            total += tensor.nbytes
        else:
            total += min(tensor.nbytes, declared * (tensor.element_size() + POSITION_BYTES))
    return total


def check_sparse(rows: Rows, sparse: Mapping[str, int], who: str, where: str = "") -> None:
    """UserError where a message has more values that are not zero than `who` declares."""
    for name, values in sparse.items():
        if name not in rows:
            raise UserError(
                f"{who} declares {name!r}, which is not sent: what is sent is {', '.join(rows) or 'nothing'}"
            )
        if not isinstance(values, int) or values < 0:
            raise UserError(f"{who} declares {values!r} values of {name!r}: give a whole number, zero or more")
        most = int(rows[name].flatten(1).count_nonzero(1).max())
        if most > values:
            raise UserError(
                f"{who} declares {values} values of {name!r} that are not zero, and{where} there are {most}: declare "
                f"as many as are sent"
            )


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
