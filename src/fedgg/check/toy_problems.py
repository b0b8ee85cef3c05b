"""Small problems on which algorithms are checked: classifiers in float64, and least squares with a known optimum.

Client i has the loss (1 / 2 n_i) |X_i w - y_i|^2. The sum over clients can be weighted by their examples or equally;
with unequal clients the two optima differ, so that an algorithm's end point shows which of the problems it solves.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from fedgg.core.algorithm import Algorithm, Batch, Server, Weighing
from fedgg.core.evaluation import Probe
from fedgg.core.local import LocalEnd, LocalStart, local_round
from fedgg.core.model import Net, head_of
from fedgg.core.optimisers import SGD
from fedgg.core.random_choices import Work, stream, torch_stream
from fedgg.core.tasks import OwnLoss
from fedgg.core.tensor_rows import Rows, check, each_row, read_only, split, stack, two_of
from fedgg.data.batch_preparation import Feed, Scaling

FEATURES, HIDDEN, CLASSES, BATCH = 4, 5, 3, 6


def small_net() -> Net:
    module, head = _small_module()
    net = Net(deepcopy(module))
    net.head = head
    return net


@cache
def _small_module() -> tuple[nn.Module, str]:
    """The module, which is not given to an algorithm, and its last layer."""
    with torch_stream(0, "check net"):
        module = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double()
    return module, head_of(Net(deepcopy(module)), torch.zeros(2, FEATURES, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class ToyClient:
    """One client's examples."""

    x: Tensor
    y: Tensor

    @classmethod
    def draw(cls, number: int, examples: int, flat: bool = False) -> ToyClient:
        """`flat`: inputs are zero, so that a model of zeros has a gradient in its last bias only."""
        x, y = _examples(number, examples)
        return cls(torch.zeros_like(x) if flat else x.clone(), y.clone())

    def batches(self, work: Work) -> list[tuple[Tensor, Tensor]]:
        size = work.batch or len(self.x)
        epoch = list(zip(self.x.split(size), self.y.split(size), strict=True))
        return epoch * work.epochs


@cache
def _examples(number: int, examples: int) -> tuple[Tensor, Tensor]:
    """Drawn once: algorithms get copies, which a wrong one may modify."""
    with torch_stream(0, "check client", number):
        return torch.randn(examples, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (examples,))


@dataclass(frozen=True)
class ToyState:
    """The state of a federation between rounds: model, server memory, client memories."""

    w: Tensor  # [1, P]
    server: Rows
    clients: list[Rows]
    rounds_done: int = 0

    @classmethod
    def initial(cls, algorithm: Algorithm, net: Net, clients: int) -> ToyState:
        return cls(net.start, algorithm.server_memory(net.start), [algorithm.client_memory(net.start)] * clients)


def train_rows(
    algorithm: Algorithm,
    net: Net,
    state: ToyState,
    clients: Sequence[ToyClient],
    rows: Sequence[int],
    momentum: float,
) -> LocalEnd:
    """One local round of the clients `rows`, trained as one stack; results are in the order of `rows`."""
    work = algorithm.work(Work(epochs=2, batch=BATCH))
    steps = torch.tensor([[float(work.steps(len(clients[row].x)))] for row in rows], dtype=torch.float64)
    order = steps[:, 0].argsort(descending=True, stable=True)
    inverse = order.argsort()
    chosen = [clients[rows[int(position)]] for position in order]
    server = server_of(state, net, clients)
    # With a setting that is a column, the server's rows are one for each client, in the order of `rows`.
    w = algorithm.broadcast(state.w, server).expand(len(rows), -1)[order]
    down = algorithm.send_down(state.w, server)
    check(down, next((len(tensor) for tensor in down.values() if isinstance(tensor, Tensor)), 1), "send_down()")
    start = LocalStart(
        w=w,
        down={name: tensor.expand(len(rows), *tensor.shape[1:])[order] for name, tensor in down.items()},
        memory=stack([state.clients[rows[int(position)]] for position in order]),
        buffers={},
        examples=torch.tensor([[float(len(client.x))] for client in chosen], dtype=w.dtype),
        steps=steps[order],
        round=torch.full_like(w[:, :1], state.rounds_done),
        dropout=[],
        probe=Probe(net, {}, lambda row: [(chosen[row].x, chosen[row].y)]),
    )
    ordered = each_row(algorithm, order)
    return each_row(local_round(ordered, net, SGD.of(0.1, momentum, 0.01, w), start, _padded(chosen, work)), inverse)


