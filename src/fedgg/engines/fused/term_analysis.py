"""The vectors and inner products that `Algorithm.terms` and `displacement` use, and a trace of their coefficients.

An algorithm computes its coefficients with torch (`distance.sqrt()`, `torch.where(step == 0, 0, pull)`): some twenty
operations on columns with one number per client, whose overhead is a tenth of a small model's step. Therefore `terms`
is called once a round with columns that record the operations, and the trace is executed as one function of Python
floats on a CPU or as one kernel on a GPU (`term_coefficients`). Factors of a displacement are further coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number
from fedgg.core.tensor_rows import Rows
from fedgg.errors import UserError

LATER = (2, 3, 4, 9, 99, 999)  # steps, counted from zero, in which terms are checked


@dataclass(frozen=True)
class StepTerms:
    """The vectors an algorithm adds to the gradient, and the inner products their coefficients are computed from."""

    vectors: tuple[str, ...]  # the drift and notes, by name
    inner_products: tuple[str, ...]  # "a.b"; those that change from step to step
    displacement: tuple[str, ...] = ()  # vectors by which the gradient is taken elsewhere than at w
    constant_products: tuple[str, ...] = ()  # "a.b" of notes, which coefficients read too
    layer_products: tuple[str, ...] = ()  # "a.b" that coefficients read by layer, so that they differ between layers

    @property
    def _named(self) -> list[str]:
        pairs = (*self.inner_products, *self.layer_products)
        return [*self.vectors, *self.displacement, *(name for pair in pairs for name in pair.split("."))]

    @property
    def notes(self) -> tuple[str, ...]:
        """Vectors besides the drift, added or in the inner products."""
        return tuple(name for name in dict.fromkeys(self._named) if name not in ("drift", "step"))

    @property
    def of_step(self) -> StepTerms:
        """Without the displacement."""
        return replace(self, displacement=())

    @property
    def of_displacement(self) -> StepTerms:
        """The displacement's vectors as if they were terms."""
        return StepTerms(self.displacement, ())

    @property
    def drift(self) -> bool:
        return "drift" in self._named


DISPLACED = "displacement "  # begins the names of a displacement's coefficients, which follow those of the terms


def coefficients_of(algorithm: Algorithm, client: Client) -> dict[str, Number]:
    """The factors of the terms and of the displacement."""
    displacement = algorithm.displacement(client)
    return {**algorithm.terms(client), **{f"{DISPLACED}{name}": factor for name, factor in displacement.items()}}


