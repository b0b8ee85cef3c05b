"""Small problems on which algorithms are checked: classifiers in float64, and least squares with a known optimum.

Client i has the loss (1 / 2 n_i) |X_i w - y_i|^2. The server can mean two problems by "the sum": clients weighted by
their examples, or each counted the same; with unequal clients the two optima differ, and algorithms can be told apart
by where they land.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedgg.core.algorithm import Algorithm, Batch, Server, Weighing
from fedgg.core.client_rows import Rows, each_row, read_only, split, stack
from fedgg.core.evaluation import Probe
from fedgg.core.local import SGD, LocalEnd, LocalStart, local_round
from fedgg.core.model import Net, head_of
from fedgg.core.sampling import Work, stream, torch_stream
from fedgg.data.client_batches import Feed, Scaling

FEATURES, HIDDEN, CLASSES, BATCH = 4, 5, 3, 6


def small_net() -> Net:
    with torch_stream(0, "check net"):
        net = Net(nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double())
    net.head = head_of(net, torch.zeros(2, FEATURES, dtype=torch.float64))
    return net


@dataclass(frozen=True, eq=False)
class ToyClient:
    """One client's examples, and the two memories a round needs."""

    x: Tensor
    y: Tensor

    @classmethod
    def draw(cls, number: int, examples: int, flat: bool = False) -> ToyClient:
        """`flat`: inputs of zero, so that a model at zero has gradients in its last bias only."""
        with torch_stream(0, "check client", number):
            x = torch.randn(examples, FEATURES, dtype=torch.float64)
            return cls(torch.zeros_like(x) if flat else x, torch.randint(CLASSES, (examples,)))

    def batches(self, work: Work) -> list[tuple[Tensor, Tensor]]:
        size = work.batch or len(self.x)
        once = list(zip(self.x.split(size), self.y.split(size), strict=True))
        return once * work.epochs


@dataclass(frozen=True)
class Standing:
    """Where the federation stands before a round."""

    w: Tensor  # [1, P]
    server: Rows
    clients: list[Rows]
    rounds_done: int = 0

    @classmethod
    def at_start(cls, algorithm: Algorithm, net: Net, clients: int) -> Standing:
        return cls(net.start, algorithm.server_memory(net.start), [algorithm.client_memory(net.start)] * clients)


def train_rows(
    algorithm: Algorithm,
    net: Net,
    standing: Standing,
    clients: Sequence[ToyClient],
    rows: Sequence[int],
    momentum: float,
) -> LocalEnd:
    """One local round of some clients in one stack, given back in the order asked."""
    work = algorithm.work(Work(epochs=2, batch=BATCH))
    steps = torch.tensor([[float(work.steps(len(clients[row].x)))] for row in rows], dtype=torch.float64)
    order = steps[:, 0].argsort(descending=True, stable=True)
    back = order.argsort()
    chosen = [clients[rows[int(position)]] for position in order]
    server = server_of(standing, net, clients)
    # A setting that is a column makes a server's row for each client, in the order asked.
    w = algorithm.broadcast(standing.w, server).expand(len(rows), -1)[order]
    down = algorithm.send_down(standing.w, server)
    start = LocalStart(
        w=w,
        down={name: tensor.expand(len(rows), *tensor.shape[1:])[order] for name, tensor in down.items()},
        memory=stack([standing.clients[rows[int(position)]] for position in order]),
        buffers={},
        examples=torch.tensor([[float(len(client.x))] for client in chosen], dtype=w.dtype),
        steps=steps[order],
        round=torch.full_like(w[:, :1], standing.rounds_done),
        dropout=[],
        probe=Probe(net, {}, lambda row: [(chosen[row].x, chosen[row].y)]),
    )
    ordered = each_row(algorithm, order)
    return each_row(local_round(ordered, net, SGD.of(0.1, momentum, 0.01, w), start, _padded(chosen, work)), back)


def play(
    algorithm: Algorithm, net: Net, standing: Standing, clients: Sequence[ToyClient], momentum: float = 0.9
) -> tuple[Standing, LocalEnd]:
    """A whole round with everybody."""
    end = train_rows(algorithm, net, standing, clients, range(len(clients)), momentum)
    return aggregated(algorithm, net, standing, clients, end), end


def aggregated(
    algorithm: Algorithm, net: Net, standing: Standing, clients: Sequence[ToyClient], end: LocalEnd
) -> Standing:
    """Where the federation stands after the server's half of the round."""
    counts = torch.tensor([[float(len(client.x))] for client in clients], dtype=standing.w.dtype)
    server_view = server_of(standing, net, clients)
    w, server = algorithm.aggregate(standing.w, read_only(end.up, "up"), counts / counts.sum(), server_view)
    memories = split(end.memory, len(clients)) if end.memory else standing.clients
    return Standing(w, server, memories, standing.rounds_done + 1)


def server_of(standing: Standing, net: Net, clients: Sequence[ToyClient]) -> Server:
    """What the server may read."""
    own = ToyClient.draw(len(clients), 8)
    probe = Probe(net, {}, lambda row: [(own.x, own.y)])
    return Server(standing.server, len(clients), 1.0, standing.rounds_done, probe)


def _padded(clients: Sequence[ToyClient], work: Work) -> list[Batch]:
    """Batches of all rows that are at work, one step after another, short ones padded."""
    queues = [client.batches(work) for client in clients]
    width = max(len(y) for queue in queues for _, y in queue)
    batches = []
    for step in range(len(queues[0])):
        now = [queue[step] for queue in queues if step < len(queue)]
        x = torch.zeros(len(now), width, FEATURES, dtype=torch.float64)
        y = torch.zeros(len(now), width, dtype=torch.int64)
        mask = torch.zeros(len(now), width, dtype=torch.float64)
        for row, (inputs, labels) in enumerate(now):
            x[row, : len(labels)], y[row, : len(labels)], mask[row, : len(labels)] = inputs, labels, 1
        batches.append(Batch(x, y, mask))
    return batches


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
