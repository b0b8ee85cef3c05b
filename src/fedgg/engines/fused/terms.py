"""Which vectors and inner products an algorithm's steps need, found out by calling `terms` once on a trial client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number
from fedgg.errors import UserError

LATER = (2, 3, 4, 9, 99, 999)  # steps, counted from zero, at which terms are looked at again


@dataclass(frozen=True)
class StepTerms:
    """The vectors an algorithm adds to the gradient, and the inner products their coefficients are computed from."""

    vectors: tuple[str, ...]  # the drift and notes, by name
    inner_products: tuple[str, ...]  # those that change from step to step

    @property
    def notes(self) -> tuple[str, ...]:
        """Vectors besides the drift, added or in the inner products."""
        named = [*self.vectors, *(name for both in self.inner_products for name in both.split("."))]
        return tuple(name for name in dict.fromkeys(named) if name not in ("drift", "step"))

    @property
    def drift(self) -> bool:
        return "drift" in self.vectors or any("drift" in both.split(".") for both in self.inner_products)


def analyse_terms(algorithm: Algorithm, client: Client) -> StepTerms | None:
    """None if a step is more than a sum of terms: then the algorithm's own functions are called step by step."""
    if type(algorithm).steer is not Algorithm.steer or not _leaves_steps_alone(algorithm, client):
        return None
    during, after = _Recorder(client.lr), _Recorder(client.lr)
    nowhere = cast(Tensor, None)
    without_rows = replace(client, w=nowhere, last_step=None, sums=during)
    try:
        factors = algorithm.terms(without_rows)
        if list(algorithm.terms(replace(without_rows, step=client.step + 1))) != list(factors):
            return None  # the first step has terms of its own
        algorithm.diagnostics(client.w, replace(client, last_step=None, sums=after))
    except (AttributeError, TypeError, RuntimeError):
        return None  # it looks at the rows themselves
    if "step" in factors:
        return None  # engines keep the last step's inner products, not the step
    if any(isinstance(factor, Tensor) and factor.shape[1:] != (1,) for factor in factors.values()):
        return None
    of_the_step = [both for both in after.names if "step" in both.split(".")]
    moving = [both for both in during.names if not {"drift", "step"}.isdisjoint(both.split("."))]
    terms = StepTerms(tuple(factors), tuple(dict.fromkeys([*moving, *of_the_step])))
    for name in terms.notes:
        client.check_noted(name)
    return terms


def refuse_other_names(algorithm: Algorithm, client: Client, terms: StepTerms) -> None:
    """UserError where later steps name other vectors; for engines that do not call `terms` in every step."""
    for number in LATER:
        later_terms(algorithm, replace(client, sums=_Recorder(client.lr)), number, terms)


def later_terms(algorithm: Algorithm, client: Client, number: int, terms: StepTerms) -> Mapping[str, Number]:
    """What the step of this number, counted from zero, adds; UserError where it wants other things than the first two.

    The rows themselves are out of sight, since `client` holds those of the round's start.
    """
    without_rows = replace(client, step=torch.full_like(client.step, number), w=cast(Tensor, None), last_step=None)
    who = f"{type(algorithm).__name__}.terms()"
    try:
        coefficients = algorithm.terms(without_rows)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise UserError(
            f"{who} looks at the rows themselves in step {number + 1}, and not in the first two: look at them in every "
            f"step, or in none ({type(error).__name__}: {error})"
        ) from error
    if list(coefficients) != list(terms.vectors):
        raise UserError(
            f"{who} names {', '.join(coefficients) or 'nothing'} in step {number + 1}, and "
            f"{', '.join(terms.vectors) or 'nothing'} before: name the same vectors in every step, with a factor of "
            f"zero where they do not count"
        )
    return coefficients


def _leaves_steps_alone(algorithm: Algorithm, client: Client) -> bool:
    if type(algorithm).nudge is Algorithm.nudge:
        return True
    move = torch.zeros_like(client.w)
    return algorithm.nudge(move, client.w, client) is move


class _Recorder(dict[str, Tensor]):
    """Gives zero for every inner product, and records which were read."""

    def __init__(self, like: Tensor):
        super().__init__()
        self._like = like
        self.names: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self.names:
            self.names.append(name)
        return torch.zeros_like(self._like)
