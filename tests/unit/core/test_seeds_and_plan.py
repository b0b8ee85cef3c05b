"""Random streams: independent, and the same numbers for ever."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from fedgg.core.random_choices import Work, cohort, schedule, stream, torch_seed, torch_stream

KEYS: list[tuple[int, ...]] = [(), (0,), (0, 0), (0, 0, 0), (1,), (1, 0), (0, 1), (1, 1), (0, 1, 0)]


@pytest.mark.parametrize(("a", "b"), list(combinations(KEYS, 2)), ids=str)
def test_streams_with_different_keys_differ(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """A key of zero is a key: `stream(s, p)`, `stream(s, p, 0)` and `stream(s, p, 0, 0)` are three streams."""
    assert torch_seed(3, "x", *a) != torch_seed(3, "x", *b)
    assert stream(3, "x", *a).random() != stream(3, "x", *b).random()


@settings(deadline=None)
@given(
    st.tuples(st.integers(0, 2**40), st.sampled_from(["batches", "cohort", "model"]), st.integers(0, 99)),
    st.tuples(st.integers(0, 2**40), st.sampled_from(["batches", "cohort", "model"]), st.integers(0, 99)),
)
def test_streams_are_equal_only_where_everything_is(a: tuple[int, str, int], b: tuple[int, str, int]) -> None:
    same = stream(a[0], a[1], a[2]).random() == stream(b[0], b[1], b[2]).random()
    assert same == (a == b)


def test_neighbouring_streams_are_uncorrelated() -> None:
    draws = np.stack([stream(0, "batches", r, c).normal(size=2000) for r in range(5) for c in range(5)])
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlation).max() < 0.12  # 5.4 standard deviations


def test_torch_seeds_fit_torch() -> None:
    for key in range(200):
        torch.Generator().manual_seed(torch_seed(0, "dropout", key))


def test_torch_stream_leaves_the_users_generators_alone() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    with torch_stream(0, "model"):
        first = torch.randn(3)
    with torch_stream(0, "model"):
        assert torch.equal(torch.randn(3), first)
    stream(0, "x").random(10)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]
    assert random.getstate() == before[2]


def test_torch_stream_gives_the_generator_back_after_an_error() -> None:
    before = torch.get_rng_state()
    with suppress(RuntimeError), torch_stream(0, "model"):
        torch.randn(3)
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("batch", [None, 1, 3, 7, 10, 11])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("examples", [1, 7, 10])
def test_every_epoch_shows_every_example_once(batch: int | None, epochs: int, examples: int) -> None:
    work = Work(epochs, batch)
    parts = [row[row >= 0] for row in schedule(0, 1, 2, examples, work)]
    assert len(parts) == work.steps(examples)
    per_epoch = len(parts) // epochs
    for epoch in range(epochs):
        own = parts[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(np.concatenate(own).tolist()) == list(range(examples))
        assert all(len(part) == (batch or examples) for part in own[:-1])


@pytest.mark.parametrize("batch", [None, 1, 3, 7, 10, 11])
@pytest.mark.parametrize("examples", [1, 7, 10])
def test_without_the_last_batch_where_it_is_short(batch: int | None, examples: int) -> None:
    whole, dropping = Work(3, batch), Work(3, batch, drop_last=True)
    size = batch or examples
    parts = [row[row >= 0] for row in schedule(0, 1, 2, examples, dropping)]
    assert len(parts) == dropping.steps(examples) == 3 * max(1, examples // size)
    assert {len(part) for part in parts} == {dropping.last_batch(examples)} == {min(size, examples)}
    assert dropping.examples_trained([examples]) == sum(map(len, parts))
    kept = [row for row in schedule(0, 1, 2, examples, whole) if (row >= 0).all() or examples < size]
    assert np.array_equal(np.array(kept), schedule(0, 1, 2, examples, dropping))  # the same batches, but for short ones
    cycled = Work(1, batch, fixed_steps=3 * max(1, examples // size), drop_last=True)
    assert np.array_equal(schedule(0, 1, 2, examples, cycled), schedule(0, 1, 2, examples, dropping))


def test_batch_order_depends_on_seed_round_and_client_only() -> None:
    def order(seed: int, round_: int, client: int) -> list[int]:
        positions = schedule(seed, round_, client, 30, Work(2, 8))
        return [int(position) for position in positions[positions >= 0]]

    assert order(0, 1, 2) == order(0, 1, 2)
    orders = [order(*key) for key in ((0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 2, 1))]
    assert all(a != b for a, b in combinations(orders, 2))
    assert order(0, 1, 2)[:30] != order(0, 1, 2)[30:]  # a fresh shuffle every epoch


@given(clients=st.integers(1, 30), data=st.data(), seed=st.integers(0, 5), round_=st.integers(0, 5))
def test_cohorts(clients: int, data: st.DataObject, seed: int, round_: int) -> None:
    size = data.draw(st.integers(1, clients))
    chosen = cohort(seed, round_, clients, size)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == size
    assert set(chosen) <= set(range(clients))
    assert chosen == cohort(seed, round_, clients, size)


def test_everybody_is_called_about_equally_often() -> None:
    calls = np.bincount([c for round_ in range(2000) for c in cohort(0, round_, 10, 3)], minlength=10)
    assert calls.sum() == 6000
    assert np.abs(calls - 600).max() < 100


def test_golden_numbers_never_move_silently() -> None:
    """If this fails, every number of the library has changed: say so in CHANGELOG, and take the new values here."""
    assert cohort(7, 3, 10, 4) == GOLDEN_COHORT
    order = schedule(7, 3, 2, 8, Work(1, 3))
    assert order[order >= 0].tolist() == GOLDEN_ORDER
    assert torch_seed(7, "dropout", 1, 2, 3) == GOLDEN_SEED
    assert stream(7, "partition", 1).integers(0, 1000, size=4).tolist() == GOLDEN_DRAWS


GOLDEN_COHORT = [1, 2, 7, 8]
GOLDEN_ORDER = [7, 0, 4, 5, 2, 3, 1, 6]
GOLDEN_SEED = 6514526392481970971
GOLDEN_DRAWS = [180, 728, 699, 99]


@pytest.mark.parametrize("batch", [7, None])
def test_fixed_steps_and_parts_are_the_first_steps_of_longer_work(batch: int | None) -> None:
    examples, key = 25, (3, 5, 2)
    whole = schedule(*key, examples, Work(4, batch))
    fixed = schedule(*key, examples, Work(1, batch, fixed_steps=3))
    assert np.array_equal(fixed, whole[:3])
    part = Work(4, batch, part=0.1)
    assert np.array_equal(schedule(*key, examples, part), whole[: part.steps(examples, *key)])
    assert part.steps(examples) == len(whole)
    assert np.array_equal(schedule(*key, examples, Work(9, batch, fixed_steps=len(whole))), whole)


def test_shares_of_the_work_are_uniform_and_differ_by_round_and_client() -> None:
    work = Work(1, 10, fixed_steps=1000, part=0.25)
    steps = np.array([[work.steps(10, 0, round_, client) for client in range(40)] for round_ in range(40)])
    assert kstest(steps.ravel() / 1000, "uniform", args=(0.25, 0.75)).pvalue > 0.01
    assert len(np.unique(steps[0])) > 30
    assert len(np.unique(steps[:, 0])) > 30
    assert Work(1, 10, fixed_steps=1, part=0.01).steps(10, 0, 0, 0) == 1
