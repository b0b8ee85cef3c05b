"""What a trace computes is what the algorithm's own words compute, at every number there is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgg.algorithms import FedAvg, FedGG, FedProx
from fedgg.core.algorithm import Algorithm, Client, Number
from fedgg.engines.fused.term_analysis import (
    StepTerms,
    analyse_terms,
    constant_columns,
    is_independent_of_values,
    trace_terms,
)
from fedgg.engines.fused.term_coefficients import as_python_function

PAIRS = StepTerms((), ("drift.drift", "direction.drift", "step.step"))
READINGS = [
    FedGG(mu=0.3),
    FedGG(gradient="printed"),
    FedGG(weight="fixed"),
    FedGG(weight="fixed", first_step="epsilon"),
    FedGG(mu=0.0, first_step="push", push_decay=0.9),
    FedGG(mu=0.0, first_step="relative_push", push_decay=0.9),
    FedProx(mu=0.2),
    FedAvg(),
]


def column(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def client(**changed: Any) -> Client:
    """All of it that `terms` looks at."""
    numbers = {name: column(value) for name, value in {"lr": 0.05, "momentum": 0.9, "round": 3.0, "steps": 7.0}.items()}
    rest = {"effective_steps": column(20.0), "examples": column(100.0), "step": column(0.0)}
    fixed: dict[str, Any] = {"net": None, "probe": None, "down": {}, "memory": {}, "w": None, "last_step": None}
    notes = {"reach": column(0.7), "anchor": torch.zeros(1, 9), "direction": torch.zeros(1, 9)}
    return Client(**({**fixed, **numbers, **rest, "notes": notes, "sums": {}} | changed))


def by_recipe(algorithm: Algorithm, where: Client, step: int, sums: list[float]) -> dict[str, float]:
    trace = trace_terms(algorithm, where, PAIRS)
    assert trace is not None
    rest = [float(found) for found in constant_columns(trace, algorithm, where)]
    names = [name for name, _, _ in trace.coefficients]
    return dict(zip(names, as_python_function(trace)(step, *sums, *rest), strict=True))


NUMBERS = st.one_of(st.sampled_from([0.0, 1.0, 1e-300, 1e300, math.inf, math.nan]), st.floats(0, 1e6))


@pytest.mark.parametrize("algorithm", READINGS, ids=str)
@given(step=st.integers(0, 3), drift=NUMBERS, along=st.one_of(NUMBERS, NUMBERS.map(lambda x: -x)), move=NUMBERS)
@settings(max_examples=60, deadline=None)
def test_a_recipe_is_the_algorithm(algorithm: Algorithm, step: int, drift: float, along: float, move: float) -> None:
    sums = [drift, along, move]
    now = {both: column(inner) for both, inner in zip(PAIRS.inner_products, sums, strict=True)}
    wanted = {name: float(factor) for name, factor in algorithm.terms(client(step=column(step), sums=now)).items()}
    found = by_recipe(algorithm, client(), step, sums)
    assert found.keys() == wanted.keys()
    for name, factor in wanted.items():
        assert found[name] == pytest.approx(factor, rel=1e-15, abs=0.0, nan_ok=True), name


def test_columns_of_an_algorithm_are_sources() -> None:
    """Experiments that differ in a number have it as a column."""
    alone, stacked = FedGG(mu=0.3), replace(FedGG(), mu=column(0.3))
    assert by_recipe(alone, client(), 2, [4.0, 1.0, 9.0]) == by_recipe(stacked, client(), 2, [4.0, 1.0, 9.0])


@dataclass(frozen=True)
class Words(Algorithm):
    """Every word a column knows, in one factor."""

    def terms(self, client: Client) -> Mapping[str, Number]:
        a, b = client.inner("drift", "drift"), client.inner("step", "step")
        low, high = torch.minimum(a, b), torch.maximum(a, b)
        mixed = (2 - a) / 3 + 1 / (1 + b) - a**0.5 + 0.9**b + abs(-a) + a.abs() + torch.abs(b) + a.square()
        more = a.sqrt() + torch.sqrt(b) + (-a).exp() + torch.exp(-b) + (1 + b).reciprocal() + low * high
        chosen = torch.where(a >= b, torch.where(a != 2, a, torch.ones_like(a)), torch.where(b <= 3, b, 3))
        equal = torch.where(a == b, 1, 2) + torch.where(a < 1, 1, 0) + torch.where(b > 1, torch.zeros_like(b), 5)
        return {"drift": mixed + more + chosen + equal + a.clamp_min(1.5) + b.clamp_max(0.5)}


@given(a=st.floats(0, 10), b=st.floats(0, 10))
@settings(max_examples=60, deadline=None)
def test_every_word(a: float, b: float) -> None:
    now = {"drift.drift": column(a), "direction.drift": column(0.0), "step.step": column(b)}
    wanted = float(cast(Tensor, Words().terms(client(sums=now))["drift"]))
    assert by_recipe(Words(), client(), 0, [a, 0.0, b])["drift"] == pytest.approx(wanted, rel=1e-12)


@dataclass(frozen=True)
class Leans(Algorithm):
    """By the angle between two notes, which stays the same in a round."""

    def terms(self, client: Client) -> Mapping[str, Number]:
        lengths = client.inner("direction", "direction") * client.inner("drift", "drift")
        return {"direction": client.inner("anchor", "direction") / lengths.sqrt()}


def test_inner_products_of_notes_are_sources() -> None:
    algorithm, notes = Leans(), {"anchor": torch.arange(9.0)[None].double(), "direction": torch.ones(1, 9).double()}
    where = client(notes=notes, w=notes["anchor"] + 2, step=column(1.0))
    terms = analyse_terms(algorithm, where)
    assert terms is not None
    assert (terms.inner_products, terms.constant_products) == (
        ("drift.drift",),
        ("direction.direction", "anchor.direction"),
    )
    trace = trace_terms(algorithm, where, terms)
    assert trace is not None
    constants = [float(found) for found in constant_columns(trace, algorithm, where)]
    (found,) = as_python_function(trace)(1, 36.0, *constants)
    assert found == pytest.approx(float(cast(Tensor, algorithm.terms(where)["direction"])))
    assert is_independent_of_values(trace, algorithm, where, terms)
    assert trace_terms(algorithm, where, replace(terms, constant_products=())) is None


@dataclass(frozen=True)
class Decides(Algorithm):
    def terms(self, client: Client) -> Mapping[str, Number]:
        return {"drift": 1.0 if bool(client.step > 2) else 0.0}


@dataclass(frozen=True)
class Bends(Algorithm):
    def terms(self, client: Client) -> Mapping[str, Number]:
        return {"drift": torch.sin(client.inner("drift", "drift"))}


@dataclass(frozen=True)
class Looks(Algorithm):
    def terms(self, client: Client) -> Mapping[str, Number]:
        return {"drift": client.step * client.notes["anchor"].sum(1, keepdim=True)}


@pytest.mark.parametrize("algorithm", [Decides(), Bends(), Looks()], ids=str)
def test_what_cannot_be_heard_has_no_recipe(algorithm: Algorithm) -> None:
    assert trace_terms(algorithm, client(), PAIRS) is None


@dataclass(frozen=True)
class Peeks(FedGG):
    """By what a row holds, its terms are others; in the numbers themselves nothing shows it."""

    def terms(self, client: Client) -> dict[str, Number]:
        return super().terms(client) if bool(client.notes["direction"].any()) else {"drift": 0.0}


@dataclass(frozen=True)
class Tells(FedGG):
    def diagnostics(self, w: Tensor, client: Client) -> dict[str, Tensor]:
        return super().diagnostics(w, client) if float(client.round) > 2 else {}


@pytest.mark.parametrize("algorithm", [*READINGS, Peeks(mu=0.3), Tells(mu=0.3)], ids=str)
def test_only_what_never_looks_at_numbers_is_always_the_same(algorithm: Algorithm) -> None:
    where = client(w=torch.zeros(1, 9))
    trace = trace_terms(algorithm, where, PAIRS)
    assert trace is not None
    assert is_independent_of_values(trace, algorithm, where, PAIRS) == (type(algorithm) in (FedGG, FedProx, FedAvg))