def run_round(
    algorithm: Algorithm, net: Net, state: ToyState, clients: Sequence[ToyClient], momentum: float = 0.9
) -> tuple[ToyState, LocalEnd]:
    """A whole round with all clients."""
    end = train_rows(algorithm, net, state, clients, range(len(clients)), momentum)
    return aggregated(algorithm, net, state, clients, end), end


def aggregated(
    algorithm: Algorithm, net: Net, state: ToyState, clients: Sequence[ToyClient], end: LocalEnd
) -> ToyState:
    """The state after the server's half of the round."""
    counts = torch.tensor([[float(len(client.x))] for client in clients], dtype=state.w.dtype)
    server_view = server_of(state, net, clients)
    new = algorithm.aggregate(state.w, read_only(end.up, "up"), counts / counts.sum(), server_view)
    w, server = two_of(new, f"{type(algorithm).__name__}.aggregate()", "the model and the server's memory")
    memories = split(end.memory, len(clients)) if end.memory else state.clients
    return ToyState(w, server, memories, state.rounds_done + 1)


def server_of(state: ToyState, net: Net, clients: Sequence[ToyClient]) -> Server:
    """The server's view, with a proxy set of eight examples."""
    proxy = ToyClient.draw(len(clients), 8)
    probe = Probe(net, {}, lambda row: [(proxy.x, proxy.y)])
    return Server(state.server, len(clients), 1.0, state.rounds_done, probe)


def _padded(clients: Sequence[ToyClient], work: Work) -> list[Batch]:
    """For each step, the batches of all clients that still train, padded to one size."""
    queues = [client.batches(work) for client in clients]
    width = max(len(y) for queue in queues for _, y in queue)
    batches = []
    for step in range(len(queues[0])):
        active = [queue[step] for queue in queues if step < len(queue)]
        x = torch.zeros(len(active), width, FEATURES, dtype=torch.float64)
        y = torch.zeros(len(active), width, dtype=torch.int64)
        mask = torch.zeros(len(active), width, dtype=torch.float64)
        for row, (inputs, labels) in enumerate(active):
            x[row, : len(labels)], y[row, : len(labels)], mask[row, : len(labels)] = inputs, labels, 1
        batches.append(Batch(x, y, mask))
    return batches


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs[:, 0] - targets).square()


@dataclass(frozen=True, eq=False)
class Quadratics:
    """Least squares: the clients' inputs and targets, float64; clients hold 20, 23, 26, ... examples."""

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]

    @classmethod
    def draw(cls, clients: int = 4, features: int = 5, seed: int = 0, disagreement: float = 1.0) -> Quadratics:
        """Each client has its own true coefficients, `disagreement` away from common ones, and its own input scales."""
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
        """A linear model that starts at zero; `hidden`: a product of two layers, the first initially the identity."""
        size = self.x[0].shape[1]
        last = nn.Linear(size, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(last.weight)
        module: nn.Module = last
        if hidden:
            first = nn.Linear(size, size, bias=False, dtype=torch.float64)
            nn.init.eye_(first.weight)
            module = nn.Sequential(first, last)
        net = Net(module, OwnLoss(half_squared_error), ())
        net.draws_random_numbers = net.drops = False
        net.head = "1" if hidden else ""
        return net

    def coefficients(self, net: Net, w: Tensor) -> Tensor:
        """Of the linear model with parameters `w`, `[1, P]`: its outputs for the unit vectors."""
        units = torch.eye(self.x[0].shape[1], dtype=torch.float64)[None]
        return net.bind({}, train=False)(w, units)[..., 0].detach()

    def optimum(self, weighing: Weighing = "examples") -> Tensor:
        """The minimiser of the weighted sum of the clients' losses, `[1, P]`."""
        left, right = torch.zeros(()), torch.zeros(())
        for x, y in zip(self.x, self.y, strict=True):
            weight = 1.0 if weighing == "examples" else 1 / len(x)
            left, right = left + weight * (x.T @ x), right + weight * (x.T @ y)
        solution: Tensor = torch.linalg.solve(left, right)
        return solution[None]

    def feed(self) -> Feed:
        """The examples in the form an engine takes; the server has a copy of every fifth."""
        ends = np.cumsum([len(x) for x in self.x])
        clients = tuple(np.arange(end - len(x), end) for end, x in zip(ends, self.x, strict=True))
        x, y, one = torch.cat(self.x), torch.cat(self.y), torch.ones(1, dtype=torch.float64)
        held_out = tuple(np.arange(0) for _ in clients)
        return Feed(x, y, x, y, clients, held_out, Scaling(0 * one, one), "none", np.arange(0, len(x), 5))
