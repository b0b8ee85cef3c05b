"""The server's side of Flower: `ServerApp`. Waits for the clients, then plays the run, or goes on with it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedgg.errors import UserError
from fedgg.files import read_json
from fedgg.flower.app_config import Configuration, RunSettings, run_settings, settings_fit
from fedgg.flower.engine import OverMessages
from fedgg.flower.exchange import Exchange, ExchangeLog
from fedgg.flower.membership import Roll
from fedgg.flower.messages import FORMAT, Hello
from fedgg.flower.server_data import ServerData
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.dry_run import rehearsed
from fedgg.lab.observer import Observer
from fedgg.lab.registry import build_algorithm, check_needs
from fedgg.lab.run_result import Run
from fedgg.lab.runner import run_rounds_with
from fedgg.lab.session import Session, opened
from fedgg.lab.torch_settings import arithmetic
from fedgg.output_files import write_json, writing_to
from fedgg.runfolder.checksums import with_checksum, without_checksum

LOG = logging.getLogger("flwr")


def server_app(experiment_file: str | Path, config: Configuration | None = None) -> ServerApp:
    """The app of the server; `config` stands in for a run configuration that Flower does not hand on."""

    def main(grid: Grid, context: Context) -> None:
        settings = run_settings({**(config or {}), **context.run_config})
        run_over(grid, load_experiment(Path(experiment_file)), settings, LogObserver())

    app = ServerApp()
    app.main()(main)
    return app


class LogObserver(Observer):
    """Rounds and notices go to Flower's own log."""

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        LOG.info("fedgg: %d of %d rounds are done", rounds_done, rounds)

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        LOG.info("fedgg: %s", _round_line(record))

    def on_notice(self, run: str, message: str) -> None:
        LOG.warning("fedgg: %s", message)


def run_over(grid: Grid, experiment: Experiment, settings: RunSettings, observer: Observer) -> Run:
    """A run whose clients are reached over this grid."""
    check_needs(build_algorithm(experiment.algorithm.name, experiment.algorithm.settings), experiment)
    settings_fit(experiment, settings.min_clients)
    before = Passport.read(settings.out)
    run = before.run if before else secrets.token_hex(8)
    exchange = Exchange(grid, settings.deadline)
    with arithmetic(experiment):
        data = ServerData(experiment, settings.data)
        notice = partial(observer.on_notice, experiment.name)
        roll = Roll(
            exchange,
            run,
            experiment.trajectory(),
            notice,
            experiment.split.clients,
            partial(data.refusal, max_examples=settings.max_examples),
            data.is_simulation,
        )
        if before is not None:
            roll.said.update(before.clients)
        left_out = (before.left_out if before else {}) | _gather(
            roll, data, settings, partial(observer.on_notice, experiment.name)
        )
        build_it = partial(data.federation, roll.said)
        with opened(build_it, experiment, settings.out, observer, experiment.name) as session:
            assert session.store is not None
            session.store.check_lock()
            Passport(run, roll.said, left_out).write(settings.out)
            run_rounds_with(session, _engine(session, roll, exchange, settings))
            return session.finish()


@dataclass(frozen=True)
class Passport:
    """What a run over Flower has beside every other: a name that stands on its messages, and who its clients are."""

    run: str
    clients: dict[int, Hello]
    left_out: dict[int, str] = field(default_factory=dict)  # clients the run began without, and why

    @classmethod
    def read(cls, folder: Path) -> Passport | None:
        path = folder / "flower.json"
        if not path.exists():
            return None
        try:
            content = without_checksum(read_json(path))
            if content["format"] != FORMAT:
                raise UserError(f"{path} has format {content['format']}; this fedgg reads {FORMAT}")
            clients = {told["client"]: _hello(told) for told in content["clients"]}
            left_out = {told["client"]: str(told["why"]) for told in content.get("left_out", [])}
            return cls(str(content["run"]), clients, left_out)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read ({error}): this is no complete run folder") from error

    def write(self, folder: Path) -> None:
        clients = [asdict(self.clients[client]) for client in sorted(self.clients)]
        with writing_to(folder):
            left_out = [{"client": client, "why": why} for client, why in sorted(self.left_out.items())]
            absent = {"left_out": left_out} if left_out else {}
            content = {"format": FORMAT, "run": self.run, "clients": clients, **absent}
            write_json(folder / "flower.json", with_checksum(content))


