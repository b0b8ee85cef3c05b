"""By what an algorithm's `nudge` multiplies the steps of a round, where it multiplies them by a number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number
from fedgg.engines.fused.term_analysis import is_column


@dataclass(frozen=True)
class _Move:
    """Stands for the optimiser's step, and records by what `nudge` multiplies it."""

    factor: Number = 1.0

    def __mul__(self, factor: Any) -> Any:
        return _Move(self.factor * factor) if isinstance(factor, int | float) or is_column(factor) else NotImplemented

    __rmul__ = __mul__


class _Unreadable:
    """Stands for a value that differs from step to step: every use of it raises TypeError."""

    def _refuse(self, *others: Any) -> Any:
        raise TypeError("it differs from step to step")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __len__ = __iter__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def step_scale(algorithm: Algorithm, client: Client) -> Number | None:
    """By what `nudge` multiplies the optimiser's step in all steps of a round; None where it does something else."""
    if type(algorithm).nudge is Algorithm.nudge:
        return 1.0
    unread: Any = _Unreadable()
    without_rows = replace(client, w=unread, last_step=unread, step=unread, sums={})
    try:
        move: Any = algorithm.nudge(cast(Tensor, _Move()), unread, without_rows)
    except Exception:  # a mistake in it is raised again by the reference step
        return None
    return move.factor if isinstance(move, _Move) else None
