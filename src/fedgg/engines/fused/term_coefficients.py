"""The coefficients of a step's terms, from a trace: by a Python function on a CPU, by one small kernel on a GPU.

On a GPU, values that are constant over a round are computed once, before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client
from fedgg.engines.fused.term_analysis import Operand, Trace, TracedOperation, column_of, is_constant

Value = tuple[bool, Operand]  # as in `TracedOperation`: (True, index of a value) or (False, constant)


# On a CPU ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def as_python_function(trace: Trace) -> Callable[..., tuple[float, ...]]:
    """The trace as one function of Python floats, in the order of its sources."""
    names = [f"x{number}" for number in range(len(trace.sources) + len(trace.operations))]

    def expression(is_value: bool, operand: Operand) -> str:
        if is_value:
            return names[int(operand)]
        return repr(operand) if math.isfinite(operand) else f"float('{operand!r}')"

    body = [
        f"    {names[len(trace.sources) + number]} = "
        + _PYTHON_OPERATIONS[operation.name].format(*(expression(*operand) for operand in operation.operands))
        for number, operation in enumerate(trace.operations)
    ]
    results = "".join(f"{expression(is_value, operand)}, " for _, is_value, operand in trace.coefficients)
    head = f"def coefficients({', '.join(names[: len(trace.sources)])}):"
    namespace: dict[str, Any] = dict(_PYTHON_FUNCTIONS)
    exec("\n".join([head, *body, f"    return ({results})"]), namespace)
    function: Callable[..., tuple[float, ...]] = namespace["coefficients"]
    return function


_PYTHON_OPERATIONS = {
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


_PYTHON_FUNCTIONS = {"sqrt": _sqrt, "div": _divided, "pow": _power, "exp": _exp, "larger": _larger, "smaller": _smaller}


# On a GPU ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitTrace:
    """A trace in two parts: operations computed once a round, and operations computed in every step."""

    trace: Trace
    places: tuple[str, ...]  # vectors in the order of the kernel's factors
    computed_once: tuple[tuple[int, TracedOperation], ...]  # with the index of the result
    constants: tuple[Value, ...]  # constant values that the steps use
    operations: tuple[tuple[int, ...], ...]  # of every step, as in `kernels.compute_coefficients`
    results: tuple[int, ...]  # for each place the index of its value; () if all coefficients are constant

    def of(self, algorithm: Algorithm, client: Client) -> Coefficients:
        """The coefficients for this round, with the constant operations computed."""
        like = torch.zeros_like(client.step, dtype=torch.float64)
        columns: dict[Value, Tensor] = {}

        def column(value: Value) -> Tensor:
            is_value, number = value
            if value not in columns and is_value:
                columns[value] = column_of(self.trace.sources[int(number)], algorithm, client).double()
            return columns[value] if is_value else torch.full_like(like, number)

        for number, operation in self.computed_once:
            columns[True, number] = _TORCH_FUNCTIONS[operation.name](
                *(column(operand) for operand in operation.operands)
            ).double()
        if self.results:
            constants = torch.cat([column(value) for value in self.constants], 1) if self.constants else like
            return Coefficients(constants, self.operations, self.results)
        factors = {name: (is_value, operand) for name, is_value, operand in self.trace.coefficients}
        fixed = [column(factors[name]) if name in factors else like for name in self.places]
        return Coefficients(torch.cat(fixed, 1).to(client.w.dtype), (), ())


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The constants of a round, and the operations that are computed in every step."""

    constants: Tensor  # [K, columns] in float64; the coefficients themselves if they are constant
    operations: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]

    def at(self, step: Tensor, parts: Tensor) -> Tensor:
        """`[K, places]` for this step number and these partial sums of the inner products."""
        from fedgg.kernels import compute_coefficients

        if not self.results:
            return self.constants
        out = torch.empty(len(step), len(self.results), dtype=parts.dtype, device=parts.device)
        compute_coefficients.run(step, parts, self.constants, self.operations, self.results, out)
        return out


@lru_cache(maxsize=64)
def split_trace(trace: Trace, places: tuple[str, ...]) -> SplitTrace | None:
    """None if a step needs an operation that the kernel has no code for. Other coefficients are not computed."""
    from fedgg.kernels.compute_coefficients import CODES, NOTHING

    factors = {name: (is_value, operand) for name, is_value, operand in trace.coefficients if name in places}
    operations = dict(enumerate(trace.operations, start=len(trace.sources)))
    needed = _needed(operations, list(factors.values()))
    variables = sum(not is_constant(source) for source in trace.sources)  # the step and the inner products come first
    changing: set[Value] = {(True, number) for number in range(variables)}
    for number, operation in operations.items():
        if any(operand in changing for operand in operation.operands):
            changing.add((True, number))
    computed_once = tuple((n, operation) for n, operation in operations.items() if (True, n) in needed - changing)
    in_steps = [(n, operation) for n, operation in operations.items() if (True, n) in needed & changing]
    if any(operation.name not in CODES for _, operation in in_steps):
        return None
    if not changing.intersection(factors.values()):
        return SplitTrace(trace, places, computed_once, (), (), ())
    operands = [*(operand for _, operation in in_steps for operand in operation.operands), *factors.values()]
    constants = tuple(operand for operand in dict.fromkeys(operands) if operand not in changing)
    values: list[Value] = [*((True, n) for n in range(variables)), *constants, *((True, n) for n, _ in in_steps)]
    index_of = {value: number for number, value in enumerate(values)}
    coded = (
        (CODES[operation.name], *(index_of[operand] for operand in operation.operands), 0, 0)[:4]
        for _, operation in in_steps
    )
    results = tuple(index_of[factors[name]] if name in factors else NOTHING for name in places)
    return SplitTrace(trace, places, computed_once, constants, tuple(coded), results)


def _needed(operations: dict[int, TracedOperation], results: list[Value]) -> set[Value]:
    """The results and all values they are computed from."""
    needed, waiting = set(results), list(results)
    while waiting:
        is_value, number = waiting.pop()
        operation = operations.get(int(number)) if is_value else None
        operands = [operand for operand in operation.operands if operand not in needed] if operation else []
        needed.update(operands)
        waiting += operands
    return needed


_TORCH_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "neg": torch.neg,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "gt": torch.gt,
    "ge": torch.ge,
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "ne": torch.ne,
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