def _hello(entry: dict[str, Any]) -> Hello:
    """A folder may come from somebody else: ValueError or TypeError where this is not what was written."""
    hello = Hello(**entry)
    if not all(type(getattr(hello, f.name)).__name__ == f.type for f in fields(Hello)):
        raise ValueError(f"client {hello.client!r} has values of other types")
    if min(hello.client, hello.examples, hello.held_out) < 0:
        raise ValueError(f"client {hello.client} has numbers below zero")
    return hello


def _gather(roll: Roll, data: ServerData, settings: RunSettings, notice: Callable[[str], None]) -> dict[int, str]:
    """Every client must have said once how many examples it has: shares and cohorts follow from it.

    A run does begin without clients whose nodes were refused for what they said, if enough others are there. Gives
    those that have no part in it, with the reason: nothing but their word says how many examples they have.
    """
    everybody = range(roll.clients)
    missing = roll.wait_for(everybody, settings.wait)
    unknown = [client for client in everybody if client not in roll.said]
    enough = len(roll.said) >= settings.enough(roll.clients)
    if unknown and not (enough and len(roll.rejected) >= len(unknown)):
        raise UserError(
            f"client {', '.join(map(str, unknown))} of {roll.clients} did not come within {settings.wait:g} s: "
            f"{_refusals(roll) or 'start their nodes, or set split.clients'}"
        )
    left_out = {}
    for client in unknown:
        expected = data.expected(client)
        roll.said[client] = expected or data.nothing_of(client)
        if expected is None:
            left_out[client] = roll.absence(client)
            notice(f"client {client} is left out of this run: {left_out[client]}")
    for client in missing:
        if client not in left_out:
            notice(f"client {client} is not there: {roll.absence(client)}")
    for sentence in _outweighing(roll, data):
        notice(sentence)
    return left_out


def _outweighing(roll: Roll, data: ServerData) -> list[str]:
    """A client that says it has more examples than all others together, where nothing here can check that."""
    total = sum(hello.examples for hello in roll.said.values())
    return [
        f"client {client} says that it has {hello.examples:,} of {total:,} examples, and counts for as much: "
        f"if that cannot be, set max_examples, or a robust.rule that counts clients the same"
        for client, hello in sorted(roll.said.items())
        if 2 * hello.examples > total and len(roll.said) > 2 and data.expected(client) is None
    ]


def _refusals(roll: Roll) -> str:
    """Why those who are there said no or were refused: one node's words stand for all that say the same."""
    reasons = {no.why: node for node, no in roll.refused.items() if node not in roll.rejected}
    said = [f"node {node} says: {why}" for why, node in reasons.items()]
    refused = {str(no): node for node, no in roll.rejected.items()}
    return "; ".join([*said, *(f"node {node} is refused: {why}" for why, node in refused.items())][:3])


def _engine(session: Session, roll: Roll, exchange: Exchange, settings: RunSettings) -> OverMessages:
    assert session.store is not None
    return OverMessages(
        roll=roll,
        exchange=exchange,
        settings=settings,
        example=rehearsed(session.federation),
        history=session.rounds,
        settled=session.store.settled,
        log=ExchangeLog(settings.out, session.store.check_lock),
        notice=session.notice,
        private=session.federation.aggregation.budget is not None,
    )


def _round_line(record: dict[str, Any]) -> str:
    accuracy = f", test accuracy {record['test_accuracy']:.4f}" if "test_accuracy" in record else ""
    return f"round {record['round']}: {len(record['clients'])} clients{accuracy}"
