"""Worlds with a known optimum: least squares spread over clients that disagree.

Client i has the loss (1 / 2 n_i) |X_i w - y_i|^2. The server can mean two problems by "the sum": clients weighted by
their examples, or each counted the same; with unequal clients the two optima differ, and algorithms can be told apart
by where they land.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedgg.core.algorithm import Weighing
from fedgg.core.net import Net
from fedgg.core.seeds import stream
from fedgg.data.feed import Feed
from fedgg.data.normalise import Scaling


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

    def net(self, *, hidden: bool = False) -> Net:
        """A linear model that starts at zero; `hidden`: as a product of two layers, the first of which starts as 1."""
        size = self.x[0].shape[1]
        last = nn.Linear(size, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(last.weight)
        if not hidden:
            return Net(last, squared_error)
        first = nn.Linear(size, size, bias=False, dtype=torch.float64)
        nn.init.eye_(first.weight)
        net = Net(nn.Sequential(first, last), squared_error)
        net.head = "1"
        return net

    def coefficients(self, net: Net, w: Tensor) -> Tensor:
        """Of the linear model that a row is, `[1, P]`: what it makes of the unit vectors."""
        units = torch.eye(self.x[0].shape[1], dtype=torch.float64)[None]
        return net.bind({}, train=False)(w, units)[..., 0].detach()

    def optimum(self, weighing: Weighing = "examples") -> Tensor:
        """Where the weighted sum of the clients' losses is least, `[1, P]`."""
        left, right = torch.zeros(()), torch.zeros(())
        for x, y in zip(self.x, self.y, strict=True):
            weight = 1.0 if weighing == "examples" else 1 / len(x)
            left, right = left + weight * (x.T @ x), right + weight * (x.T @ y)
        solution: Tensor = torch.linalg.solve(left, right)
        return solution[None]

    def feed(self) -> Feed:
        """The clients' rows as an engine wants them; the server has a copy of every fifth."""
        ends = np.cumsum([len(x) for x in self.x])
        clients = tuple(np.arange(end - len(x), end) for end, x in zip(ends, self.x, strict=True))
        x, y, one = torch.cat(self.x), torch.cat(self.y), torch.ones(1, dtype=torch.float64)
        nobody = tuple(np.arange(0) for _ in clients)
        return Feed(x, y, x, y, clients, nobody, Scaling(0 * one, one), "none", np.arange(0, len(x), 5))
