"""What an algorithm costs beside FedAvg, read off the rows it sends and keeps, not off its documentation."""

from __future__ import annotations

from fedgg.check.bench import Client, Standing, hub_of, play, small_net
from fedgg.core.algorithm import Algorithm, arithmetic_beside_fedavg
from fedgg.core.rows import Rows

EPOCHS = 5  # an experiment's default; what is computed once a round weighs the less, the more there are


def priced(algorithm: Algorithm) -> tuple[str, str, str, str, str]:
    """Down, up, kept by a client, kept by the server; and the arithmetic, in times FedAvg's."""
    net, clients = small_net(), [Client.draw(0, 7), Client.draw(1, 9)]
    standing, _ = play(algorithm, net, Standing.at_start(algorithm, net, len(clients)), clients)
    down = algorithm.send_down(standing.w, hub_of(standing, net, clients))
    standing, end = play(algorithm, net, standing, clients)
    times = arithmetic_beside_fedavg(algorithm, EPOCHS)
    return (
        _named({"model": standing.w, **down}),
        _named(end.up),
        _named(standing.clients[0]),
        _named({"model": standing.w, **standing.server}),
        "as FedAvg" if times == 1 else f"{times:.2f} times",
    )


def _named(rows: Rows) -> str:
    """Names, and how many of them are numbers rather than models."""
    return ", ".join(name if rows[name].shape[1] > 1 else f"{name} (a number)" for name in rows) or "nothing"
