"""The splits: each against its definition, the same seed gives the same split, and examples are neither lost nor shared
except where the split says so."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgg.core.random_choices import stream
from fedgg.data import SPLITS
from fedgg.data.partition import Indices, Partition, partition
from fedgg.errors import UserError

DRAWN = sorted(set(SPLITS) - {"given", "domains"})
ONCE = sorted(set(DRAWN) - {"dirichlet_repeated"})  # every example goes to exactly one client


def balanced_labels(examples: int, classes: int) -> Indices:
    return stream(7, "test labels").permutation(np.arange(examples) % classes).astype(np.int64)


def skew(split: Partition, labels: Indices, classes: int) -> float:
    """Mean share of a client's biggest class: 1 / classes when even, 1 when each client holds one class."""
    counts = split.counts(labels, classes)
    return float(np.mean(counts.max(axis=1) / counts.sum(axis=1)))


@settings(max_examples=150, deadline=None)
@given(
    scheme=st.sampled_from(ONCE),
    labels=st.lists(st.integers(-2, 6), min_size=8, max_size=150),
    clients=st.integers(1, 8),
    seed=st.integers(0, 2**32),
    beta=st.sampled_from([1e-3, 0.05, 0.5, 5.0, 1e6]),
)
def test_every_example_goes_to_exactly_one_client(
    scheme: str, labels: list[int], clients: int, seed: int, beta: float
) -> None:
    try:
        split = partition(
            scheme,
            np.array(labels, dtype=np.int64),
            clients,
            seed,
            beta=beta,
            min_examples=0,
            shards_per_client=1,
            labels_per_client=1,
            allow_empty=True,
        )
    except UserError:
        # At tiny beta `dirichlet` can find all clients full; one label a client may be less than there are labels.
        assert scheme == "dirichlet" or (scheme == "k_labels" and clients < len(set(labels)))
        return
    assert len(split.indices) == clients
    assert np.array_equal(np.sort(np.concatenate(split.indices)), np.arange(len(labels)))
    for held in split.indices:
        assert held.dtype == np.int64
        assert (np.diff(held) > 0).all()


@pytest.mark.parametrize("scheme", DRAWN)
def test_the_seed_alone_decides(scheme: str) -> None:
    labels = balanced_labels(1000, 10)
    first, again, other = (partition(scheme, labels, 10, seed) for seed in (3, 3, 4))
    assert first.hash() == again.hash()
    assert first.hash() != other.hash()
    assert first.sizes.min() >= 10
    assert first.sizes.sum() == 1000


def test_earlier_splits_keep_their_hashes() -> None:
    labels = balanced_labels(1000, 10)
    hashes = {
        "dirichlet": "94202559ceebc0f0",
        "dirichlet_unbalanced": "663f1ec0e8a8dd82",
        "dirichlet_client": "d3971813fde66836",
        "iid": "5e228d5790233cda",
        "shards": "0c3c35833a31ffdd",
    }
    drawn = {scheme: partition(scheme, labels, 7, 1, beta=0.3, min_examples=1).hash()[:16] for scheme in hashes}
    assert drawn == hashes
    assert partition("given", labels, 10, 3, owners=labels).hash()[:16] == "c87c10f8d436f2ae"


def test_hash_sees_order_and_boundaries() -> None:
    def of(*clients: list[int]) -> str:
        sizes = np.array([len(held) for held in clients])
        return Partition("iid", tuple(np.array(held, dtype=np.int64) for held in clients), sizes).hash()

    assert len({of([0, 1], [2]), of([0], [1, 2]), of([2], [0, 1]), of([0, 1, 2]), of([0, 1, 2], [])}) == 5


def test_counts_by_hand() -> None:
    labels = np.array([1, 0, 0, 1, 2])
    split = partition("mine", labels, 2, 0, function=lambda: [[0, 3], [1, 2, 4]])
    assert split.counts(labels, 4).tolist() == [[0, 2, 0, 0], [2, 0, 1, 0]]
    assert split.sizes.tolist() == [2, 3]


@pytest.mark.parametrize("scheme", ["iid", "dirichlet_client"])
def test_equal_sizes(scheme: str) -> None:
    sizes = partition(scheme, balanced_labels(1003, 10), 10, 0, beta=0.1).sizes
    assert sizes.max() - sizes.min() <= 1


