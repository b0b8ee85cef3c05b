"""Between what clients send up and `aggregate`: whatever has to happen for any algorithm, in any engine.

As it stands, a `Collector` hands on what was sent. Privacy and robust rules override it; an algorithm never
knows. What a collector returns is all that `aggregate` sees of the clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.rows import Rows


@dataclass(frozen=True)
class Sent:
    """What has reached the server in a round, one row per client, in ascending order of clients."""

    up: Rows
    share: Tensor  # [K, 1], sums to one
    round: int
    asked: int  # clients of the cohort, those included that were lost


@dataclass(frozen=True)
class Collector:
    """Hands on what was sent."""

    counts_equally: ClassVar[bool] = False  # whether every client counts the same, instead of by its examples

    def check(self, up: Rows, parameters: int) -> None:
        """Complain about an algorithm whose messages cannot be treated; `parameters` is the model's length."""

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        """The rows and shares that `aggregate` is given."""
        return sent.up, sent.share


PLAIN = Collector()


def shares(counts: list[int], like: Tensor, *, equally: bool) -> Tensor:
    """What part each client has in the round, `[K, 1]`: by its examples, or all the same."""
    weights = torch.tensor([[1 if equally else count] for count in counts], dtype=like.dtype, device=like.device)
    return weights / weights.sum()


def all_sent_the_same(one: Rows, clients: int) -> tuple[Rows, Tensor]:
    """So many clients who all sent the same row: views, so nothing is copied.

    Algorithms that add up clients, count them or take their mean then all do what they mean to.
    """
    up = {name: row.expand(clients, *row.shape[1:]) for name, row in one.items()}
    first = next(iter(one.values()))
    return up, torch.full((clients, 1), 1 / clients, dtype=first.dtype, device=first.device)
