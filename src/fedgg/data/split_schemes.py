"""The registered splits: who gets which training examples. `fedgg.data.partition` calls them.

Parameters are filled in by name: `labels` (class numbers, [N]; a split without it does not look at targets), `examples`
(how many there are), `clients` (how many), `owners` (the client or domain that the data name for each example, or
None), `rng`, `min_examples`; others are settings of the section [split]. A split returns the client of each example, -1
for none, or a list with the example numbers of each client, where an example may occur several times.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from fedgg.data.partition import Indices
from fedgg.errors import UserError


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


def dirichlet_repeated(
    labels: Indices, clients: int, rng: np.random.Generator, beta: float = 0.5
) -> list[Indices] | None:
    """As dirichlet_client, but a class that runs out is refilled, so that examples repeat (as FL-Simulator deals).

    Each client draws its class distribution from Dirichlet(beta), sizes are equal. Until all clients are full, one that
    is not, drawn at random, draws a class and gets the next example of it. If none is left of that class, all of its
    examples are there again, and the client draws another class. So several clients may hold the same example, or one
    client several times, and other examples are held by no client.
    """
    pools = [rng.permutation(pool).tolist() for pool in _by_class(labels)]
    preferences = rng.dirichlet(np.full(len(pools), beta), size=clients)
    if not np.isfinite(preferences).all():
        return None
    ladders = _ladders(preferences, np.ones(len(pools), dtype=np.int64))
    left = [len(pool) for pool in pools]
    room = _even(len(labels), clients).tolist()
    open_clients = [client for client in range(clients) if room[client]]
    held: list[list[int]] = [[] for _ in range(clients)]
    dice = iter(rng.random(len(labels)).tolist())
    while open_clients:
        at = int(next(dice) * len(open_clients))
        client = open_clients[at]
        ladder = ladders[client]
        assert ladder is not None, "a distribution has mass"
        while not left[chosen := bisect_right(ladder, rng.random())]:
            left[chosen] = len(pools[chosen])
        left[chosen] -= 1
        held[client].append(pools[chosen][left[chosen]])
        if len(held[client]) == room[client]:
            open_clients[at] = open_clients[-1]
            open_clients.pop()
    return [np.array(numbers, dtype=np.int64) for numbers in held]


def iid(examples: int, clients: int, rng: np.random.Generator) -> Indices:
    """Shuffled and dealt evenly; sizes differ by at most one."""
    return _dealt(rng.permutation(examples), _even(examples, clients))


def quantity(
    examples: int,
    clients: int,
    rng: np.random.Generator,
    beta: float = 0.5,
    sizes: Annotated[
        Literal["dirichlet", "linear", "square", "exponential"],
        "how the sizes of the clients are chosen",
    ] = "dirichlet",
) -> Indices | None:
    """Shuffled; clients differ in size only: by Dirichlet(beta) (NIID-Bench), or linear, square, exponential.

    `sizes`: shares of the clients 0, 1, 2, ... are drawn from Dirichlet(beta), or are proportional to 1, 2, 3, ...
    (linear), 1, 4, 9, ... (square) or e, e^2, e^3, ... (exponential).
    """
    numbers = np.arange(1, clients + 1, dtype=np.float64)
    if sizes == "dirichlet":
        weights = rng.dirichlet(np.full(clients, beta))
    elif sizes == "exponential":
        weights = np.exp(numbers - clients)
    else:
        weights = numbers if sizes == "linear" else numbers**2
    mass = weights.sum()
    if not (np.isfinite(mass) and mass > 0):
        return None
    cuts = (np.cumsum(weights / mass)[:-1] * examples).astype(np.int64)
    return _dealt(rng.permutation(examples), np.diff(cuts, prepend=0, append=examples))


def k_labels(
    labels: Indices,
    clients: int,
    rng: np.random.Generator,
    labels_per_client: Annotated[int, "how many different labels a client has"] = 2,
) -> Indices:
    """Each client has `labels_per_client` labels; a label's examples go evenly to those who have it (NIID-Bench #C=k).

    Client i has the label i modulo their number, and others drawn at random; first those that no client has, where
    there are fewer clients than labels. A client may lack one of its labels where there are fewer examples of it than
    clients that have it.
    """
    pools = _by_class(labels)
    if not 1 <= labels_per_client <= len(pools):
        raise UserError(
            f"split.labels_per_client = {labels_per_client} does not suit {len(pools)} labels; give 1 to {len(pools)}"
        )
    if clients * labels_per_client < len(pools):
        raise UserError(
            f"split.labels_per_client = {labels_per_client} and {clients} clients cover "
            f"{clients * labels_per_client} of {len(pools)} labels; give at least {-(-len(pools) // clients)}, or more "
            f"clients"
        )
    has = np.zeros((clients, len(pools)), dtype=bool)
    has[np.arange(clients), np.arange(clients) % len(pools)] = True
    without_client = rng.permutation(np.arange(min(clients, len(pools)), len(pools)))
    has[np.arange(len(without_client)) % clients, without_client] = True
    for row in has:
        others = rng.permutation(np.flatnonzero(~row))
        row[others[: labels_per_client - int(row.sum())]] = True
    client_of = np.empty(len(labels), dtype=np.int64)
    for pool, holders in zip(pools, has.T, strict=True):
        client_of[rng.permutation(pool)] = np.repeat(np.flatnonzero(holders), _even(len(pool), int(holders.sum())))
    return client_of


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


def given(
    clients: int,
    owners: Indices | None,
    rng: np.random.Generator,
    min_examples: int,
    choose: Annotated[
        Literal["all", "largest", "random"],
        "which clients of the data: all, or split.clients of them",
    ] = "all",
) -> Indices:
    """The clients that the data name: an array `clients` beside y_train has the client of each example.

    `choose`: all of them, or `split.clients` of them, those with most examples (largest) or drawn at random; each has
    at least `split.min_examples`, and the examples of the others are not used.
    """
    owners = _named(owners, "given")
    sizes = np.bincount(owners)
    if choose == "all":
        if len(sizes) != clients:
            raise UserError(
                f"the data name {len(sizes)} clients, and split.clients = {clients}: set it to {len(sizes)}, or choose "
                f"among them by split.choose = 'largest' or 'random'"
            )
        return owners
    large_enough = np.flatnonzero(sizes >= max(min_examples, 1))
    if len(large_enough) < clients:
        raise UserError(
            f"split.choose = {choose!r}: {len(large_enough)} of the data's clients have split.min_examples = "
            f"{min_examples}, and split.clients = {clients}: take fewer clients or a smaller min_examples"
        )
    if choose == "largest":
        chosen = large_enough[np.argsort(-sizes[large_enough], kind="stable")[:clients]]
    else:
        chosen = rng.choice(large_enough, clients, replace=False)
    number = np.full(len(sizes), -1, dtype=np.int64)
    number[np.sort(chosen)] = np.arange(clients)
    return number[owners]


def domains(clients: int, owners: Indices | None, rng: np.random.Generator) -> Indices:
    """One domain a client: an array `clients` beside y_train has the domain of each example.

    Client i has the domain i modulo their number. A domain's examples are shuffled and dealt evenly to its clients.
    """
    owners = _named(owners, "domains")
    pools = _by_class(owners)
    if clients < len(pools):
        raise UserError(f"the data name {len(pools)} domains, and split.clients = {clients}: set at least {len(pools)}")
    client_of = np.empty(len(owners), dtype=np.int64)
    for domain, pool in enumerate(pools):
        holders = np.arange(domain, clients, len(pools))
        client_of[rng.permutation(pool)] = np.repeat(holders, _even(len(pool), len(holders)))
    return client_of


def _named(owners: Indices | None, scheme: str) -> Indices:
    if owners is None:
        what = "clients" if scheme == "given" else "domains"
        raise UserError(f"the split {scheme!r} needs data that name their {what}")
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