def test_dirichlet_client_follows_its_own_distribution() -> None:
    labels = balanced_labels(100_000, 5)
    split = partition("dirichlet_client", labels, 40, 1, beta=1.0)
    wanted = stream(1, "partition", 0).dirichlet(np.ones(5), size=40)
    got = split.counts(labels, 5) / split.sizes[:, None]
    # Forty clients ask for roughly what there is; what runs out first moves a little mass elsewhere.
    assert np.abs(got - wanted).mean() < 0.05
    assert np.corrcoef(got.ravel(), wanted.ravel())[0, 1] > 0.95


def test_dirichlet_client_favours_nobody_when_a_class_runs_out() -> None:
    labels = np.repeat([0, 1], [50, 950]).astype(np.int64)
    rare = [partition("dirichlet_client", labels, 10, seed, beta=100.0).counts(labels, 2)[:, 0] for seed in range(40)]
    by_client = np.mean(rare, axis=0)
    assert by_client.sum() == pytest.approx(50)
    assert by_client.max() < 7
    assert by_client.min() > 3


@pytest.mark.parametrize("scheme", ["dirichlet", "dirichlet_unbalanced", "dirichlet_client"])
def test_smaller_beta_is_more_skewed(scheme: str) -> None:
    labels = balanced_labels(5000, 10)
    skews = [
        np.mean([skew(partition(scheme, labels, 10, seed, beta=beta, min_examples=1), labels, 10) for seed in range(3)])
        for beta in (0.1, 1.0, 100.0)
    ]
    assert skews[0] > skews[1] + 0.1
    assert skews[1] > skews[2] + 0.1


def test_zeroing_full_clients_balances_sizes() -> None:
    labels = balanced_labels(5000, 10)
    spread = {
        scheme: np.mean([partition(scheme, labels, 10, seed, beta=0.3).sizes.std() for seed in range(5)])
        for scheme in ("dirichlet", "dirichlet_unbalanced")
    }
    assert spread["dirichlet"] < 0.8 * spread["dirichlet_unbalanced"]


def test_shards_hold_few_classes() -> None:
    labels = balanced_labels(2000, 10)
    split = partition("shards", labels, 10, 0)
    assert (split.sizes == 200).all()
    assert ((split.counts(labels, 10) > 0).sum(axis=1) <= 2).all()


def test_seventy_five_thousand_examples_are_dealt_quickly() -> None:
    labels = balanced_labels(75_000, 100)
    started = time.perf_counter()
    partition("dirichlet_client", labels, 100, 0, beta=0.1)
    assert time.perf_counter() - started < 3.0


