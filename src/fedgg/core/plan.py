"""Who takes part in a round and in which order they see their examples: functions of (seed, round, client)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgg.core.seeds import stream

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """What one client does in one round."""

    epochs: int
    batch: int | None  # None: all examples in one batch

    def steps(self, examples: int) -> int:
        """Local steps of a client with this many examples."""
        return self.epochs * (1 if self.batch is None else -(-examples // self.batch))


def cohort(seed: int, round_: int, clients: int, size: int) -> list[int]:
    """The clients of a round, drawn without replacement, in ascending order."""
    if size == clients:
        return list(range(clients))
    chosen = stream(seed, "cohort", round_).choice(clients, size=size, replace=False)
    return sorted(int(client) for client in chosen)


def schedule(seed: int, round_: int, client: int, examples: int, work: Work) -> Positions:
    """Positions within the client's own examples, `[steps, batch]`, -1 where there is none.

    A fresh shuffle every epoch; the last batch of an epoch may be short.
    """
    order = stream(seed, "batches", round_, client)
    size = examples if work.batch is None else work.batch
    rows = -(-examples // size)
    padded = np.full((work.epochs, rows * size), -1, dtype=np.int64)
    for epoch in padded:
        epoch[:examples] = order.permutation(examples)
    return padded.reshape(-1, size)


def batches(seed: int, round_: int, client: int, examples: int, work: Work) -> list[Positions]:
    """The same, batch by batch and without padding."""
    return [row[row >= 0] for row in schedule(seed, round_, client, examples, work)]
