"""Tracing of `Algorithm.terms`: how coefficients are computed from inner products, recorded once a round.

An algorithm computes its coefficients with torch (`distance.sqrt()`, `torch.where(step == 0, 0, pull)`): twenty
operations on columns of a single number for each client, which take longer one by one than their arithmetic is worth: a
tenth of a small model's step. So `terms` is called once a round with columns that record every operation, and the trace
is executed as one function of plain numbers on a CPU, as one kernel on a GPU (`coefficients`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client
from fedgg.core.rows import Rows

Source = tuple[str, ...]  # where a number comes from: ("lr",), ("sums", "drift.drift"), ("notes", "reach"), ...
Operand = int | float  # the number of a value, or a constant
STEP: Source = ("step",)


@dataclass(frozen=True)
class TracedOperation:
    """One operation; its result is the value after all sources and all operations before it."""

    name: str
    operands: tuple[tuple[bool, Operand], ...]  # whether it is a value, and its number; else a constant


@dataclass(frozen=True)
class Trace:
    """The operations from numbers to coefficients."""

    sources: tuple[Source, ...]
    operations: tuple[TracedOperation, ...]
    coefficients: tuple[tuple[str, bool, Operand], ...]  # by the name of their vector


class NotTraceable(Exception):
    """`terms` uses an operation that cannot be recorded."""


class _TracedColumn:
    """Records the operations it is used in; the result of each is another traced column."""

    def __init__(self, operations: list[TracedOperation], sources: int, number: int):
        self._operations = operations
        self._sources = sources
        self.number = number

    def _record(self, name: str, *operands: Any) -> _TracedColumn:
        self._operations.append(TracedOperation(name, tuple(_operand(operand) for operand in operands)))
        return _TracedColumn(self._operations, self._sources, self._sources + len(self._operations) - 1)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, operands: Any = (), named: Any = None) -> Any:
        name = _TORCH_NAMES.get(function)
        if name is None or named:
            raise NotTraceable(str(function))
        if name in _FILLED:
            return _FILLED[name]
        return next(operand for operand in operands if isinstance(operand, _TracedColumn))._record(name, *operands)

    def square(self) -> _TracedColumn:
        return self._record("mul", self, self)

    def reciprocal(self) -> _TracedColumn:
        return self._record("div", 1.0, self)

    def __getattr__(self, name: str) -> Any:
        raise NotTraceable(name)

    def __bool__(self) -> bool:
        raise NotTraceable("a decision in Python that depends on a number: torch.where can be traced")

    __hash__ = None  # type: ignore[assignment]


def _operand(operand: Any) -> tuple[bool, Operand]:
    if isinstance(operand, _TracedColumn):
        return True, operand.number
    if isinstance(operand, int | float):
        return False, float(operand)
    raise NotTraceable(f"an operand {type(operand).__name__}")


_TORCH_NAMES = {
    torch.where: "where",
    torch.sqrt: "sqrt",
    torch.abs: "abs",
    torch.exp: "exp",
    torch.maximum: "maximum",
    torch.minimum: "minimum",
    torch.clamp_min: "maximum",
    torch.zeros_like: "zeros_like",
    torch.ones_like: "ones_like",
}
_FILLED = {"zeros_like": 0.0, "ones_like": 1.0}
_TWO = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow"}
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
_ONE = {"__neg__": "neg", "__abs__": "abs", "abs": "abs", "sqrt": "sqrt", "exp": "exp"}


def _add_operators() -> None:
    """Operators and methods of a column, each of which records itself."""
    for word, name in _TWO.items():
        setattr(_TracedColumn, f"__{word}__", lambda self, other, name=name: self._record(name, self, other))
        setattr(_TracedColumn, f"__r{word}__", lambda self, other, name=name: self._record(name, other, self))
    for name in _COMPARISONS:
        setattr(_TracedColumn, f"__{name}__", lambda self, other, name=name: self._record(name, self, other))
    for word, name in _ONE.items():
        setattr(_TracedColumn, word, lambda self, name=name: self._record(name, self))
    for word, name in (("clamp_min", "maximum"), ("clamp_max", "minimum")):
        setattr(_TracedColumn, word, lambda self, other, name=name: self._record(name, self, other))


_add_operators()


def trace_terms(algorithm: Algorithm, client: Client, inner_products: Iterable[str]) -> Trace | None:
    """None if `terms` uses what cannot be traced: then it is called in every step, with tensors."""
    sources = [STEP, *(("sums", both) for both in inner_products), *_columns(algorithm, client)]
    operations: list[TracedOperation] = []
    columns: Any = {source: _TracedColumn(operations, len(sources), number) for number, source in enumerate(sources)}
    try:
        coefficients = _with_traced_settings(algorithm, columns).terms(_with_traced_columns(client, columns))
        results = tuple((name, *_operand(factor)) for name, factor in coefficients.items())
    except (NotTraceable, AttributeError, TypeError, ValueError, RuntimeError):
        return None  # a real mistake shows again, with tensors
    return Trace(tuple(sources), tuple(operations), results)


def constant_columns(trace: Trace, algorithm: Algorithm, client: Client) -> list[Tensor]:
    """The columns that are constant over the round: all sources behind the step and the inner products."""
    return [column_of(source, algorithm, client) for source in trace.sources if is_constant(source)]


def is_constant(source: Source) -> bool:
    """Whether it is constant over a round."""
    return source != STEP and source[0] != "sums"


def column_of(source: Source, algorithm: Algorithm, client: Client) -> Tensor:
    """The column behind a constant source."""
    if source[0] == "algorithm":
        setting: Tensor = getattr(algorithm, source[1])
        return setting
    value: Any = getattr(client, source[0])
    column: Tensor = value[source[1]] if len(source) > 1 else value
    return column


def is_independent_of_values(trace: Trace, algorithm: Algorithm, client: Client, inner_products: Iterable[str]) -> bool:
    """Whether `terms` and `diagnostics` do the same whatever the values are: then one trace serves all rounds."""
    unseen = _without_numbers(client)
    return trace_terms(algorithm, unseen, inner_products) == trace and _readings_are_traceable(algorithm, unseen)


def _without_numbers(client: Client) -> Client:
    """Its rows have shapes and no values: a decision by their values raises an error."""

    def empty(rows: Rows) -> Rows:
        return {name: row if _is_column(row) else torch.empty_like(row, device="meta") for name, row in rows.items()}

    nowhere: Any = None
    return replace(
        client,
        net=nowhere,
        probe=None,
        down=empty(client.down),
        memory=empty(client.memory),
        notes=empty(client.notes),
        w=torch.empty_like(client.w, device="meta"),
    )


def _readings_are_traceable(algorithm: Algorithm, client: Client) -> bool:
    sources = [STEP, *_columns(algorithm, client)]
    columns: Any = {source: _TracedColumn([], len(sources), number) for number, source in enumerate(sources)}
    blind = replace(_with_traced_columns(client, columns), sums=_AnyInnerProduct())
    try:
        _with_traced_settings(algorithm, columns).diagnostics(client.w, blind)
    except (NotTraceable, AttributeError, TypeError, ValueError, RuntimeError):
        return False
    return True


class _AnyInnerProduct(dict[str, Any]):
    def get(self, name: str, default: Any = None) -> Any:
        return _TracedColumn([], 1, 0)


def _columns(algorithm: Algorithm, client: Client) -> list[Source]:
    """Everything of one number a row that `terms` may look at."""
    names: list[Source] = [("algorithm", f.name) for f in fields(algorithm) if _is_column(getattr(algorithm, f.name))]
    for field in fields(client):
        value = getattr(client, field.name)
        if field.name in ("step", "sums", "w", "last_step"):
            continue
        if isinstance(value, dict):
            names += [(field.name, name) for name, rows in value.items() if _is_column(rows)]
        elif _is_column(value):
            names.append((field.name,))
    return names


def _is_column(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == 1


def _with_traced_settings(algorithm: Algorithm, columns: Any) -> Algorithm:
    settings = {source[1]: column for source, column in columns.items() if source[0] == "algorithm"}
    return replace(algorithm, **settings) if settings else algorithm


def _with_traced_columns(client: Client, columns: Any) -> Client:
    """The client with traced columns, and without the rows themselves."""
    changed: dict[str, Any] = {"w": None, "last_step": None, "sums": {}}
    for source, column in columns.items():
        if source[0] == "algorithm":
            continue
        if len(source) == 1:
            changed[source[0]] = column
        else:
            changed.setdefault(source[0], dict(getattr(client, source[0])))[source[1]] = column
    return replace(client, **changed)