def advice(labels: Indices, clients: int, beta: float, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        partition("dirichlet_unbalanced", labels, clients, 0, beta=beta, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_beta_is_no_advice_where_sizes_do_not_depend_on_it() -> None:
    labels = balanced_labels(200, 2)
    with pytest.raises(UserError, match=r"with sizes=square over 10 clients .*; take fewer clients, or"):
        partition("quantity", labels, 10, 0, beta=0.5, sizes="square")
    with pytest.raises(UserError, match=r"with beta=0.1, sizes=dirichlet .*; take a larger beta, fewer clients, or"):
        partition("quantity", labels, 10, 0, beta=0.1, sizes="dirichlet")


def test_retries_end_with_advice_that_helps() -> None:
    labels = balanced_labels(200, 2)
    message = advice(labels, 20, 0.01)
    for part in ("dirichlet_unbalanced", "beta=0.01", "20 clients", "10 examples", "had 0", "a larger beta"):
        assert part in message
    assert message.endswith("let clients have no examples: split.min_examples = 0 with split.allow_empty = true")
    partition("dirichlet_unbalanced", labels, 20, 0, beta=0.01, min_examples=0, allow_empty=True)

    message = advice(labels, 20, 0.01, min_examples=0)
    assert "every client an example" in message
    assert message.endswith("or let clients have no examples: split.allow_empty = true")  # nothing is below 0

    message = advice(labels, 5, 0.5, min_examples=40)
    fewer = int(re.fullmatch(r".*fewer clients, or split.min_examples = (\d+)", message)[1])  # type: ignore[index]
    assert fewer < 40
    partition("dirichlet_unbalanced", labels, 5, 0, beta=0.5, min_examples=fewer)


def test_a_client_is_empty_only_where_allowed() -> None:
    labels = balanced_labels(60, 2)
    split = partition("dirichlet_unbalanced", labels, 12, 0, beta=0.02, min_examples=0, allow_empty=True)
    assert split.sizes.min() == 0
    with pytest.raises(UserError, match="every client an example"):
        partition("dirichlet_unbalanced", labels, 12, 0, beta=0.02, min_examples=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scheme": "dirichlet2"}, "unknown split 'dirichlet2'"),
        ({"beta": 0.0}, "beta=0.0"),
        ({"beta": -1.0}, "beta=-1.0"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"beta": float("inf")}, "beta=inf"),
        ({"clients": 0}, "clients=0"),
        ({"clients": 101, "min_examples": 0}, "clients=101"),
        ({"min_examples": 11}, "min_examples=11"),
        ({"min_examples": -1}, "min_examples=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"labels": np.zeros((100, 1), dtype=np.int64)}, "'dirichlet' goes by class labels"),
        (
            {"labels": np.zeros(100)},
            "float64 of shape (100,), not one class for each example: take one of iid, quantity",
        ),
        (
            {"scheme": "k_labels", "labels_per_client": 11},
            "split.labels_per_client = 11 does not suit 10 labels; give 1 to 10",
        ),
        ({"scheme": "k_labels", "labels_per_client": 0}, "split.labels_per_client = 0"),
        ({"scheme": "k_labels", "labels_per_client": 2, "clients": 4}, "cover 8 of 10 labels; give at least 3"),
        ({"scheme": "quantity", "sizes": "exponential"}, "fewer clients, or let clients have no examples"),
        ({"scheme": "shards", "shards_per_client": 11}, "shards_per_client=11"),
        ({"scheme": "shards", "shards_per_client": 0}, "shards_per_client=0"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"scheme": "dirichlet", "labels": balanced_labels(100, 10), "clients": 10, "seed": 0}
    with pytest.raises(UserError) as caught:
        partition(**(arguments | changes))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_beta_is_not_asked_of_schemes_without_it() -> None:
    assert partition("iid", balanced_labels(100, 10), 10, 0, beta=0.0).sizes.tolist() == [10] * 10


def test_a_split_that_is_given() -> None:
    owners = np.array([2, 0, 2, 1, 0, 2])
    labels = np.zeros(6, np.int64)
    split = partition("given", labels, 3, 0, owners=owners)
    assert [held.tolist() for held in split.indices] == [[1, 4], [3], [0, 2, 5]]
    assert split.scheme == "given"
    with pytest.raises(UserError, match=r"the data name 3 clients, and split\.clients = 10: set it to 3, or choose"):
        partition("given", np.zeros(20, np.int64), 10, 0, owners=owners)
    with pytest.raises(UserError, match="needs data that name their clients"):
        partition("given", labels, 3, 0)


def test_a_users_split_is_checked_as_those_of_the_library() -> None:
    labels = balanced_labels(20, 2)

    def split_by(result: Any, clients: int = 2, **settings: Any) -> Partition:
        return partition("mine.py:split", labels, clients, 0, function=lambda labels, clients: result, **settings)

    expected = [list(range(12)), list(range(12, 20))]
    owners = np.repeat([0, 1], [12, 8])
    right: list[Any] = [expected, tuple(map(np.array, expected)), [expected[0][::-1], expected[1]], owners]
    for result in right:
        assert [held.tolist() for held in split_by(result).indices] == expected
    assert split_by([range(20), []], allow_empty=True).sizes.tolist() == [20, 0]
    refused: list[tuple[Any, str]] = [
        (None, "returned a NoneType"),
        ({0: [1]}, "returned a dict"),
        (expected[:1], "examples of 1 clients, and split.clients = 2"),
        ([[0], [0, *range(1, 20)]], "gives example 0 2 times"),
        ([[0], range(2, 20)], "gives example 1 to no client"),
        ([[0], range(1, 21)], "from 0 to 19"),
        ([[-1], range(1, 20)], "from 0 to 19"),
        ([[0.5], range(1, 20)], "a list of example numbers"),
        ([["a"], range(1, 20)], "a list of example numbers"),
        ([range(20), []], "client 1 no examples"),
        (owners[1:], "the client of each of the 20 examples"),
        (owners + 1, "gives example 12 to client 2"),
        (owners - 1, "gives example 0 to client -1"),
        (owners * 1.0, "returned float64"),
    ]
    for wrong, words in refused:
        with pytest.raises(UserError) as caught:
            split_by(wrong)
        assert words in str(caught.value)


def test_a_users_split_that_draws_is_drawn_until_clients_are_large_enough() -> None:
    labels, sizes = balanced_labels(40, 2), list[int]()

    def split(labels: Indices, clients: int, rng: np.random.Generator, least: int) -> Indices:
        sizes.append(int(rng.integers(1, 20)))
        return np.repeat([0, 1], [40 - sizes[-1], sizes[-1]])

    smallest = partition("mine.py:split", labels, 2, 0, function=split, min_examples=15, least=3, beta=0.5).sizes.min()
    assert len(sizes) > 1
    assert all(size < 15 for size in sizes[:-1])
    assert smallest == sizes[-1] >= 15


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 7), min_size=30, max_size=120),
    clients=st.integers(1, 10),
    labels_per_client=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_k_labels_against_its_definition(labels: list[int], clients: int, labels_per_client: int, seed: int) -> None:
    """Client i has label i mod K and others; every label has a client; a label's examples are cut evenly."""
    targets, kinds = np.array(labels), sorted(set(labels))
    if labels_per_client > len(kinds) or clients * labels_per_client < len(kinds):
        return
    split = partition(
        "k_labels", targets, clients, seed, labels_per_client=labels_per_client, min_examples=0, allow_empty=True
    )
    assert np.array_equal(np.sort(np.concatenate(split.indices)), np.arange(len(labels)))
    counts = split.counts(targets, 8)[:, kinds]
    enough = counts.sum(axis=0) >= clients  # of a rarer label a client may get no example
    assert ((counts > 0).sum(axis=1) <= labels_per_client).all()
    if enough.all():
        assert ((counts > 0).sum(axis=1) == labels_per_client).all()
        assert all(counts[client, client % len(kinds)] for client in range(clients))
    for column in counts.T[enough]:
        held = column[column > 0]
        assert held.max() - held.min() <= 1


def test_other_labels_of_a_client_are_drawn_uniformly() -> None:
    """As NIID-Bench draws them where there are at least as many clients as labels."""
    labels, times = balanced_labels(500, 5), np.zeros(5)
    for seed in range(300):
        times += partition("k_labels", labels, 5, seed, labels_per_client=2).counts(labels, 5)[0] > 0
    assert times[0] == 300
    assert np.abs(times[1:] - 75).max() < 4 * np.sqrt(300 * 0.25 * 0.75)


def test_quantity_by_dirichlet_is_niid_benchs() -> None:
    """The cut of a shuffled range at the cumulated proportions, with the same draws."""
    split = partition("quantity", np.zeros(2000), 8, 5, beta=0.5, min_examples=0, allow_empty=True)
    rng = stream(5, "partition", 0)
    proportions = rng.dirichlet(np.repeat(0.5, 8))
    cuts = (np.cumsum(proportions) * 2000).astype(int)[:-1]
    expected = np.split(rng.permutation(2000), cuts)
    assert [held.tolist() for held in split.indices] == [sorted(held.tolist()) for held in expected]


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [("linear", [1, 2, 3, 4]), ("square", [1, 4, 9, 16]), ("exponential", np.exp([1, 2, 3, 4]).tolist())],
)
def test_quantity_by_formula(sizes: str, weights: list[float]) -> None:
    split = partition("quantity", balanced_labels(6000, 3), 4, 0, sizes=sizes)
    assert np.abs(split.sizes - 6000 * np.array(weights) / sum(weights)).max() <= 1
    shares = split.counts(balanced_labels(6000, 3), 3) / split.sizes[:, None]
    assert np.abs(shares - 1 / 3).max() < 0.1  # all clients have the same labels, up to chance


