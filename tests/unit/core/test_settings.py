"""Settings are checked where an algorithm is made, in Python as in an experiment's file."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_type_hints

import pytest
import torch

import fedgg
from fedgg.algorithms import ALGORITHMS, FedExP, FedProx
from fedgg.core.algorithm import Algorithm, Number, setting
from fedgg.errors import UserError
from fedgg.lab.name_resolution import build_algorithm


@dataclass(frozen=True)
class Own(Algorithm):
    """Differs from FedAvg in nothing."""

    scale: Number = setting(1.0, "a number that something is divided by", "ours", positive=True)
    often: int = setting(3, "a whole number", "ours")
    divisor: int = setting(2, "a whole number that something is divided by", "ours", positive=True)
    loud: bool = setting(False, "a switch", "ours")
    kind: Literal["a", "b"] = setting("a", "a choice", "ours")


def wrong_values(kind: type[Algorithm]) -> list[tuple[str, Any]]:
    """For every setting of a class, values that no experiment may have."""
    hints, cases = get_type_hints(kind), []
    for field in fields(kind):
        if hints[field.name] == Number:
            cases += [(field.name, value) for value in (-1, -0.5, math.nan, -math.inf, "much", True, None, [1.0])]
            cases += [(field.name, 0.0)] if field.metadata["positive"] else []
        else:
            cases += [(field.name, "no such word"), (field.name, None), (field.name, 0.5)]
            cases += [(field.name, -1)] if hints[field.name] is int else []
            cases += [(field.name, 0)] if hints[field.name] is int and field.metadata["positive"] else []
    return cases


@pytest.mark.parametrize("kind", [*ALGORITHMS.values(), Own], ids=lambda kind: kind.__name__)
def test_what_an_experiment_refuses_python_refuses(kind: type[Algorithm]) -> None:
    for name, value in wrong_values(kind):
        with pytest.raises(UserError) as caught:
            kind(**{name: value})
        assert f"{kind.__name__}({name}={value!r})" in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(UserError):
            replace(kind(), **{name: value})
        if kind is not Own:
            key = next(key for key, named in ALGORITHMS.items() if named is kind)
            with pytest.raises(UserError, match=rf"algorithm\.{name} = "):
                build_algorithm(key, {name: value})


def test_the_message_says_what_is_allowed() -> None:
    with pytest.raises(UserError, match=r"^FedProx\(mu=-1\): must be a number, zero or more$"):
        FedProx(mu=-1)
    with pytest.raises(UserError, match=r"^Own\(scale=0\): must be a number above zero$"):
        Own(scale=0)
    with pytest.raises(UserError, match=r"^Own\(often=1.5\): must be a whole number$"):
        Own(often=1.5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^Own\(often=-1\): must be a whole number, zero or more$"):
        Own(often=-1)
    with pytest.raises(UserError, match=r"^Own\(divisor=0\): must be a whole number above zero$"):
        Own(divisor=0)
    with pytest.raises(UserError, match=r"^Own\(kind='c'\): choose from a, b$"):
        Own(kind="c")  # type: ignore[arg-type]


def test_columns_are_taken_as_they_are() -> None:
    """Engines make them in every round; nothing of them is read, be they on another device or without numbers."""
    for column in (torch.tensor([[0.1], [0.2]]), torch.empty(3, 1, device="meta")):
        assert FedProx(mu=column).mu is column
        assert replace(Own(), scale=column).scale is column


def test_what_is_right_is_accepted() -> None:
    for kind in ALGORITHMS.values():
        for algorithm in (kind(), kind().neutral()):  # FedExP's has an infinite number
            assert algorithm is None or pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert FedExP(epsilon=math.inf).epsilon == math.inf
    assert Own(scale=1e-300, often=0, divisor=1, loud=True, kind="b") == Own(1e-300, 0, 1, True, "b")


def test_explanations_of_diagnostics_are_sentences_by_name() -> None:
    for texts in (["cosine"], {"cosine": 1}, None):
        with pytest.raises(UserError, match=r"^Odd.diagnostic_texts must be a dict from names of diagnostics"):
            type("Odd", (Algorithm,), {"diagnostic_texts": texts})


def test_names_of_earlier_versions_are_refused_with_the_new_ones() -> None:
    with pytest.raises(UserError, match=r"Old defines readings\(\), which is called diagnostics\(\) now"):
        type("Old", (Algorithm,), {"readings": lambda self, w, site: {}})
    for before, now in (("Site", "Client"), ("Hub", "Server")):
        with pytest.raises(UserError, match=f"fedgg.{before} is called fedgg.{now} now"):
            getattr(fedgg, before)
