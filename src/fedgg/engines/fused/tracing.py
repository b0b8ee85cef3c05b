"""What stands between inner products and factors, written down once and then done in one go.

An algorithm writes its factors in torch's words (`distance.sqrt()`, `torch.where(step == 0, 0, pull)`): twenty steps
on columns of a single number for each client. Operation by operation they take longer than their arithmetic is worth: a
tenth of a small model's step. So `terms` is called once a round with columns that only listen, and what they heard, a
recipe, is done as one function of plain numbers on a CPU, as one kernel on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Site
from fedgg.core.rows import Rows

Source = tuple[str, ...]  # where a number comes from: ("lr",), ("sums", "drift.drift"), ("notes", "reach"), ...
Operand = int | float  # the number of a value, or a constant
STEP: Source = ("step",)


@dataclass(frozen=True)
class Line:
    """One operation; its result is the value after all sources and all lines before it."""

    name: str
    operands: tuple[tuple[bool, Operand], ...]  # whether it is a value, and its number; else a constant


@dataclass(frozen=True)
class Recipe:
    """From numbers to factors."""

    sources: tuple[Source, ...]
    lines: tuple[Line, ...]
    factors: tuple[tuple[str, bool, Operand], ...]  # by the name of their vector


class NotHeard(Exception):
    """Something was asked of a column that has no name here."""


class _Column:
    """Listens. Whatever is asked of it in torch's words is written down, and the answer is another column."""

    def __init__(self, lines: list[Line], sources: int, number: int):
        self._lines = lines
        self._sources = sources
        self.number = number

    def _ask(self, name: str, *operands: Any) -> _Column:
        self._lines.append(Line(name, tuple(_operand(operand) for operand in operands)))
        return _Column(self._lines, self._sources, self._sources + len(self._lines) - 1)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, operands: Any = (), named: Any = None) -> Any:
        name = _NAMES.get(function)
        if name is None or named:
            raise NotHeard(str(function))
        if name in _FILLED:
            return _FILLED[name]
        return next(operand for operand in operands if isinstance(operand, _Column))._ask(name, *operands)

    def square(self) -> _Column:
        return self._ask("mul", self, self)

    def reciprocal(self) -> _Column:
        return self._ask("div", 1.0, self)

    def __getattr__(self, name: str) -> Any:
        raise NotHeard(name)

    def __bool__(self) -> bool:
        raise NotHeard("a decision that looks at a number: torch.where can be heard")

    __hash__ = None  # type: ignore[assignment]


def _operand(operand: Any) -> tuple[bool, Operand]:
    if isinstance(operand, _Column):
        return True, operand.number
    if isinstance(operand, int | float):
        return False, float(operand)
    raise NotHeard(f"an operand {type(operand).__name__}")


