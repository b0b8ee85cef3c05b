"""A small world on which hooks can be called one by one: classifiers in float64, batches of different shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedgg.core.algorithm import Algorithm, Batch, Server
from fedgg.core.local import LocalEnd, LocalStart, local_round
from fedgg.core.net import Net
from fedgg.core.plan import Work
from fedgg.core.probe import Probe
from fedgg.core.representation import head_of
from fedgg.core.rows import Rows, each_row, read_only, split, stack
from fedgg.core.seeds import torch_stream
from fedgg.core.sgd import SGD

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
