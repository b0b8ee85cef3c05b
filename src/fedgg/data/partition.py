"""Splits of a labelled training set over clients: every example goes to exactly one client."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedgg.core.sampling import stream
from fedgg.errors import UserError

Indices = NDArray[np.int64]
Draw = Callable[[np.random.Generator], Indices | None]  # the owner of each example

SCHEMES: dict[str, str] = {
    "dirichlet": "each class is cut over the clients by Dirichlet(beta); full clients get no more (usual benchmark)",
    "dirichlet_unbalanced": "each class is cut over the clients by Dirichlet(beta); sizes differ freely",
    "dirichlet_client": "each client draws its class distribution from Dirichlet(beta); sizes are equal (FedGG paper)",
    "iid": "shuffled and dealt evenly; sizes differ by at most one",
    "shards": "sorted by label, cut into equal shards, dealt at random (McMahan et al. 2017)",
    "given": "as the data say: an array `clients` beside y_train names the client of each example",
}
MAX_ATTEMPTS = 1000


@dataclass(frozen=True, eq=False)
class Partition:
    """One split: the example numbers of every client, each array sorted ascending."""

    scheme: str
    indices: tuple[Indices, ...]

    @property
    def sizes(self) -> Indices:
        """How many examples each client holds."""
        return np.array([len(held) for held in self.indices], dtype=np.int64)

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


def given_partition(owners: Indices, clients: int) -> Partition:
    """The split the data bring with them."""
    found = int(owners.max()) + 1
    if found != clients:
        raise UserError(f"the data name {found} clients, and split.clients = {clients}: set it to {found}")
    return _by_owner("given", owners, np.bincount(owners, minlength=clients))


def partition(
    scheme: str,
    labels: Indices,
    clients: int,
    seed: int,
    *,
    beta: float = 0.5,
    min_examples: int = 10,
    shards_per_client: int = 2,
    allow_empty: bool = False,
) -> Partition:
    """Split the examples over the clients, drawing again until every client has `min_examples`.

    With `min_examples=0` a client still gets at least one example, unless `allow_empty`.
    """
    _check(scheme, labels, clients, seed, beta, min_examples, shards_per_client)
    draw = _drawer(scheme, labels, clients, beta, shards_per_client)
    needed = min_examples if allow_empty else max(min_examples, 1)
    best = -1
    for attempt in range(MAX_ATTEMPTS):
        owners = draw(stream(seed, "partition", attempt))
        if owners is None:
            continue
        sizes = np.bincount(owners, minlength=clients)
        smallest = int(sizes.min())
        if smallest >= needed:
            return _by_owner(scheme, owners, sizes)
        best = max(best, smallest)
    raise UserError(_exhausted(scheme, clients, beta, min_examples, best))


def _by_owner(scheme: str, owners: Indices, sizes: Indices) -> Partition:
    order = np.argsort(owners, kind="stable")  # so that each client's examples come out ascending
    return Partition(scheme, tuple(np.split(order, np.cumsum(sizes)[:-1])))


def _exhausted(scheme: str, clients: int, beta: float, min_examples: int, best: int) -> str:
    reached = f"the best smallest client had {best}" if best >= 0 else "no attempt gave a whole split"
    setting, remedy = (
        (f" with beta={beta:g}", "a larger beta, fewer clients") if scheme != "shards" else ("", "fewer clients")
    )
    examples = f"{min_examples} examples" if min_examples > 1 else "an example"
    return (
        f"split {scheme!r}{setting} over {clients} clients never gave every client {examples} in {MAX_ATTEMPTS} "
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


def _check(
    scheme: str, labels: Indices, clients: int, seed: int, beta: float, min_examples: int, shards_per_client: int
) -> None:
    if scheme == "given":
        raise UserError("the split 'given' is not drawn: it needs data that name their clients")
    if scheme not in SCHEMES:
        raise UserError(f"unknown split {scheme!r}; choose one of {', '.join(SCHEMES)}")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"labels must be one whole number an example, not {labels.dtype} of shape {labels.shape}")
    examples = len(labels)
    if seed < 0:
        raise UserError(f"seed={seed} is negative; give a whole number from 0 up")
    if clients < 1:
        raise UserError(f"clients={clients} is too few; give at least 1")
    if clients > examples:
        raise UserError(f"clients={clients} is more than the {examples} examples; give fewer clients or more data")
    if scheme.startswith("dirichlet") and not (math.isfinite(beta) and beta > 0):
        raise UserError(f"beta={beta} is no Dirichlet parameter; give a finite number above 0, for instance 0.5")
    if min_examples < 0:
        raise UserError(f"min_examples={min_examples} is negative; give 0 or more")
    if min_examples * clients > examples:
        raise UserError(
            f"min_examples={min_examples} for {clients} clients needs {min_examples * clients} examples and there are "
            f"{examples}; give fewer clients or a smaller min_examples"
        )
    if scheme == "shards" and not 1 <= shards_per_client <= examples // clients:
        raise UserError(
            f"shards_per_client={shards_per_client} does not suit {examples} examples over {clients} clients; "
            f"give 1 to {examples // clients}"
        )


def _drawer(scheme: str, labels: Indices, clients: int, beta: float, shards_per_client: int) -> Draw:
    if scheme == "iid":
        return partial(_iid, len(labels), clients)
    if scheme == "shards":
        return partial(_shards, labels, clients, shards_per_client)
    pools = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    if scheme == "dirichlet_client":
        return partial(_dirichlet_client, pools, clients, beta)
    return partial(_dirichlet, pools, clients, beta, scheme == "dirichlet")


def _iid(examples: int, clients: int, rng: np.random.Generator) -> Indices:
    return _dealt(rng.permutation(examples), _even(examples, clients))


def _shards(labels: Indices, clients: int, shards_per_client: int, rng: np.random.Generator) -> Indices:
    # Shuffling first makes which examples of a class share a shard random too, not an effect of the file's order.
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shards = clients * shards_per_client
    hands = rng.permutation(shards).reshape(clients, shards_per_client)
    holder = np.empty(shards, dtype=np.int64)
    holder[hands] = np.arange(clients)[:, None]
    return holder[_dealt(by_label, _even(len(labels), shards))]


def _even(examples: int, parts: int) -> Indices:
    """Sizes that differ by at most one, the larger ones first."""
    return examples // parts + (np.arange(parts) < examples % parts)


def _dealt(order: Indices, sizes: Indices) -> Indices:
    """The owner of each example, when consecutive stretches of `order` go to one part after the other."""
    owners = np.empty(len(order), dtype=np.int64)
    owners[order] = np.repeat(np.arange(len(sizes)), sizes)
    return owners


def _dirichlet(
    pools: list[Indices], clients: int, beta: float, balanced: bool, rng: np.random.Generator
) -> Indices | None:
    """Cut every class over the clients; None when nobody could take a class."""
    examples = sum(len(pool) for pool in pools)
    fair_share = examples / clients
    owners = np.empty(examples, dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    for pool in pools:
        proportions = rng.dirichlet(np.full(clients, beta))
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


def _dirichlet_client(pools: list[Indices], clients: int, beta: float, rng: np.random.Generator) -> Indices | None:
    """Clients with class distributions of their own take turns, one example at a time, until all are dealt."""
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


def _ladders(preferences: NDArray[np.float64], left: Indices) -> list[list[float] | None]:
    """Each client's cumulative distribution over the classes left; None where it has no mass on any of them."""
    cumulative = np.cumsum(np.where(left > 0, preferences, 0.0), axis=1)
    return [(row / row[-1]).tolist() if row[-1] > 0 else None for row in cumulative]
