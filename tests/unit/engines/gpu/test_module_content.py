"""Modules are the same when everything they hold is: what differs, printed or not, is found."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedgg.engines.gpu.same_architecture import varying_tensors


@dataclass
class Settings:
    slope: float


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


class Seeded(random.Random):
    pass


class Holder(nn.Module):
    def __init__(self, thing: Any):
        super().__init__()
        self.inner, self.thing = nn.Linear(2, 2), thing


def closure(value: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * value


def hooked(value: float, with_kwargs: int = 0) -> nn.Module:
    module = Holder(None)
    for number in range(2):
        module.inner.register_forward_hook(
            (lambda m, a, k, o: o * value) if number == with_kwargs else (lambda m, a, o: o * value),
            with_kwargs=number == with_kwargs,
        )
    return module


def shared(one: bool) -> nn.Module:
    part = nn.Linear(2, 2)
    return nn.Sequential(part, part if one else nn.Linear(2, 2))


def aliased(one: bool) -> nn.Module:
    numbers = [1, 2]
    return Holder({"a": numbers, "b": numbers if one else [1, 2]})


SAME: list[Callable[[], nn.Module]] = [
    lambda: Holder(0.5),
    lambda: Holder(float("nan")),
    lambda: Holder({"a": [1, (2, "x", None)], "b": {3, 4}}),
    lambda: Holder(Settings(0.5)),
    lambda: Holder(np.arange(3.0)),
    lambda: Holder(np.float32(0.5)),
    lambda: Holder(torch.tensor([1.0, float("nan")])),
    lambda: Holder(torch.nn.functional.relu),
    lambda: Holder(closure(2.0)),
    lambda: Holder(functools.partial(torch.mul, other=2.0)),
    lambda: Holder(torch.float32),
    lambda: hooked(2.0),
    lambda: shared(True),
    lambda: aliased(True),
    lambda: nn.TransformerEncoderLayer(4, 2, 8),
]
DIFFERENT: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = [
    (lambda: nn.Tanh(), lambda: nn.ReLU()),
    (lambda: Holder(0.5), lambda: Holder(0.25)),
    (lambda: Holder(1), lambda: Holder(1.0)),
    (lambda: Holder(1), lambda: Holder(True)),
    (lambda: Holder(0.0), lambda: Holder(-0.0)),
    (lambda: Holder({"a": [1, (2,)]}), lambda: Holder({"a": [1, (3,)]})),
    (lambda: Holder({"a": 1, "b": 2}), lambda: Holder({"b": 2, "a": 1})),
    (lambda: Holder(Settings(0.5)), lambda: Holder(Settings(0.25))),
    (lambda: Holder(np.arange(3.0)), lambda: Holder(np.arange(3.0) + 1)),
    (lambda: Holder(torch.ones(2)), lambda: Holder(torch.zeros(2))),
    (lambda: Holder(torch.ones(2)), lambda: Holder(torch.ones(2, dtype=torch.float64))),
    (lambda: Holder(closure(2.0)), lambda: Holder(closure(3.0))),
    (lambda: Holder(closure(torch.ones(2))), lambda: Holder(closure(torch.zeros(2)))),
    (lambda: Holder(functools.partial(torch.mul, other=2.0)), lambda: Holder(functools.partial(torch.mul, other=3.0))),
    (lambda: hooked(2.0), lambda: hooked(3.0)),
    (lambda: hooked(2.0), lambda: Holder(None)),
    (lambda: hooked(2.0, 0), lambda: hooked(2.0, 1)),
    (lambda: shared(True), lambda: shared(False)),
    (lambda: aliased(True), lambda: aliased(False)),
    (lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2).requires_grad_(False)),
    (lambda: nn.Linear(2, 3), lambda: nn.Linear(3, 2)),
    (lambda: nn.LeakyReLU(0.1), lambda: nn.LeakyReLU(0.2)),
]
UNKNOWN: list[Callable[[], nn.Module]] = [  # equal, perhaps: it cannot be said
    lambda: Holder(Slots(1)),
    lambda: Holder(Seeded(1)),
    lambda: Holder(torch.Generator().manual_seed(1)),
    lambda: Holder(iter([1, 2])),
    lambda: Holder(object()),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),  # a class of its own
]


@pytest.mark.parametrize("make", SAME, ids=range(len(SAME)))
def test_these_are_the_same_whatever_their_weights(make: Callable[[], nn.Module]) -> None:
    a, b = make(), make()
    assert varying_tensors(a, b) == frozenset()
    assert varying_tensors(a, b.eval()) == frozenset()  # modes are set whenever a model is run


@pytest.mark.parametrize("pair", DIFFERENT, ids=range(len(DIFFERENT)))
def test_these_are_not(pair: tuple[Callable[[], nn.Module], Callable[[], nn.Module]]) -> None:
    a, b = (make() for make in pair)
    assert varying_tensors(a, b) is None
    assert varying_tensors(b, a) is None


@pytest.mark.parametrize("make", UNKNOWN, ids=range(len(UNKNOWN)))
def test_what_cannot_be_compared_counts_as_different(make: Callable[[], nn.Module]) -> None:
    assert varying_tensors(make(), make()) is None


def test_frozen_parameters_and_buffers_that_differ_are_named() -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
        module[0].weight.requires_grad_(False)
        module.register_buffer("constant", torch.ones(2))
        module.register_buffer("drawn", torch.rand(2), persistent=False)
        return module

    assert varying_tensors(make(), make()) == frozenset({"0.weight", "drawn"})
