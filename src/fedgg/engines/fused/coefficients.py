"""The factors of a step's terms on a GPU: one small kernel a step, and nothing for what a round leaves as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Site
from fedgg.engines.fused.tracing import Line, Operand, Recipe, found, is_lasting

Value = tuple[bool, Operand]  # as in a line: the number of a value, or a constant


@dataclass(frozen=True)
class Split:
    """A recipe in two parts: what a round leaves as it is can be done once, the rest is done in every step."""

    recipe: Recipe
    places: tuple[str, ...]
    once: tuple[tuple[int, Line], ...]  # by the number of what they make
    kept: tuple[Value, ...]  # what the steps need of the first part
    lines: tuple[tuple[int, ...], ...]  # of every step, see `kernels.numbers`
    wanted: tuple[int, ...]  # for each place the number of its factor's value; () if nothing is left for the steps

    def of(self, algorithm: Algorithm, site: Site) -> Factors:
        """With this round's numbers."""
        like = torch.zeros_like(site.step, dtype=torch.float64)
        known: dict[Value, Tensor] = {}

        def column(value: Value) -> Tensor:
            is_value, number = value
            if value not in known and is_value:
                known[value] = found(self.recipe.sources[int(number)], algorithm, site).double()
            return known[value] if is_value else torch.full_like(like, number)

        for number, line in self.once:
            known[True, number] = _BY_TORCH[line.name](*(column(operand) for operand in line.operands)).double()
        if self.wanted:
            kept = torch.cat([column(value) for value in self.kept], 1) if self.kept else like
            return Factors(kept, self.lines, self.wanted)
        factors = {name: (is_value, operand) for name, is_value, operand in self.recipe.factors}
        fixed = [column(factors[name]) if name in factors else like for name in self.places]
        return Factors(torch.cat(fixed, 1).to(site.w.dtype), (), ())


@dataclass(frozen=True, eq=False)
class Factors:
    """What is left to be done in a step."""

    lasting: Tensor  # [K, columns]: what was kept, in float64; the factors themselves if nothing is left
    lines: tuple[tuple[int, ...], ...]
    wanted: tuple[int, ...]

    def at(self, step: Tensor, parts: Tensor) -> Tensor:
        """`[K, places]`, after so many steps and with these parts of the inner products."""
        from fedgg.kernels import numbers

        if not self.wanted:
            return self.lasting
        out = torch.empty(len(step), len(self.wanted), dtype=parts.dtype, device=parts.device)
        numbers.run(step, parts, self.lasting, self.lines, self.wanted, out)
        return out


@lru_cache(maxsize=64)
def split_of(recipe: Recipe, places: tuple[str, ...]) -> Split | None:
    """None if something is left for every step that the kernel has no code for."""
    from fedgg.kernels.numbers import CODES, NOTHING

    factors = {name: (is_value, operand) for name, is_value, operand in recipe.factors}
    lines = dict(enumerate(recipe.lines, start=len(recipe.sources)))
    needed = _needed(lines, list(factors.values()))
    moving = sum(not is_lasting(source) for source in recipe.sources)  # the step and the inner products come first
    changing: set[Value] = {(True, number) for number in range(moving)}
    for number, line in lines.items():
        if any(operand in changing for operand in line.operands):
            changing.add((True, number))
    once = tuple((n, line) for n, line in lines.items() if (True, n) in needed - changing)
    left = [(n, line) for n, line in lines.items() if (True, n) in needed & changing]
    if any(line.name not in CODES for _, line in left):
        return None
    if not changing.intersection(factors.values()):
        return Split(recipe, places, once, (), (), ())
    asked = [*(operand for _, line in left for operand in line.operands), *factors.values()]
    kept = tuple(operand for operand in dict.fromkeys(asked) if operand not in changing)
    values: list[Value] = [*((True, n) for n in range(moving)), *kept, *((True, n) for n, _ in left)]
    number_of = {value: number for number, value in enumerate(values)}
    coded = ((CODES[line.name], *(number_of[operand] for operand in line.operands), 0, 0)[:4] for _, line in left)
    wanted = tuple(number_of[factors[name]] if name in factors else NOTHING for name in places)
    return Split(recipe, places, once, kept, tuple(coded), wanted)


def _needed(lines: dict[int, Line], results: list[Value]) -> set[Value]:
    """The results and everything they are made of."""
    needed, waiting = set(results), list(results)
    while waiting:
        is_value, number = waiting.pop()
        line = lines.get(int(number)) if is_value else None
        fresh = [operand for operand in line.operands if operand not in needed] if line else []
        needed.update(fresh)
        waiting += fresh
    return needed


_BY_TORCH: dict[str, Callable[..., Tensor]] = {
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
