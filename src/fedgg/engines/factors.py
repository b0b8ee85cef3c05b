"""The factors of a step's terms on a GPU: one small kernel a step, and nothing for what a round leaves as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Site
from fedgg.core.recipe import Line, Operand, Recipe, lasting


@dataclass(frozen=True, eq=False)
class Factors:
    """A recipe split in two: what a round leaves as it is has been done, the rest is done in every step."""

    lasting: Tensor  # [K, columns]: numbers of the first kind, in float64; the factors themselves if nothing is left
    lines: tuple[tuple[int, ...], ...]  # of the second kind, see `kernels.numbers`
    wanted: tuple[int, ...]  # for each place of a factor the number of its value; () if nothing is left to be done

    @classmethod
    def of(cls, recipe: Recipe, places: Sequence[str], algorithm: Algorithm, site: Site) -> Factors | None:
        """Factors in these places; None if something is left for every step that the kernel has no code for."""
        from fedgg.kernels.numbers import CODES, NOTHING

        columns = lasting(recipe, algorithm, site)
        moving = len(recipe.sources) - len(columns)  # the step and the inner products
        known: dict[tuple[bool, Operand], Tensor] = {
            (True, moving + number): column.double() for number, column in enumerate(columns)
        }
        like, left = torch.zeros_like(site.step, dtype=torch.float64), list[tuple[int, Line]]()
        for number, line in enumerate(recipe.lines, start=len(recipe.sources)):
            known |= {(False, o): torch.full_like(like, o) for is_value, o in line.operands if not is_value}
            if all(operand in known for operand in line.operands):
                known[True, number] = _BY_TORCH[line.name](*(known[operand] for operand in line.operands)).double()
            elif line.name in CODES:
                left.append((number, line))
            else:
                return None
        factors = {name: (is_value, operand) for name, is_value, operand in recipe.factors}
        known |= {(False, o): torch.full_like(like, o) for is_value, o in factors.values() if not is_value}
        if all(factor in known for factor in factors.values()):
            fixed = [known[factors[name]] if name in factors else like for name in places]
            return cls(torch.cat(fixed, 1).to(site.w.dtype), (), ())
        asked = [*(operand for _, line in left for operand in line.operands), *factors.values()]
        kept = [operand for operand in dict.fromkeys(asked) if operand in known]
        values = [*((True, n) for n in range(moving)), *kept, *((True, n) for n, _ in left)]
        number_of: dict[tuple[bool, Operand], int] = {operand: number for number, operand in enumerate(values)}
        lines = ((CODES[line.name], *(number_of[operand] for operand in line.operands), 0, 0) for _, line in left)
        return cls(
            torch.cat([known[operand] for operand in kept], 1) if kept else like,
            tuple(line[:4] for line in lines),
            tuple(number_of[factors[name]] if name in factors else NOTHING for name in places),
        )

    def at(self, step: Tensor, parts: Tensor) -> Tensor:
        """`[K, places]`, after so many steps and with these parts of the inner products."""
        from fedgg.kernels import numbers

        if not self.wanted:
            return self.lasting
        out = torch.empty(len(step), len(self.wanted), dtype=parts.dtype, device=parts.device)
        numbers.run(step, parts, self.lasting, self.lines, self.wanted, out)
        return out


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