def test_each_client_has_one_domain() -> None:
    domains = stream(0, "domains").integers(0, 3, 400)
    split = partition("domains", np.zeros((400, 2)), 7, 0, owners=domains)
    assert np.array_equal(np.sort(np.concatenate(split.indices)), np.arange(400))
    for client, held in enumerate(split.indices):
        assert set(domains[held]) == {client % 3}
    for domain in range(3):
        sizes = split.sizes[domain::3]
        assert sizes.max() - sizes.min() <= 1
    with pytest.raises(UserError, match=r"3 domains, and split\.clients = 2: set at least 3"):
        partition("domains", np.zeros(400), 2, 0, owners=domains)
    with pytest.raises(UserError, match="needs data that name their domains"):
        partition("domains", np.zeros(400), 2, 0)


def test_clients_are_chosen_among_those_of_the_data() -> None:
    owners = np.repeat(np.arange(6), [5, 40, 12, 30, 3, 30])
    labels = np.zeros(len(owners), np.int64)

    def chosen(how: str, clients: int, seed: int = 0, **changes: Any) -> list[int]:
        split = partition("given", labels, clients, seed, owners=owners, choose=how, **changes)
        for held in split.indices:  # all examples of one client of the data
            assert held.tolist() == np.flatnonzero(owners == owners[held[0]]).tolist()
        return [int(owners[held[0]]) for held in split.indices]

    assert chosen("largest", 3) == [1, 3, 5]
    assert chosen("largest", 2) == [1, 3]  # of equal ones the first
    drawn = [chosen("random", 2, seed) for seed in range(60)]
    assert {client for pair in drawn for client in pair} == {1, 2, 3, 5}  # those with min_examples = 10
    assert all(pair == sorted(pair) for pair in drawn)
    assert drawn[0] == chosen("random", 2, 0)
    assert chosen("random", 6, min_examples=3) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(
        UserError, match=r"4 of the data's clients have split\.min_examples = 10, and split\.clients = 5"
    ):
        chosen("random", 5)


