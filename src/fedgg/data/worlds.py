"""Worlds with a known optimum: least squares spread over clients that disagree.

Client i has the loss (1 / 2 n_i) |X_i w - y_i|^2. The server can mean two problems by "the sum": clients weighted by
their examples, or each counted the same; with unequal clients the two optima differ, and algorithms can be told apart
by where they land.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedgg.core import plan
from fedgg.core.algorithm import Batch
from fedgg.core.net import Net
from fedgg.core.seeds import stream


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs[:, 0] - targets).square()


@dataclass(frozen=True, eq=False)
class Quadratics:
    """Clients' rows and targets, float64; clients hold 20, 23, 26, ... rows."""

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]

    @classmethod
    def draw(cls, clients: int = 4, features: int = 5, seed: int = 0, disagreement: float = 1.0) -> Quadratics:
        """Each client has its own truth, `disagreement` away from a common one, and its own scaling of the inputs."""
        xs, ys = [], []
        common = stream(seed, "world").normal(size=features)
        for client in range(clients):
            numbers = stream(seed, "world", client)
            x = numbers.normal(size=(20 + 3 * client, features)) * numbers.uniform(0.5, 1.5, size=features)
            truth = common + disagreement * numbers.normal(size=features)
            xs.append(torch.from_numpy(x))
            ys.append(torch.from_numpy(x @ truth))
        return cls(tuple(xs), tuple(ys))

    def net(self) -> Net:
        module = nn.Linear(self.x[0].shape[1], 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            module.weight.zero_()
        return Net(module, squared_error)

    def optimum(self, weighing: Literal["examples", "clients"] = "examples") -> Tensor:
        """Where the weighted sum of the clients' losses is least, `[1, P]`."""
        left, right = torch.zeros(()), torch.zeros(())
        for x, y in zip(self.x, self.y, strict=True):
            weight = 1.0 if weighing == "examples" else 1 / len(x)
            left, right = left + weight * (x.T @ x), right + weight * (x.T @ y)
        solution: Tensor = torch.linalg.solve(left, right)
        return solution[None]

    # What an engine asks for

    def examples(self, client: int) -> int:
        return len(self.x[client])

    def batches(self, seed: int, round_: int, client: int, work: plan.Work) -> Iterator[Batch]:
        for part in plan.batches(seed, round_, client, self.examples(client), work):
            where = torch.from_numpy(part)
            x, y = self.x[client][where], self.y[client][where]
            yield Batch(x[None], y[None], torch.ones(1, len(where), dtype=torch.float64))

    def client_chunks(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.x[client], self.y[client]
