"""Attackers: who they are, and what reaches the server of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from messages import rows

from fedgg.aggregation import Attack
from fedgg.core.local import LocalEnd
from fedgg.core.server import Lost, healthy


def end(delta: list[float]) -> LocalEnd:
    up = {"delta": rows(delta), "worth": rows([3.0])}
    return LocalEnd(up, {"kept": rows(delta)}, {}, {}, torch.zeros(1, 1))


ENDS: dict[int, LocalEnd | Lost] = {0: end([1, 2]), 1: end([3, 4]), 2: Lost(2, "gone")}


def test_the_attackers_are_a_function_of_the_seed() -> None:
    one = Attack.draw("nan", 1.0, 3, np.arange(10), seed=4)
    assert len(one.clients) == 3
    assert one.clients <= set(range(10))
    assert Attack.draw("noise", 2.0, 3, np.arange(10), seed=4).clients == one.clients
    assert len({Attack.draw("nan", 1.0, 3, np.arange(10), seed=seed).clients for seed in range(8)}) > 4


def test_sign_flip() -> None:
    seen = Attack("sign_flip", 10.0, frozenset([1, 2]), 0).act(ENDS, 0)
    assert seen[0] is ENDS[0]
    assert seen[2] is ENDS[2]
    flipped = seen[1]
    assert isinstance(flipped, LocalEnd)
    assert flipped.up["delta"].tolist() == [[-30, -40]]
    assert flipped.up["worth"].tolist() == [[3]]
    assert flipped.memory["kept"].tolist() == [[3, 4]]
    assert ENDS[1].up["delta"].tolist() == [[3, 4]], "the client's own stays as it is"  # type: ignore[union-attr]


def test_noise_has_the_size_asked_for_and_repeats() -> None:
    attack = Attack("noise", 0.5, frozenset([1]), 0)
    honest = {1: end([7.0] * 20_000)}
    first, again, later = (attack.act(honest, number)[1] for number in (3, 3, 4))
    assert isinstance(first, LocalEnd)
    assert isinstance(again, LocalEnd)
    assert isinstance(later, LocalEnd)
    assert float(first.up["delta"].std()) == pytest.approx(0.5, rel=0.03)
    assert abs(float(first.up["delta"].mean())) < 0.02
    assert torch.equal(first.up["delta"], again.up["delta"])
    assert not torch.equal(first.up["delta"], later.up["delta"])


def test_nan_is_left_out_by_the_guard_and_named() -> None:
    kept, lost = healthy(Attack("nan", 1.0, frozenset([0]), 0).act(ENDS, 0), lambda client: {})
    assert list(kept) == [1]
    assert {gone.client: gone.why for gone in lost} == {0: "not finite: delta, worth", 2: "gone"}
