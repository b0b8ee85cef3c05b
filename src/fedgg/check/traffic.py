"""What an algorithm sends and keeps, found out by playing a round: a table of it cannot be out of date."""

from __future__ import annotations

from dataclasses import dataclass

from fedgg.check.bench import Client, Standing, play, small_net
from fedgg.core.algorithm import Algorithm, Hub
from fedgg.core.rows import Rows


@dataclass(frozen=True)
class Traffic:
    """Names of rows; a number for each client says so, everything else is as long as the model."""

    down: tuple[str, ...]  # besides the model
    up: tuple[str, ...]  # besides the update
    server: tuple[str, ...]
    client: tuple[str, ...]


def traffic(algorithm: Algorithm) -> Traffic:
    net, clients = small_net(), [Client.draw(0, 9)]
    before = Standing.at_start(algorithm, net, len(clients))
    down = algorithm.send_down(before.w, Hub(before.server, len(clients), 1.0, 0))
    after, end = play(algorithm, net, before, clients)
    others = {name: rows for name, rows in end.up.items() if name != "delta"}
    return Traffic(_names(down), _names(others), _names(after.server), _names(after.clients[0]))


def _names(rows: Rows) -> tuple[str, ...]:
    return tuple(name if rows[name].shape[1] > 1 else f"{name} (a number)" for name in sorted(rows))
