"""Splits of a labelled training set over clients: every example goes to exactly one client.

A split is a function whose parameters are chosen, by name, among `labels` (of the training examples), `clients` (their
number), `rng`, `owners` (the clients that the data name, or None) and settings of the section [split]. It returns the
client of each example as an array `[N]`, or a list with the example numbers of each client. A function with the
parameter `rng` is called again, with another generator, while it returns None or a client has less than `min_examples`.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgg.core.random_choices import stream
from fedgg.data import SPLITS
from fedgg.errors import UserError
from fedgg.registry import accepted_settings

Indices = NDArray[np.int64]
MAX_ATTEMPTS = 1000
OFFERED = ("labels", "clients", "rng", "owners")  # parameters of a split that are not settings


@dataclass(frozen=True, eq=False)
class Partition:
    """One split: the example numbers of every client, each array sorted ascending."""

    scheme: str
    indices: tuple[Indices, ...]
    sizes: Indices  # how many examples each client holds

    def counts(self, labels: Indices, classes: int) -> Indices:
        """How many examples of each class each client holds: [clients, classes]."""
        clients = len(self.indices)
        owners = np.repeat(np.arange(clients), self.sizes)
        cells = owners * classes + labels[np.concatenate(self.indices)]
        return np.bincount(cells, minlength=clients * classes).reshape(clients, classes)

    def hash(self) -> str:
        """SHA-256 of who holds what, the same on every machine; the scheme's name does not enter."""
        digest = hashlib.sha256()
        for held in self.indices:
            # The length comes first, or moving a boundary between two neighbours would keep the hash.
            digest.update(len(held).to_bytes(8, "little"))
            digest.update(held.astype("<i8").tobytes())
        return digest.hexdigest()


def partition(
    scheme: str,
    labels: Indices,
    clients: int,
    seed: int,
    *,
    min_examples: int = 10,
    allow_empty: bool = False,
    owners: Indices | None = None,
    function: Callable[..., Any] | None = None,
    **settings: Any,
) -> Partition:
    """Split the examples over the clients by a registered scheme, or by the user's `function`.

    A split that is drawn is drawn again until every client has `min_examples`. Without `allow_empty` a client has at
    least one example. Settings that the scheme has no parameter for are ignored.
    """
    is_registered = function is None
    if function is None:
        SPLITS.check(scheme)
        function = SPLITS[scheme]
    accepted = accepted_settings(function)
    used = {name: value for name, value in settings.items() if name in accepted}
    _check(labels, clients, seed, min_examples if "rng" in accepted else None, used.get("beta"))
    offered = {"labels": labels, "clients": clients, "owners": owners}
    arguments = {name: value for name, value in offered.items() if name in accepted} | used
    if "rng" not in accepted:
        client_of = _called_once(scheme, function, arguments, len(labels), clients, allow_empty)
    else:
        needed = min_examples if allow_empty else max(min_examples, 1)
        best = -1
        for attempt in range(MAX_ATTEMPTS):
            result = function(**arguments, rng=stream(seed, "partition", attempt))
            if result is None:
                continue
            client_of = result if is_registered else owners_of(scheme, result, len(labels), clients)
            smallest = int(np.bincount(client_of, minlength=clients).min())
            if smallest >= needed:
                break
            best = max(best, smallest)
        else:
            raise UserError(_exhausted(scheme, clients, used, min_examples, best))
    order = np.argsort(client_of, kind="stable")  # so that the examples of each client are sorted
    sizes = np.bincount(client_of, minlength=clients)
    return Partition(scheme, tuple(np.split(order, np.cumsum(sizes)[:-1])), sizes)


def _called_once(
    scheme: str, function: Callable[..., Any], arguments: dict[str, Any], examples: int, clients: int, allow_empty: bool
) -> Indices:
    """A split without randomness, for which there is no smallest size but that clients are not empty."""
    client_of = owners_of(scheme, function(**arguments), examples, clients)
    empty = np.flatnonzero(np.bincount(client_of, minlength=clients) == 0)
    if len(empty) and not allow_empty:
        raise UserError(
            f"split {scheme!r} gives client {empty[0]} no examples: take fewer split.clients, or let clients have no "
            f"examples: split.allow_empty = true"
        )
    return client_of


