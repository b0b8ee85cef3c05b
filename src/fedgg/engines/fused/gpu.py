"""A step whose algorithm is a sum of terms, as one pass over memory: the twin of `core.local.local_step` on a GPU."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedgg import kernels
from fedgg.core.algorithm import Algorithm, Batch, Site
from fedgg.core.local import Running, gradient
from fedgg.core.rows import Rows
from fedgg.core.sgd import SGD
from fedgg.engines.fused.coefficients import Factors, Split, split_of
from fedgg.engines.fused.terms import Asked, asked, refuse_other_names
from fedgg.engines.fused.tracing import is_always, recipe_of
from fedgg.engines.program import Program

if TYPE_CHECKING:
    from fedgg.kernels.advance import Pass, Shared, Wide


@dataclass(frozen=True)
class Plan:
    """What an algorithm's steps are made of."""

    asked: Asked
    split: Split | None  # None: factors as the algorithm says them, operation by operation
    lasts: bool  # whether it is the same whatever the numbers are, and need be found out only once

    @classmethod
    def of(cls, algorithm: Algorithm, site: Site) -> Plan | None:
        """None where one pass cannot do them: an algorithm that is more than a sum of a few terms."""
        from fedgg.kernels import advance

        wanted = asked(algorithm, site)
        if wanted is None or len(wanted.notes) > advance.VECTORS or len(wanted.pairs) > advance.MOST_SUMS:
            return None
        refuse_other_names(algorithm, site, wanted)
        recipe = recipe_of(algorithm, site, wanted.pairs)
        split = split_of(recipe, _places(wanted)) if recipe else None
        plain = type(algorithm).nudge is Algorithm.nudge
        return cls(wanted, split, plain and recipe is not None and is_always(recipe, algorithm, site, wanted.pairs))


@dataclass(frozen=True, eq=False)
class OnePass:
    """What the pass needs beside the rows, at addresses that never change."""

    asked: Asked
    parts: Tensor  # [K, inner products, blocks]: inner products of where the rows stand, in parts
    leads: Rows  # of the anchor and of each note: the row to be read in place of an equal one, [K] int32
    plain: bool  # whether the loss is the supervised one and no more
    wide: Program | None  # whose first layer's gradient is made in the pass
    factors: Factors | None  # None: as the algorithm says them, operation by operation
    side: torch.cuda.Stream

    @classmethod
    def of(
        cls, algorithm: Algorithm, site: Site, owners: list[int], wide: Program | None, plans: Plans, rule: Hashable
    ) -> OnePass | None:
        """None where there is no such pass: on a CPU, or for an algorithm that is more than a sum of terms."""
        if not site.w.is_cuda or not kernels.available():
            return None
        from fedgg.kernels import advance

        plan = plans.get(rule) or Plan.of(algorithm, site)
        if plan is None:
            return None
        if plan.lasts:
            plans[rule] = plan
        wanted = plan.asked
        shared = (["anchor"] if wanted.drift else []) + list(wanted.notes)
        rows, length = site.w.shape
        plain = type(algorithm).loss is Algorithm.loss  # the model is run once: there is one gradient to withhold
        wide = wide if plain else None
        inside = math.prod(site.net.layout.shapes[0]) if wide else 0
        return cls(
            wanted,
            site.w.new_zeros(rows, len(wanted.pairs), advance.blocks(length, inside)),
            {name: advance.leads(site.notes[name], owners) for name in shared},
            plain,
            wide,
            plan.split.of(algorithm, site) if plan.split else None,
            torch.cuda.Stream(site.w.device, priority=-1),
        )

    def step(self, algorithm: Algorithm, sgd: SGD, running: Running, site: Site, batch: Batch) -> None:
        """Moves `running` and `parts` in place. What is made of single numbers runs beside the large kernels."""
        from fedgg.kernels import advance

        here = torch.cuda.current_stream()
        at_work = torch.ones_like(running.step, dtype=torch.bool) if batch.at_work is None else batch.at_work
        with self._beside(here):
            sums = {} if self.plain and self.factors else self.sums()
            site = replace(site, step=running.step, w=running.w, last_step=None, sums=sums)
            move = self._pass(algorithm, sgd, running, site, at_work)
        if not self.plain:
            here.wait_stream(self.side)  # the algorithm's own loss may read the sums
        withholding: AbstractContextManager[list[Wide]] = self.wide.withholding() if self.wide else nullcontext([])
        with withholding as withheld:
            loss, grad = gradient(algorithm, running.w, batch, site)
        here.wait_stream(self.side)
        with self._beside(here):
            count = batch.mask.sum(1, keepdim=True) * at_work
            running.step.add_(at_work)
            running.loss_sum.add_(torch.where(at_work, loss, 0) * count)
            running.seen.add_(count)
        with torch.no_grad():
            advance.advance(move, grad, *withheld)
        here.wait_stream(self.side)

    @property
    def captured(self) -> object:
        """What of it a graph holds for good."""
        return self.asked, self.factors and (self.factors.lines, self.factors.wanted)

    @contextmanager
    def _beside(self, here: torch.cuda.Stream) -> Iterator[None]:
        """On a stream of its own, from what has been done so far; in a captured step, a branch of the graph."""
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side), torch.no_grad():
            yield

    def _pass(self, algorithm: Algorithm, sgd: SGD, running: Running, site: Site, at_work: Tensor) -> Pass:
        from fedgg.kernels.advance import Pass

        names = _places(self.asked)
        return Pass(
            w=running.w,
            velocity=running.velocity,
            anchor=self._shared("anchor", site) if self.asked.drift else None,
            vectors=[self._shared(name, site) for name in self.asked.notes],
            factors=self._factors(algorithm, running, site) if self.asked.factors else sgd.lr,  # which nobody reads
            has_factor=[name in self.asked.factors for name in names],
            lr=sgd.lr,
            momentum=sgd.momentum if sgd.has_momentum else None,
            decay=sgd.weight_decay if sgd.has_decay else None,
            at_work=at_work,
            parts=self.parts,
            pairs=tuple(self._numbers(both) for both in self.asked.pairs),
        )

    def _factors(self, algorithm: Algorithm, running: Running, site: Site) -> Tensor:
        if self.factors is not None:
            return self.factors.at(running.step, self.parts)
        terms = algorithm.terms(site)
        return torch.cat([_column(terms.get(name, 0.0), running.step) for name in _places(self.asked)], 1)

    def sums(self) -> Rows:
        """The inner products, put together from their parts in a fixed order."""
        if not self.asked.pairs:
            return {}
        whole = self.parts.sum(2)
        return {name: whole[:, number : number + 1] for number, name in enumerate(self.asked.pairs)}

    def _shared(self, name: str, site: Site) -> Shared:
        from fedgg.kernels.advance import Shared

        return Shared(site.notes[name], self.leads[name])

    def _numbers(self, both: str) -> tuple[int, int]:
        order = ["drift", "step", *self.asked.notes]
        a, b = both.split(".")
        return order.index(a), order.index(b)


Plans = dict[Hashable, Plan]  # by what a plan depends on: an algorithm's kind, switches and numbers, and shapes


def _places(asked: Asked) -> tuple[str, ...]:
    """The vectors a step may add, in the kernel's order."""
    return ("drift", *asked.notes, "", "")[:3]


def _column(value: float | Tensor, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full_like(like, value)
