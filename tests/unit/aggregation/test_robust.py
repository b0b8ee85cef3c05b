"""Robust rules: worked by hand, and what a minority can do to them."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from messages import rows, sent

from fedgg.aggregation import CoordinateMedian, NormClip, TrimmedMean
from fedgg.core.server import Collector
from fedgg.errors import UserError

ANY = st.floats(-1e300, 1e300)


def one(rule: Collector, *clients: list[float]) -> list[float]:
    """The row that everybody is said to have sent."""
    seen, share = rule.collect(sent({"delta": rows(*clients)}, [0.9, *[0.1 / (len(clients) - 1)] * (len(clients) - 1)]))
    assert share.tolist() == [[1 / len(clients)]] * len(clients), "clients count the same"
    assert all(torch.equal(row, seen["delta"][0]) for row in seen["delta"])
    return list(seen["delta"][0].tolist())


def test_median_by_hand() -> None:
    assert one(CoordinateMedian(), [1, 9], [2, 8], [100, -100]) == [2, 8]
    assert one(CoordinateMedian(), [1, 9], [2, 8], [4, 5], [100, -100]) == [3, 6.5]
    assert one(CoordinateMedian(), [1.7e308], [1.7e308]) == [1.7e308]


def test_trimmed_mean_by_hand() -> None:
    clients = [[1.0], [2.0], [3.0], [5.0], [1000.0]]
    assert one(TrimmedMean(0.2), *clients) == pytest.approx([10 / 3])
    assert one(TrimmedMean(0.4), *clients) == [3]
    assert one(TrimmedMean(0.19), *clients) == pytest.approx([1011 / 5])
    assert one(TrimmedMean(0.0), *clients) == pytest.approx([1011 / 5])
    assert one(TrimmedMean(0.29), *[[float(i)] for i in range(100)], [49.5]) == pytest.approx([49.5])


def test_a_hundred_clients_lose_as_many_as_said() -> None:
    """29 of 100, although 0.29 * 100 is less than 29 in binary: of the last 29, one would shift the mean."""
    clients = [[0.0]] * 71 + [[1.0]] * 29
    assert one(TrimmedMean(0.29), *clients) == [0.0]


def test_norm_clip_by_hand() -> None:
    up = {"delta": rows([3, 4], [0, 1], [0, 2])}
    seen, share = NormClip(clip=1.0).collect(sent(up, [0.5, 0.3, 0.2]))
    assert torch.allclose(seen["delta"], rows([0.6, 0.8], [0, 1], [0, 1]))
    assert share.tolist() == [[0.5], [0.3], [0.2]]
    seen, _ = NormClip(clip=None).collect(sent(up))
    assert torch.allclose(seen["delta"], rows([1.2, 1.6], [0, 1], [0, 2]))


def test_norm_clip_bounds_each_entry_by_itself() -> None:
    """A short variate leaves no room for a long update."""
    up = {"delta": rows([100, 0], [1, 0], [0, 1]), "variate_change": rows([0, 0], [70, 0], [0, 70])}
    seen, _ = NormClip(clip=None).collect(sent(up))
    assert torch.allclose(seen["delta"], rows([1, 0], [1, 0], [0, 1]))
    assert torch.equal(seen["variate_change"], up["variate_change"])


def test_norm_clip_within_the_bound_changes_no_bit() -> None:
    up = {"delta": torch.randn(5, 33, generator=torch.Generator().manual_seed(0))}
    seen, _ = NormClip(clip=1e9).collect(sent(up))
    assert torch.equal(seen["delta"], up["delta"])


def test_norm_clip_refuses_numbers_and_the_others_take_them() -> None:
    up = {"delta": rows([1, 2], [3, 4], [5, 6]), "worth": rows([1], [5], [3])}
    with pytest.raises(UserError, match=r"'worth' of size 1: take a rule that also applies to single numbers"):
        NormClip(1.0).check(up, 2)
    for rule in (CoordinateMedian(), TrimmedMean(0.4)):
        rule.check(up, 2)
        seen, _ = rule.collect(sent(up))
        assert seen["worth"].tolist() == [[3]] * 3


@st.composite
def federations(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]]]:
    """Honest clients near each other, and fewer bad ones that send whatever they like."""
    honest = draw(st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=2), min_size=2, max_size=7))
    bad = draw(st.lists(st.lists(ANY, min_size=2, max_size=2), max_size=len(honest) - 1))
    return honest, bad


@settings(deadline=None, max_examples=200)
@given(federations(), st.randoms(use_true_random=False))
@example(([[0.0, 5e-324], [0.0, 5e-324]], []), random.Random(0))
def test_a_minority_cannot_move_the_median_beyond_the_honest(
    federation: tuple[list[list[float]], list[list[float]]], chance: object
) -> None:
    honest, bad = federation
    clients = [*honest, *bad]
    chance.shuffle(clients)  # type: ignore[attr-defined]
    seen, _ = CoordinateMedian().collect(sent({"delta": rows(*clients)}))
    good = rows(*honest)
    assert bool((seen["delta"][0] >= good.amin(0)).all())
    assert bool((seen["delta"][0] <= good.amax(0)).all())


@settings(deadline=None, max_examples=200)
@given(federations())
def test_nor_a_trimmed_mean_that_cuts_as_many_as_there_are_bad_ones(
    federation: tuple[list[list[float]], list[list[float]]],
) -> None:
    honest, bad = federation
    clients = [*honest, *bad]
    seen, _ = TrimmedMean(len(bad) / len(clients)).collect(sent({"delta": rows(*clients)}))
    good, slack = rows(*honest), 1e-12
    assert bool((seen["delta"][0] >= good.amin(0) - slack).all())
    assert bool((seen["delta"][0] <= good.amax(0) + slack).all())


@settings(deadline=None, max_examples=200)
@given(federations())
def test_under_norm_clip_nobody_is_longer_than_an_honest_client(
    federation: tuple[list[list[float]], list[list[float]]],
) -> None:
    honest, bad = federation
    clients = [*honest, *([max(-1e100, min(1e100, x)) for x in client] for client in bad)]
    seen, _ = NormClip(None).collect(sent({"delta": rows(*clients)}))
    longest = float(rows(*honest).norm(dim=1).max())
    assert float(seen["delta"].norm(dim=1).max()) <= longest * (1 + 1e-12)