def _vectors_of(coefficients: Mapping[str, Number]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the terms' vectors and of the displacement's."""
    displacement = tuple(name.removeprefix(DISPLACED) for name in coefficients if name.startswith(DISPLACED))
    return tuple(name for name in coefficients if not name.startswith(DISPLACED)), displacement


def analyse_terms(algorithm: Algorithm, client: Client) -> StepTerms | None:
    """None if a step is not a sum of terms that are known in advance: then the reference step is taken.

    `nudge` is not examined: see `step_scale`.
    """
    if type(algorithm).steer is not Algorithm.steer:
        return None
    during, by_layer, after = _Recorder(client.lr), _Recorder(client.lr), _Recorder(client.lr)
    without_rows = replace(client, w=cast(Tensor, None), last_step=None, sums=during, layer_sums=by_layer)
    try:
        factors = coefficients_of(algorithm, without_rows)
        if list(coefficients_of(algorithm, replace(without_rows, step=client.step + 1))) != list(factors):
            return None  # the first step has other terms
        if takes_second_gradient(algorithm):
            grad, at_model = torch.zeros_like(client.w), replace(without_rows, w=client.w)
            second = algorithm.second_displacement(grad, client.w, at_model)
            if second is None or second.shape != client.w.shape:
                return None
        algorithm.diagnostics(client.w, replace(client, last_step=None, sums=after))
    except (AttributeError, TypeError, RuntimeError):
        return None  # it uses the rows themselves
    vectors, displacement = _vectors_of(factors)
    if "step" in (*vectors, *displacement):
        return None  # the fused step keeps inner products of the last step, not the step itself
    if any(isinstance(factor, Tensor) and factor.shape[1:] != (1,) for factor in factors.values()):
        return None
    with_step = [pair for pair in after.names if "step" in pair.split(".")]
    changing = [pair for pair in during.names if not {"drift", "step"}.isdisjoint(pair.split("."))]
    constant = tuple(pair for pair in during.names if pair not in changing)
    products = tuple(dict.fromkeys([*changing, *with_step]))
    terms = StepTerms(vectors, products, displacement, constant, tuple(by_layer.names))
    for name in terms.notes:
        client.check_noted(name)
    return terms


def check_later_terms(algorithm: Algorithm, client: Client, terms: StepTerms) -> None:
    """UserError if later steps name other vectors; for engines that do not call `terms` in every step."""
    for number in LATER:
        zeros = _Recorder(client.lr)
        later_terms(algorithm, replace(client, sums=zeros, layer_sums=zeros), number, terms)


def later_terms(algorithm: Algorithm, client: Client, number: int, terms: StepTerms) -> Mapping[str, Number]:
    """The coefficients of this step, counted from zero; UserError if it uses other vectors than the first two steps.

    `terms` is called without the rows, since `client` holds those of the round's start.
    """
    without_rows = replace(client, step=torch.full_like(client.step, number), w=cast(Tensor, None), last_step=None)
    method = f"{type(algorithm).__name__}.{'displacement() or ' if terms.displacement else ''}terms()"
    try:
        coefficients = coefficients_of(algorithm, without_rows)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise UserError(
            f"{method} uses the rows themselves in step {number + 1} but not in the first two: use them in every step "
            f"or in none ({type(error).__name__}: {error})"
        ) from error
    vectors, displacement = _vectors_of(coefficients)
    if (vectors, displacement) != (terms.vectors, terms.displacement):
        raise UserError(
            f"{method} returns {', '.join((*vectors, *displacement)) or 'nothing'} in step {number + 1} and "
            f"{', '.join((*terms.vectors, *terms.displacement)) or 'nothing'} before: return the same vectors in every "
            f"step, with a factor of zero for those not in use"
        )
    return coefficients


def takes_second_gradient(algorithm: Algorithm) -> bool:
    return type(algorithm).second_displacement is not Algorithm.second_displacement


class _Recorder(dict[str, Tensor]):
    """Returns zero for any inner product and records which were read."""

    def __init__(self, like: Tensor):
        super().__init__()
        self._like = like
        self.names: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self.names:
            self.names.append(name)
        return torch.zeros_like(self._like)


Source = tuple[str, ...]  # of an input: ("lr",), ("sums", "drift.drift"), ("notes", "reach"), ...
Operand = int | float  # the index of a value, or a constant
STEP: Source = ("step",)
INNER = "inner"  # begins the source of an inner product of notes


@dataclass(frozen=True)
class TracedOperation:
    """One operation; values are numbered in order: all sources, then the result of each operation."""

    name: str
    operands: tuple[tuple[bool, Operand], ...]  # (True, index of a value) or (False, constant)


@dataclass(frozen=True)
class Trace:
    """The operations that compute the coefficients."""

    sources: tuple[Source, ...]
    operations: tuple[TracedOperation, ...]
    coefficients: tuple[tuple[str, bool, Operand], ...]  # name of the vector, and its operand as above


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
        raise NotTraceable("a Python condition on a value; torch.where can be traced")

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
_BINARY = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow"}
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
_UNARY = {"__neg__": "neg", "__abs__": "abs", "abs": "abs", "sqrt": "sqrt", "exp": "exp"}


def _add_operators() -> None:
    """Adds operators and methods to `_TracedColumn` that record themselves."""
    for method, name in _BINARY.items():
        setattr(_TracedColumn, f"__{method}__", lambda self, other, name=name: self._record(name, self, other))
        setattr(_TracedColumn, f"__r{method}__", lambda self, other, name=name: self._record(name, other, self))
    for name in _COMPARISONS:
        setattr(_TracedColumn, f"__{name}__", lambda self, other, name=name: self._record(name, self, other))
    for method, name in _UNARY.items():
        setattr(_TracedColumn, method, lambda self, name=name: self._record(name, self))
    for method, name in (("clamp_min", "maximum"), ("clamp_max", "minimum")):
        setattr(_TracedColumn, method, lambda self, other, name=name: self._record(name, self, other))


_add_operators()


def trace_terms(algorithm: Algorithm, client: Client, terms: StepTerms) -> Trace | None:
    """None if `terms` cannot be traced: then it is called in every step, with tensors."""
    sources = [STEP, *(("sums", pair) for pair in terms.inner_products)]
    sources += [("layer_sums", pair) for pair in terms.layer_products]
    sources += _columns(algorithm, client)
    sources += [(INNER, pair) for pair in terms.constant_products]
    operations: list[TracedOperation] = []
    columns: Any = {source: _TracedColumn(operations, len(sources), number) for number, source in enumerate(sources)}
    try:
        traced = _with_traced_settings(algorithm, columns), _with_traced_columns(client, columns)
        coefficients = coefficients_of(*traced)
        results = tuple((name, *_operand(factor)) for name, factor in coefficients.items())
    except (NotTraceable, AttributeError, TypeError, ValueError, RuntimeError):
        return None  # an error in the algorithm is raised again when it runs with tensors
    return Trace(tuple(sources), tuple(operations), results)


def constant_columns(trace: Trace, algorithm: Algorithm, client: Client) -> list[Tensor]:
    """The columns that are constant over the round: all sources except the step and the inner products."""
    return [column_of(source, algorithm, client) for source in trace.sources if is_constant(source)]


def is_constant(source: Source) -> bool:
    """Whether it is constant over a round."""
    return source != STEP and source[0] not in ("sums", "layer_sums")


def column_of(source: Source, algorithm: Algorithm, client: Client) -> Tensor:
    """The column of a constant source."""
    if source[0] == "algorithm":
        setting: Tensor = getattr(algorithm, source[1])
        return setting
    if source[0] == INNER:
        return client.inner(*source[1].split("."))
    value: Any = getattr(client, source[0])
    column: Tensor = value[source[1]] if len(source) > 1 else value
    return column


def is_independent_of_values(trace: Trace, algorithm: Algorithm, client: Client, terms: StepTerms) -> bool:
    """Whether `terms` and `diagnostics` do not depend on values in Python: then one trace is valid for all rounds."""
    without_values = _without_values(client)
    traced_again = trace_terms(algorithm, without_values, terms)
    return traced_again == trace and _diagnostics_are_traceable(algorithm, without_values)


def _without_values(client: Client) -> Client:
    """The client with rows on the meta device: a condition on their values raises an error."""

    def empty(rows: Rows) -> Rows:
        return {name: row if is_column(row) else torch.empty_like(row, device="meta") for name, row in rows.items()}

    return replace(
        client,
        net=cast(Any, None),
        probe=None,
        down=empty(client.down),
        memory=empty(client.memory),
        notes=empty(client.notes),
        w=torch.empty_like(client.w, device="meta"),
    )


def _diagnostics_are_traceable(algorithm: Algorithm, client: Client) -> bool:
    sources = [STEP, *_columns(algorithm, client)]
    columns: Any = {source: _TracedColumn([], len(sources), number) for number, source in enumerate(sources)}
    traced = replace(_with_traced_columns(client, columns), sums=_AnyInnerProduct())
    try:
        _with_traced_settings(algorithm, columns).diagnostics(client.w, traced)
    except (NotTraceable, AttributeError, TypeError, ValueError, RuntimeError):
        return False
    return True


class _AnyInnerProduct(dict[str, Any]):
    def get(self, name: str, default: Any = None) -> Any:
        return _TracedColumn([], 1, 0)


def _columns(algorithm: Algorithm, client: Client) -> list[Source]:
    """All values with one number per row that `terms` may use."""
    names: list[Source] = [("algorithm", f.name) for f in fields(algorithm) if is_column(getattr(algorithm, f.name))]
    for field in fields(client):
        value = getattr(client, field.name)
        if field.name in ("step", "sums", "layer_sums", "w", "last_step"):
            continue
        if isinstance(value, dict):
            names += [(field.name, name) for name, rows in value.items() if is_column(rows)]
        elif is_column(value):
            names.append((field.name,))
    return names


def is_column(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == 1


def _with_traced_settings(algorithm: Algorithm, columns: Any) -> Algorithm:
    settings = {source[1]: column for source, column in columns.items() if source[0] == "algorithm"}
    return replace(algorithm, **settings) if settings else algorithm


def _with_traced_columns(client: Client, columns: Any) -> Client:
    """The client with traced columns and without the rows."""
    changed: dict[str, Any] = {"w": None, "last_step": None, "sums": {}, "layer_sums": {}}
    for source, column in columns.items():
        if source[0] == "algorithm":
            continue
        if len(source) == 1:
            changed[source[0]] = column
        else:
            entry = "sums" if source[0] == INNER else source[0]
            changed.setdefault(entry, dict(getattr(client, entry)))[source[1]] = column
    return replace(client, **changed)