_NAMES = {
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


def _teach() -> None:
    """Operators and methods of a column, each of which does no more than ask."""
    for word, name in _TWO.items():
        setattr(_Column, f"__{word}__", lambda self, other, name=name: self._ask(name, self, other))
        setattr(_Column, f"__r{word}__", lambda self, other, name=name: self._ask(name, other, self))
    for name in _COMPARISONS:
        setattr(_Column, f"__{name}__", lambda self, other, name=name: self._ask(name, self, other))
    for word, name in _ONE.items():
        setattr(_Column, word, lambda self, name=name: self._ask(name, self))
    for word, name in (("clamp_min", "maximum"), ("clamp_max", "minimum")):
        setattr(_Column, word, lambda self, other, name=name: self._ask(name, self, other))


_teach()


def recipe_of(algorithm: Algorithm, site: Site, pairs: Iterable[str]) -> Recipe | None:
    """None if `terms` asks something that cannot be heard: then it is called step by step, with tensors."""
    sources = [STEP, *(("sums", both) for both in pairs), *_columns(algorithm, site)]
    lines: list[Line] = []
    columns: Any = {source: _Column(lines, len(sources), number) for number, source in enumerate(sources)}
    try:
        factors = _listening(algorithm, columns).terms(_blind(site, columns))
        results = tuple((name, *_operand(factor)) for name, factor in factors.items())
    except (NotHeard, AttributeError, TypeError, ValueError, RuntimeError):
        return None  # a real mistake shows again, with tensors
    return Recipe(tuple(sources), tuple(lines), results)


def lasting(recipe: Recipe, algorithm: Algorithm, site: Site) -> list[Tensor]:
    """The columns that stay as they are over the round: of all sources behind the step and the inner products."""
    return [found(source, algorithm, site) for source in recipe.sources if is_lasting(source)]


def is_lasting(source: Source) -> bool:
    """Whether a round leaves it as it is."""
    return source != STEP and source[0] != "sums"


def found(source: Source, algorithm: Algorithm, site: Site) -> Tensor:
    """The column behind a source that lasts."""
    if source[0] == "algorithm":
        own: Tensor = getattr(algorithm, source[1])
        return own
    value: Any = getattr(site, source[0])
    column: Tensor = value[source[1]] if len(source) > 1 else value
    return column


def is_always(recipe: Recipe, algorithm: Algorithm, site: Site, pairs: Iterable[str]) -> bool:
    """Whether `terms` and `readings` do the same whatever the numbers are: then they need be heard only once."""
    unseen = _without_numbers(site)
    return recipe_of(algorithm, unseen, pairs) == recipe and _readings_heard(algorithm, unseen)


def _without_numbers(site: Site) -> Site:
    """Its rows have shapes and nothing in them: whoever decides by what they hold is found out."""

    def empty(rows: Rows) -> Rows:
        return {name: row if _is_column(row) else torch.empty_like(row, device="meta") for name, row in rows.items()}

    nowhere: Any = None
    return replace(
        site,
        net=nowhere,
        probe=None,
        down=empty(site.down),
        memory=empty(site.memory),
        notes=empty(site.notes),
        w=torch.empty_like(site.w, device="meta"),
    )


def _readings_heard(algorithm: Algorithm, site: Site) -> bool:
    sources = [STEP, *_columns(algorithm, site)]
    columns: Any = {source: _Column([], len(sources), number) for number, source in enumerate(sources)}
    blind = replace(_blind(site, columns), sums=_EverySum())
    try:
        _listening(algorithm, columns).readings(site.w, blind)
    except (NotHeard, AttributeError, TypeError, ValueError, RuntimeError):
        return False
    return True


class _EverySum(dict[str, Any]):
    def get(self, name: str, default: Any = None) -> Any:
        return _Column([], 1, 0)


def _columns(algorithm: Algorithm, site: Site) -> list[Source]:
    """Everything of one number a row that `terms` may look at."""
    names: list[Source] = [("algorithm", f.name) for f in fields(algorithm) if _is_column(getattr(algorithm, f.name))]
    for field in fields(site):
        value = getattr(site, field.name)
        if field.name in ("step", "sums", "w", "last_step"):
            continue
        if isinstance(value, dict):
            names += [(field.name, name) for name, rows in value.items() if _is_column(rows)]
        elif _is_column(value):
            names.append((field.name,))
    return names


def _is_column(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == 1


def _listening(algorithm: Algorithm, columns: Any) -> Algorithm:
    own = {source[1]: column for source, column in columns.items() if source[0] == "algorithm"}
    return replace(algorithm, **own) if own else algorithm


def _blind(site: Site, columns: Any) -> Site:
    """The site with its columns listening, and without the rows themselves."""
    changed: dict[str, Any] = {"w": None, "last_step": None, "sums": {}}
    for source, column in columns.items():
        if source[0] == "algorithm":
            continue
        if len(source) == 1:
            changed[source[0]] = column
        else:
            changed.setdefault(source[0], dict(getattr(site, source[0])))[source[1]] = column
    return replace(site, **changed)


@lru_cache(maxsize=64)
def as_function(recipe: Recipe) -> Callable[..., tuple[float, ...]]:
    """The recipe as one function of plain numbers, in the order of its sources."""
    names = [f"x{number}" for number in range(len(recipe.sources) + len(recipe.lines))]

    def shown(is_value: bool, operand: Operand) -> str:
        if is_value:
            return names[int(operand)]
        return repr(operand) if math.isfinite(operand) else f"float('{operand!r}')"

    body = [
        f"    {names[len(recipe.sources) + number]} = "
        + _IN_PYTHON[line.name].format(*(shown(*operand) for operand in line.operands))
        for number, line in enumerate(recipe.lines)
    ]
    results = "".join(f"{shown(is_value, operand)}, " for _, is_value, operand in recipe.factors)
    head = f"def factors({', '.join(names[: len(recipe.sources)])}):"
    known: dict[str, Any] = dict(_KNOWN)
    exec("\n".join([head, *body, f"    return ({results})"]), known)
    made: Callable[..., tuple[float, ...]] = known["factors"]
    return made


_IN_PYTHON = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "div({}, {})",
    "pow": "pow({}, {})",
    "neg": "-{}",
    "abs": "abs({})",
    "sqrt": "sqrt({})",
    "exp": "exp({})",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "where": "({1} if {0} else {2})",
    "maximum": "larger({}, {})",
    "minimum": "smaller({}, {})",
}


def _sqrt(a: float) -> float:
    return math.sqrt(a) if a >= 0 else math.nan


def _divided(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _power(a: float, b: float) -> float:
    return float(torch.tensor(a, dtype=torch.float64) ** b)


def _exp(a: float) -> float:
    return float(torch.tensor(a, dtype=torch.float64).exp())


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _smaller(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else min(a, b)


_KNOWN = {"sqrt": _sqrt, "div": _divided, "pow": _power, "exp": _exp, "larger": _larger, "smaller": _smaller}