def owners_of(scheme: str, result: Any, examples: int, clients: int) -> Indices:
    """The client of each example, from what a split returned; UserError unless every example has exactly one."""
    if isinstance(result, np.ndarray):
        if result.shape != (examples,) or result.dtype.kind not in "iu":
            raise UserError(
                f"split {scheme!r} returned {result.dtype} of shape {result.shape}: return the client of each of the "
                f"{examples} examples, or a list with the example numbers of each client"
            )
        if len(wrong := np.flatnonzero((result < 0) | (result >= clients))):
            first = int(wrong[0])
            raise UserError(
                f"split {scheme!r} gives example {first} to client {result[first]}: clients are numbered from 0 to "
                f"{clients - 1}"
            )
        return result.astype(np.int64)
    if not isinstance(result, list | tuple):
        raise UserError(
            f"split {scheme!r} returned a {type(result).__name__}: return an array with the client of each example, or "
            f"a list with the example numbers of each client"
        )
    if len(result) != clients:
        raise UserError(f"split {scheme!r} returned examples of {len(result)} clients, and split.clients = {clients}")
    held = [_example_numbers(scheme, client, numbers, examples) for client, numbers in enumerate(result)]
    times = np.bincount(np.concatenate(held), minlength=examples)
    if len(wrong := np.flatnonzero(times != 1)):
        first = int(wrong[0])
        count = f"{times[first]} times" if times[first] else "to no client"
        raise UserError(f"split {scheme!r} gives example {first} {count}: every example goes to exactly one client")
    drawn = np.empty(examples, dtype=np.int64)
    drawn[np.concatenate(held)] = np.repeat(np.arange(clients), [len(numbers) for numbers in held])
    return drawn


def _example_numbers(scheme: str, client: int, numbers: Any, examples: int) -> Indices:
    try:
        array = np.asarray(numbers)
    except (ValueError, TypeError):
        array = np.empty((0, 0))
    array = array.astype(np.int64) if array.shape == (0,) else array
    if (
        array.ndim != 1
        or array.dtype.kind not in "iu"
        or (len(array) and not 0 <= array.min() <= array.max() < examples)
    ):
        raise UserError(
            f"split {scheme!r}: client {client} must have a list of example numbers from 0 to {examples - 1}"
        )
    return array.astype(np.int64)


def _exhausted(scheme: str, clients: int, settings: dict[str, Any], min_examples: int, best: int) -> str:
    reached = f"the best smallest client had {best}" if best >= 0 else "no attempt gave a whole split"
    shown = " with " + ", ".join(f"{name}={value}" for name, value in settings.items()) if settings else ""
    remedy = "a larger beta, fewer clients" if "beta" in settings else "fewer clients"
    examples = f"{min_examples} examples" if min_examples > 1 else "an example"
    return (
        f"split {scheme!r}{shown} over {clients} clients never gave every client {examples} in {MAX_ATTEMPTS} "
        f"attempts ({reached}); take {remedy}{_smaller_clients(min_examples, best)}"
    )


def _smaller_clients(min_examples: int, best: int) -> str:
    """The way out by accepting smaller clients, where some attempt would have passed."""
    if best < 0:
        return ""
    if best > 0:
        return f", or split.min_examples = {best}"
    also = "split.min_examples = 0 with " if min_examples else ""
    return f", or let clients have no examples: {also}split.allow_empty = true"


def _check(labels: Indices, clients: int, seed: int, min_examples: int | None, beta: float | None) -> None:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"labels must be one whole number an example, not {labels.dtype} of shape {labels.shape}")
    if seed < 0:
        raise UserError(f"seed={seed} is negative; give a whole number from 0 up")
    if clients < 1:
        raise UserError(f"clients={clients} is too few; give at least 1")
    if clients > len(labels):
        raise UserError(f"clients={clients} is more than the {len(labels)} examples; give fewer clients or more data")
    if beta is not None and not (math.isfinite(beta) and beta > 0):
        raise UserError(f"beta={beta} is not a Dirichlet parameter; give a finite number above 0, for instance 0.5")
    if min_examples is None:  # a split without randomness
        return
    if min_examples < 0:
        raise UserError(f"min_examples={min_examples} is negative; give 0 or more")
    if min_examples * clients > len(labels):
        raise UserError(
            f"min_examples={min_examples} for {clients} clients needs {min_examples * clients} examples and there are "
            f"{len(labels)}; give fewer clients or a smaller min_examples"
        )


# The registered splits -----------------------------------------------------------------------------------------------


def dirichlet(labels: Indices, clients: int, rng: np.random.Generator, beta: float = 0.5) -> Indices | None:
    """Each class is cut over the clients by Dirichlet(beta); full clients get no more (usual benchmark)."""
    return _dirichlet(labels, clients, rng, beta, balanced=True)


def dirichlet_unbalanced(labels: Indices, clients: int, rng: np.random.Generator, beta: float = 0.5) -> Indices | None:
    """Each class is cut over the clients by Dirichlet(beta); sizes differ freely."""
    return _dirichlet(labels, clients, rng, beta, balanced=False)


