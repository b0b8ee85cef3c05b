"""A step whose algorithm is a sum of terms, as one pass over memory: the twin of `core.local.local_step` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Site
from fedgg.core.local import Running, gradient
from fedgg.core.rows import Rows, each_row
from fedgg.core.sgd import SGD
from fedgg.engines.terms import Asked, asked


@dataclass(frozen=True, eq=False)
class OnePass:
    """What the pass needs beside the rows, at addresses that never change."""

    asked: Asked
    parts: Tensor  # [K, inner products, blocks]: inner products of where the rows stand, in parts
    leads: Rows  # of the anchor and of each note: the row to be read in place of an equal one, [K] int32

    @classmethod
    def of(cls, algorithm: Algorithm, site: Site, owners: list[int]) -> OnePass | None:
        """None where there is no such pass: on a CPU, or for an algorithm that is more than a sum of terms."""
        from fedgg import kernels

        if not site.w.is_cuda or not kernels.available():
            return None
        from fedgg.kernels import advance

        wanted = asked(algorithm, site)
        if wanted is None or len(wanted.notes) > advance.VECTORS or len(wanted.pairs) > advance.MOST_SUMS:
            return None
        shared = (["anchor"] if wanted.drift else []) + list(wanted.notes)
        rows, length = site.w.shape
        return cls(
            wanted,
            site.w.new_zeros(rows, len(wanted.pairs), advance.blocks(length)),
            {name: advance.leads(site.notes[name], owners) for name in shared},
        )

    def step(self, algorithm: Algorithm, sgd: SGD, running: Running, site: Site, batch: Batch) -> None:
        """Moves `running` and `parts` in place."""
        from fedgg.kernels import advance

        site = replace(site, step=running.step, w=running.w, last_step=None, sums=self.sums())
        loss, grad = gradient(algorithm, running.w, batch, site)
        with torch.no_grad():
            at_work = torch.ones_like(running.step, dtype=torch.bool) if batch.at_work is None else batch.at_work
            terms = algorithm.terms(site)
            vectors = ["drift", *self.asked.notes]
            names = (*vectors, "", "")[:3]
            columns = [_column(terms.get(name, 0.0), running.step) for name in names]
            advance.advance(
                running.w,
                grad,
                running.velocity,
                self._shared("anchor", site) if self.asked.drift else None,
                [self._shared(name, site) for name in self.asked.notes],
                torch.cat(columns, 1),
                [name in terms for name in names],
                sgd.lr,
                sgd.momentum if sgd.has_momentum else None,
                sgd.weight_decay if sgd.has_decay else None,
                at_work,
                self.parts,
                tuple(self._numbers(both) for both in self.asked.pairs),
            )
            count = batch.mask.sum(1, keepdim=True) * at_work
            running.step.add_(at_work)
            running.loss_sum.add_(torch.where(at_work, loss, 0) * count)
            running.seen.add_(count)

    def sums(self) -> Rows:
        """The inner products, put together from their parts in a fixed order."""
        if not self.asked.pairs:
            return {}
        whole = self.parts.sum(2)
        return {name: whole[:, number : number + 1] for number, name in enumerate(self.asked.pairs)}

    def slice(self, rows: int) -> OnePass:
        return each_row(self, slice(rows))

    def _shared(self, name: str, site: Site):  # type: ignore[no-untyped-def]
        from fedgg.kernels.advance import Shared

        return Shared(site.notes[name], self.leads[name])

    def _numbers(self, both: str) -> tuple[int, int]:
        order = ["drift", "step", *self.asked.notes]
        a, b = both.split(".")
        return order.index(a), order.index(b)


def _column(value: float | Tensor, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full_like(like, value)
