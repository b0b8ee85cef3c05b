"""What an algorithm sends, stores and computes, measured by running it for two rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedgg.check.toy_problems import ToyClient, ToyState, run_round, server_of, small_net
from fedgg.core.algorithm import Algorithm, arithmetic_beside_fedavg
from fedgg.core.tensor_rows import Rows

MANY = 1_000_000  # parameters of the model for which sparse messages are counted
EPOCHS = 5  # an experiment's default; work done once a round is divided by it


@dataclass(frozen=True)
class Cost:
    """Names of rows (scalars are marked as numbers), and bytes and arithmetic relative to FedAvg's 1."""

    down: tuple[str, ...]  # besides the model
    up: tuple[str, ...]  # besides the update
    client: tuple[str, ...]
    server: tuple[str, ...]  # besides the model
    bytes: float  # of a round, down and up; scalars are not counted
    arithmetic: float  # of a client, with EPOCHS local epochs

    @property
    def sent(self) -> str:
        return _listed({"down": self.down, "up": self.up})

    @property
    def stored(self) -> str:
        return _listed({"client": self.client, "server": self.server})


def cost_of(algorithm: Algorithm) -> Cost:
    net, clients = small_net(), [ToyClient.draw(0, 7), ToyClient.draw(1, 9)]
    state, _ = run_round(algorithm, net, ToyState.initial(algorithm, net, len(clients)), clients)
    down = algorithm.send_down(state.w, server_of(state, net, clients))
    state, end = run_round(algorithm, net, state, clients)
    return Cost(
        down=_names(down),
        up=_names({name: rows for name, rows in end.up.items() if name != "delta"}),
        client=_names(state.clients[0]),
        server=_names(state.server),
        bytes=(1 + _models(down, algorithm.sparse_down(MANY)) + _models(end.up, algorithm.sparse_up(MANY))) / 2,
        arithmetic=arithmetic_beside_fedavg(algorithm, EPOCHS),
    )


def _names(rows: Rows) -> tuple[str, ...]:
    return tuple(name if rows[name].shape[1] > 1 else f"{name} (number)" for name in sorted(rows))


def _listed(places: dict[str, tuple[str, ...]]) -> str:
    return "; ".join(f"{place}: {', '.join(names)}" for place, names in places.items() if names) or "nothing"


def _models(rows: Rows, sparse: Mapping[str, int]) -> float:
    """Bytes in units of a model, in fp32: the position of a sparse value is as large as the value."""
    return sum(min(1.0, 2 * sparse.get(name, MANY) / MANY) for name, tensor in rows.items() if tensor.shape[1] > 1)
