"""Who takes part in a round and in which order they see their examples: functions of (seed, round, client)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedgg.core.seeds import stream


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


def batches(seed: int, round_: int, client: int, examples: int, work: Work) -> list[np.ndarray]:
    """Positions, within the client's own examples, of each batch: a fresh shuffle every epoch, the short one last."""
    order = stream(seed, "batches", round_, client)
    size = examples if work.batch is None else work.batch
    return [
        shuffled[start : start + size]
        for shuffled in (order.permutation(examples) for _ in range(work.epochs))
        for start in range(0, examples, size)
    ]