def repeated_by_the_book(labels: Indices, clients: int, beta: float, rng: np.random.Generator) -> list[list[int]]:
    """What FL-Simulator does, written down with a list for each class and a dictionary of clients that have room."""
    kinds = np.unique(labels)
    stock = {kind: rng.permutation(np.flatnonzero(labels == kind)).tolist() for kind in kinds}
    priors = rng.dirichlet([beta] * len(kinds), size=clients)
    left = {kind: list(numbers) for kind, numbers in stock.items()}
    base, extra = divmod(len(labels), clients)
    room = {client: base + (client < extra) for client in range(clients)}
    hands: list[list[int]] = [[] for _ in range(clients)]
    turns = rng.random(len(labels))
    order = list(range(clients))
    for turn in turns:
        client = order[int(turn * len(order))]
        while True:
            kind = kinds[np.searchsorted(np.cumsum(priors[client]) / priors[client].sum(), rng.random(), side="right")]
            if left[kind]:
                break
            left[kind] = list(stock[kind])  # and the class is drawn again
        hands[client].append(left[kind].pop())
        room[client] -= 1
        if not room[client]:
            order[order.index(client)] = order[-1]
            order.pop()
    return hands


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_dirichlet_with_repetition_against_a_transcription(beta: float) -> None:
    labels = balanced_labels(603, 6)
    split = partition("dirichlet_repeated", labels, 10, 4, beta=beta)
    expected = repeated_by_the_book(labels, 10, beta, stream(4, "partition", 0))
    assert [held.tolist() for held in split.indices] == [sorted(hand) for hand in expected]
    assert split.repeats
    assert split.sizes.tolist() == [61] * 3 + [60] * 7
    times = np.bincount(np.concatenate(split.indices), minlength=603)
    assert times.max() > 1
    assert times.min() == 0  # as often as one repeats, another is held by no client


@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=8, max_size=80),
    clients=st.integers(1, 8),
    seed=st.integers(0, 2**32),
    beta=st.sampled_from([1e-3, 0.1, 10.0]),
)
def test_repetition_ends_and_uses_a_class_before_it_repeats(
    labels: list[int], clients: int, seed: int, beta: float
) -> None:
    targets = np.array(labels)
    split = partition("dirichlet_repeated", targets, clients, seed, beta=beta, min_examples=0)
    assert split.sizes.sum() == len(labels)
    assert split.sizes.max() - split.sizes.min() <= 1
    times = np.bincount(np.concatenate(split.indices), minlength=len(labels))
    for kind in set(labels):
        of_kind = times[targets == kind]
        assert of_kind.max() - of_kind.min() <= 1
