"""What an algorithm sends, keeps and computes, seen by letting it play two rounds: no table can be out of date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedgg.check.toy_problems import Standing, ToyClient, play, server_of, small_net
from fedgg.core.algorithm import Algorithm, arithmetic_beside_fedavg
from fedgg.core.client_rows import Rows

MANY = 1_000_000  # parameters of a model whose sparse messages are measured
EPOCHS = 5  # an experiment's default; what is computed once a round weighs the less, the more there are


@dataclass(frozen=True)
class Price:
    """Names of rows as long as the model, or else marked as numbers; and what that makes beside FedAvg's 1."""

    down: tuple[str, ...]  # besides the model
    up: tuple[str, ...]  # besides the update
    client: tuple[str, ...]
    server: tuple[str, ...]  # besides the model
    bytes: float  # a round's, down and up; single numbers do not count
    arithmetic: float  # a client's, with so many local epochs

    @property
    def sent(self) -> str:
        return _listed({"down": self.down, "up": self.up})

    @property
    def kept(self) -> str:
        return _listed({"client": self.client, "server": self.server})


def price(algorithm: Algorithm) -> Price:
    net, clients = small_net(), [ToyClient.draw(0, 7), ToyClient.draw(1, 9)]
    standing, _ = play(algorithm, net, Standing.at_start(algorithm, net, len(clients)), clients)
    down = algorithm.send_down(standing.w, server_of(standing, net, clients))
    standing, end = play(algorithm, net, standing, clients)
    return Price(
        down=_names(down),
        up=_names({name: rows for name, rows in end.up.items() if name != "delta"}),
        client=_names(standing.clients[0]),
        server=_names(standing.server),
        bytes=(1 + _models(down, algorithm.sparse_down(MANY)) + _models(end.up, algorithm.sparse_up(MANY))) / 2,
        arithmetic=arithmetic_beside_fedavg(algorithm, EPOCHS),
    )


def _names(rows: Rows) -> tuple[str, ...]:
    return tuple(name if rows[name].shape[1] > 1 else f"{name} (number)" for name in sorted(rows))


def _listed(places: dict[str, tuple[str, ...]]) -> str:
    return "; ".join(f"{place}: {', '.join(names)}" for place, names in places.items() if names) or "nothing"


def _models(rows: Rows, sparse: Mapping[str, int]) -> float:
    """In fp32, where the position of a value is as large as the value."""
    return sum(min(1.0, 2 * sparse.get(name, MANY) / MANY) for name, tensor in rows.items() if tensor.shape[1] > 1)
