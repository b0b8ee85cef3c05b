"""Splits of a training set over clients.

Every example goes to exactly one client, except where a registered split says otherwise: then several clients may hold
an example (`Partition.repeats`), or no client.

A split of user code is a function whose parameters are chosen, by name, among `labels` (the targets of the training
examples), `clients` (their number), `rng`, `owners` (the clients that the data name, or None) and settings of the
section [split]. It returns the client of each example as an array `[N]`, or a list with the example numbers of each
client. A function with the parameter `rng` is called again, with another generator, while it returns None or a client
has less than `min_examples`.
"""

from __future__ import annotations

import hashlib
import math
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
OFFERED_TO_REGISTERED = (*OFFERED, "examples")  # and `min_examples`, which is a setting of all splits


@dataclass(frozen=True, eq=False)
class Partition:
    """One split: the example numbers of every client, each array sorted ascending."""

    scheme: str
    indices: tuple[Indices, ...]
    sizes: Indices  # how many examples each client holds
    repeats: bool = False  # whether an example may be held by several clients, or several times by one

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
    labels: NDArray[Any],
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

    `labels` are the targets, of any type and shape: splits that go by labels refuse those that are not classes.
    A split that is drawn is drawn again until every client has `min_examples`. Without `allow_empty` a client has at
    least one example. Settings that the scheme has no parameter for are ignored.
    """
    if function is None:
        SPLITS.check(scheme)
        function = SPLITS[scheme]
    is_registered = scheme in SPLITS and function is SPLITS[scheme]
    accepted = accepted_settings(function)
    used = {name: value for name, value in settings.items() if name in accepted}
    if is_registered and "labels" in accepted and (labels.ndim != 1 or labels.dtype.kind not in "iu"):
        raise _without_classes(scheme, labels)
    is_drawn = "rng" in accepted and scheme != "given"  # clients of the data have the sizes they have
    _check(len(labels), clients, seed, min_examples if is_drawn else None, used.get("beta"))
    offered = {"labels": labels, "clients": clients, "owners": owners}
    if is_registered:
        offered |= {"examples": len(labels), "min_examples": min_examples}
    arguments = {name: value for name, value in offered.items() if name in accepted} | used
    if not is_drawn:
        if "rng" in accepted:
            arguments["rng"] = stream(seed, "partition", 0)
        client_of = _called_once(scheme, function, arguments, len(labels), clients, allow_empty)
    else:
        needed = min_examples if allow_empty else max(min_examples, 1)
        best = -1
        for attempt in range(MAX_ATTEMPTS):
            result = function(**arguments, rng=stream(seed, "partition", attempt))
            if result is None:
                continue
            if is_registered and isinstance(result, list):
                return _with_repetition(scheme, result)  # of equal sizes, which another attempt would not change
            client_of = result if is_registered else owners_of(scheme, result, len(labels), clients)
            smallest = int(np.bincount(client_of, minlength=clients).min())
            if smallest >= needed:
                break
            best = max(best, smallest)
        else:
            raise UserError(_exhausted(scheme, clients, used, min_examples, best))
    order = np.argsort(client_of, kind="stable")  # so that the examples of each client are sorted
    unused = int((client_of < 0).sum())  # they come first
    sizes = np.bincount(client_of[order[unused:]], minlength=clients)
    return Partition(scheme, tuple(np.split(order[unused:], np.cumsum(sizes)[:-1])), sizes)


def _with_repetition(scheme: str, held: list[Indices]) -> Partition:
    sizes = np.array([len(numbers) for numbers in held], dtype=np.int64)
    return Partition(scheme, tuple(np.sort(numbers) for numbers in held), sizes, repeats=True)


def _called_once(
    scheme: str, function: Callable[..., Any], arguments: dict[str, Any], examples: int, clients: int, allow_empty: bool
) -> Indices:
    """A split without randomness, for which there is no smallest size but that clients are not empty."""
    client_of = owners_of(scheme, function(**arguments), examples, clients)
    empty = np.flatnonzero(np.bincount(client_of[client_of >= 0], minlength=clients) == 0)
    if len(empty) and not allow_empty:
        raise UserError(
            f"split {scheme!r} gives client {empty[0]} no examples: take fewer split.clients, or let clients have no "
            f"examples: split.allow_empty = true"
        )
    return client_of


def owners_of(scheme: str, result: Any, examples: int, clients: int) -> Indices:
    """The client of each example, from what a split returned; UserError unless every example has exactly one.

    The registered split `given` may leave examples out, as -1.
    """
    lowest = -1 if scheme == "given" else 0
    if isinstance(result, np.ndarray):
        if result.shape != (examples,) or result.dtype.kind not in "iu":
            raise UserError(
                f"split {scheme!r} returned {result.dtype} of shape {result.shape}: return the client of each of the "
                f"{examples} examples, or a list with the example numbers of each client"
            )
        if len(wrong := np.flatnonzero((result < lowest) | (result >= clients))):
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
    if settings.get("sizes", "dirichlet") != "dirichlet":  # the split `quantity` draws nothing by beta then
        settings = {name: value for name, value in settings.items() if name != "beta"}
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


def _without_classes(scheme: str, targets: NDArray[Any]) -> UserError:
    others = [name for name in SPLITS if "labels" not in accepted_settings(SPLITS[name])]
    return UserError(
        f"split.scheme = {scheme!r} goes by class labels, and the targets are {targets.dtype} of shape "
        f"{targets.shape}, not one class for each example: take one of {', '.join(others)}"
    )


def _check(examples: int, clients: int, seed: int, min_examples: int | None, beta: float | None) -> None:
    if seed < 0:
        raise UserError(f"seed={seed} is negative; give a whole number from 0 up")
    if clients < 1:
        raise UserError(f"clients={clients} is too few; give at least 1")
    if clients > examples:
        raise UserError(f"clients={clients} is more than the {examples} examples; give fewer clients or more data")
    if beta is not None and not (math.isfinite(beta) and beta > 0):
        raise UserError(f"beta={beta} is not a Dirichlet parameter; give a finite number above 0, for instance 0.5")
    if min_examples is None:  # a split without randomness
        return
    if min_examples < 0:
        raise UserError(f"min_examples={min_examples} is negative; give 0 or more")
    if min_examples * clients > examples:
        raise UserError(
            f"min_examples={min_examples} for {clients} clients needs {min_examples * clients} examples and there are "
            f"{examples}; give fewer clients or a smaller min_examples"
        )
