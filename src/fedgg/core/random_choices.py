"""Random choices as functions of (seed, round, client): named random streams, client sampling, batch order.

Two streams with different names or keys are independent; the same name and keys give the same numbers on every machine,
in every engine, before and after a resume. There is therefore no generator state to save.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """A NumPy generator for one purpose, for instance `stream(seed, "batches", round, client)`."""
    # As a spawn key: entropy is padded with zeros, and a stream without a key would be the stream of key 0.
    sequence = np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *keys))
    return np.random.Generator(np.random.PCG64(sequence))


def torch_seed(seed: int, purpose: str, *keys: int) -> int:
    """A seed for torch's own generators (initialisation, dropout masks)."""
    sequence = stream(seed, purpose, *keys).bit_generator.seed_seq
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1


@contextmanager
def torch_stream(seed: int, purpose: str, *keys: int) -> Iterator[None]:
    """Within the block torch draws from the named stream; afterwards the user's own generators are as they were."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(torch_seed(seed, purpose, *keys))
        yield


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Within, random numbers may be drawn and generators seeded: afterwards all of them are as they were."""
    cards = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """What one client does in one round."""

    epochs: int
    batch: int | None  # None: all examples in one batch
    fixed_steps: int | None = None  # steps of every client, in place of epochs
    part: float = 1.0  # each client does a share of its work, drawn in every round between this and 1
    drop_last: bool = False  # whether an epoch leaves out its last batch where that is shorter than the others

    def batches(self, examples: int) -> int:
        """The batches of an epoch. A client with less than a batch trains on all it has."""
        return 1 if self.batch is None else -(-self.examples_of_epoch(examples) // self.batch)

    def last_batch(self, examples: int) -> int:
        """The number of examples in the last batch of an epoch."""
        used = self.examples_of_epoch(examples)
        return used if self.batch is None else (used - 1) % self.batch + 1

    def examples_of_epoch(self, examples: int) -> int:
        """How many of its examples a client trains on in an epoch."""
        if not self.drop_last or self.batch is None or examples < self.batch:
            return examples
        return examples - examples % self.batch

    def steps(self, examples: int, *key: int) -> int:
        """Local steps of a client with this many examples: in the round of `key` (seed, round, client), else at most.

        The share is a function of the key, so that all engines, the server's records and Flower's nodes have the same.
        """
        whole = self.fixed_steps or self.epochs * self.batches(examples)
        if self.part == 1 or not key:
            return whole
        seed, round_, client = key
        return max(1, round(whole * stream(seed, "part of the work", round_, client).uniform(self.part, 1)))

    def examples_trained(self, sizes: Sequence[int]) -> int:
        """Examples that clients of these sizes train on in a round, over all epochs, at most."""
        if self.fixed_steps is None:
            return self.epochs * sum(map(self.examples_of_epoch, sizes))
        return self.fixed_steps * sum(min(size, self.batch or size) for size in sizes)

    def passes(self, examples: int) -> int:
        """How often a client that does all of its work begins to go through its examples."""
        return self.epochs if self.fixed_steps is None else -(-self.fixed_steps // self.batches(examples))


def cohort(seed: int, round_: int, clients: int, size: int) -> list[int]:
    """The clients of a round, drawn without replacement, in ascending order."""
    chosen = stream(seed, "cohort", round_).choice(clients, size=size, replace=False)
    return sorted(int(client) for client in chosen)


def schedule(seed: int, round_: int, client: int, examples: int, work: Work) -> Positions:
    """Positions within the client's own examples, `[steps, batch]`, -1 where there is none.

    A fresh shuffle every epoch; the last batch of an epoch may be short, or is left out. A client that does a part of
    its work takes the first steps of the whole.
    """
    order = stream(seed, "batches", round_, client)
    size = examples if work.batch is None else work.batch
    rows, steps = work.batches(examples), work.steps(examples, seed, round_, client)
    padded = np.full((-(-steps // max(rows, 1)), rows * size), -1, dtype=np.int64)
    used = work.examples_of_epoch(examples)
    for epoch in padded:
        epoch[:used] = order.permutation(examples)[:used]
    return padded.reshape(-1, size)[:steps]