def dirichlet_client(labels: Indices, clients: int, rng: np.random.Generator, beta: float = 0.5) -> Indices | None:
    """Each client draws its class distribution from Dirichlet(beta); sizes are equal (FedGG paper).

    Clients take turns, one example at a time, until all are dealt.
    """
    pools = _by_class(labels)
    preferences = rng.dirichlet(np.full(len(pools), beta), size=clients)
    if not np.isfinite(preferences).all():
        return None
    supply = [rng.permutation(pool).tolist() for pool in pools]
    left = np.array([len(pool) for pool in pools], dtype=np.int64)
    examples = int(left.sum())
    owners = np.empty(examples, dtype=np.int64)
    ladders = _ladders(preferences, left)
    dice = rng.random(examples).tolist()
    for start in range(0, examples, clients):
        turn = rng.permutation(clients)[: examples - start].tolist()
        for client, die in zip(turn, dice[start : start + clients], strict=True):
            ladder = ladders[client]
            if ladder is None:
                stock = np.cumsum(left)
                chosen = int(np.searchsorted(stock, die * stock[-1], side="right"))
            else:
                chosen = bisect_right(ladder, die)
            owners[supply[chosen].pop()] = client
            left[chosen] -= 1
            if not supply[chosen]:
                ladders = _ladders(preferences, left)
    return owners


def iid(labels: Indices, clients: int, rng: np.random.Generator) -> Indices:
    """Shuffled and dealt evenly; sizes differ by at most one."""
    return _dealt(rng.permutation(len(labels)), _even(len(labels), clients))


def shards(labels: Indices, clients: int, rng: np.random.Generator, shards_per_client: int = 2) -> Indices:
    """Sorted by label, cut into equal shards, dealt at random (McMahan et al. 2017)."""
    if not 1 <= shards_per_client <= len(labels) // clients:
        raise UserError(
            f"shards_per_client={shards_per_client} does not suit {len(labels)} examples over {clients} clients; "
            f"give 1 to {len(labels) // clients}"
        )
    # Shuffling first makes which examples of a class share a shard random too, not an effect of the file's order.
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    count = clients * shards_per_client
    hands = rng.permutation(count).reshape(clients, shards_per_client)
    holder = np.empty(count, dtype=np.int64)
    holder[hands] = np.arange(clients)[:, None]
    return holder[_dealt(by_label, _even(len(labels), count))]


def given(clients: int, owners: Indices | None) -> Indices:
    """The clients that the data name: an array `clients` beside y_train has the client of each example."""
    if owners is None:
        raise UserError("the split 'given' is not drawn: it needs data that name their clients")
    named = int(owners.max()) + 1
    if named != clients:
        raise UserError(f"the data name {named} clients, and split.clients = {clients}: set it to {named}")
    return owners


def _even(examples: int, parts: int) -> Indices:
    """Sizes that differ by at most one, the larger ones first."""
    return examples // parts + (np.arange(parts) < examples % parts)


def _dealt(order: Indices, sizes: Indices) -> Indices:
    """The owner of each example, when consecutive stretches of `order` go to one part after the other."""
    owners = np.empty(len(order), dtype=np.int64)
    owners[order] = np.repeat(np.arange(len(sizes)), sizes)
    return owners


def _by_class(labels: Indices) -> list[Indices]:
    """The example numbers of each class that occurs, ascending."""
    order = np.argsort(labels, kind="stable")
    _, first = np.unique(labels[order], return_index=True)
    return np.split(order, first[1:])


def _dirichlet(
    labels: Indices, clients: int, rng: np.random.Generator, beta: float, *, balanced: bool
) -> Indices | None:
    """Cut every class over the clients; None when no client could take a class."""
    pools, concentration = _by_class(labels), np.full(clients, beta)
    examples = sum(len(pool) for pool in pools)
    fair_share = examples / clients
    owners = np.empty(examples, dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    for pool in pools:
        proportions = rng.dirichlet(concentration)
        if balanced:
            proportions[held >= fair_share] = 0.0
        mass = proportions.sum()
        if not (np.isfinite(mass) and mass > 0):
            return None
        cuts = (np.cumsum(proportions / mass)[:-1] * len(pool)).astype(np.int64)
        sizes = np.diff(cuts, prepend=0, append=len(pool))
        owners[rng.permutation(pool)] = np.repeat(np.arange(clients), sizes)
        held += sizes
    return owners


def _ladders(preferences: NDArray[np.float64], left: Indices) -> list[list[float] | None]:
    """Each client's cumulative distribution over the classes left; None where it has no mass on any of them."""
    cumulative = np.cumsum(np.where(left > 0, preferences, 0.0), axis=1)
    return [(row / row[-1]).tolist() if row[-1] > 0 else None for row in cumulative]
