"""A federation ready to run: the server, the clients and their data, as `build` makes it from an experiment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgg.core.algorithm import Algorithm
from fedgg.core.net import Net
from fedgg.core.plan import Work
from fedgg.data.client_batches import Feed
from fedgg.lab.aggregation import PLAIN_AGGREGATION, Aggregation
from fedgg.lab.client_data import Origin, Population
from fedgg.lab.config import Experiment
from fedgg.lab.engine_choice import Choice


@dataclass(frozen=True, eq=False)
class Federation:
    """A server, its clients and their data, ready to run."""

    experiment: Experiment
    algorithm: Algorithm
    net: Net
    feed: Feed
    origin: Origin
    work: Work
    choice: Choice  # of the engine, and why
    notices: tuple[str, ...]
    aggregation: Aggregation = PLAIN_AGGREGATION  # privacy, robust rule and attack

    @property
    def engine(self) -> str:
        """The name of the engine that trains it."""
        return self.choice.name

    def named(self, client: int) -> dict[str, Any]:
        """A client as the history writes it: its number, and its name where it has one."""
        names = self.origin.client_names
        return {"client": client} | ({} if names is None else {"name": names[client]})

    @property
    def cohort_size(self) -> int:
        return self.experiment.cohort_of(len(self.filled))

    @cached_property
    def last_round(self) -> int:
        """The one asked for, or an earlier one where privacy allows no more."""
        rounds, budget = self.experiment.rounds, self.aggregation.budget
        return rounds if budget is None else budget.affordable(rounds)

    # Counted once: a round asks for its cohort's alone, and must not cost more where the population is larger.

    @cached_property
    def examples(self) -> list[int]:
        """How many each client trains on."""
        return [len(client) for client in self.feed.clients]

    @cached_property
    def population(self) -> Population:
        return Population(len(self.filled), sum(self.examples))

    @cached_property
    def filled(self) -> NDArray[np.int64]:
        """The clients that have any."""
        return np.flatnonzero(self.examples)

    @cached_property
    def tested(self) -> list[int]:
        """The clients that keep examples back."""
        return [client for client, kept in enumerate(self.feed.held_out) if len(kept)]
