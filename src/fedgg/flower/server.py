"""The server's side of Flower: `ServerApp`. Waits for the clients, then plays the run, or goes on with it."""

from __future__ import annotations

import logging
import secrets
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedgg.checksums import with_checksum, without_checksum
from fedgg.errors import UserError
from fedgg.files import read_json
from fedgg.flower.engine import OverMessages
from fedgg.flower.exchange import Exchange
from fedgg.flower.letters import FORMAT, Hello
from fedgg.flower.log import ExchangeLog
from fedgg.flower.roll import Roll
from fedgg.flower.server_side import federation_of
from fedgg.flower.settings import Configuration, RunSettings, run_settings, settings_fit
from fedgg.lab.arithmetic import arithmetic
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.files import write_json, writing_to
from fedgg.lab.parts import build_algorithm, check_needs
from fedgg.lab.rehearsal import rehearsed
from fedgg.lab.runner import Run, Session, Watcher, opened, play_with

LOG = logging.getLogger("flwr")


def server_app(experiment_file: str | Path, config: Configuration | None = None) -> ServerApp:
    """The app of the server; `config` stands in for a run configuration that Flower does not hand on."""

    def main(grid: Grid, context: Context) -> None:
        settings = run_settings({**(config or {}), **context.run_config})
        run_over(grid, load_experiment(Path(experiment_file)), settings, logged())

    app = ServerApp()
    app.main()(main)
    return app


def logged() -> Watcher:
    """Rounds and notices go where Flower's own log goes."""
    return Watcher(
        started=lambda done, of: LOG.info("fedgg: %d of %d rounds are done", done, of),
        round=lambda record: LOG.info("fedgg: %s", _round_line(record)),
        notice=lambda sentence: LOG.warning("fedgg: %s", sentence),
    )


def run_over(grid: Grid, experiment: Experiment, settings: RunSettings, watcher: Watcher) -> Run:
    """A run whose clients are reached over this grid."""
    check_needs(build_algorithm(experiment.algorithm.name, experiment.algorithm.settings), experiment)
    settings_fit(experiment, settings.min_clients)
    before = Passport.read(settings.out)
    run = before.run if before else secrets.token_hex(8)
    exchange = Exchange(grid, settings.deadline)
    roll = Roll(exchange, run, experiment.trajectory(), watcher.notice, experiment.split.clients)
    if before is not None:
        roll.said.update(before.clients)
    _gather(roll, settings, watcher)
    with arithmetic(experiment):
        build_it = partial(federation_of, experiment, settings.data, roll.said)
        with opened(build_it, experiment, settings.out, watcher) as session:
            assert session.store is not None
            session.store.check_lock()
            Passport(run, roll.said).write(settings.out)
            play_with(session, _engine(session, roll, exchange, settings))
            return session.finish()


@dataclass(frozen=True)
class Passport:
    """What a run over Flower has beside every other: a name that stands on its messages, and who its clients are."""

    run: str
    clients: dict[int, Hello]

    @classmethod
    def read(cls, folder: Path) -> Passport | None:
        path = folder / "flower.json"
        if not path.exists():
            return None
        try:
            content = without_checksum(read_json(path))
            if content["format"] != FORMAT:
                raise UserError(f"{path} has format {content['format']}; this fedgg reads {FORMAT}")
            return cls(str(content["run"]), {told["client"]: Hello(**told) for told in content["clients"]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read ({error}): this is no complete run folder") from error

    def write(self, folder: Path) -> None:
        clients = [asdict(self.clients[client]) for client in sorted(self.clients)]
        with writing_to(folder):
            content = {"format": FORMAT, "run": self.run, "clients": clients}
            write_json(folder / "flower.json", with_checksum(content))


def _gather(roll: Roll, settings: RunSettings, watcher: Watcher) -> None:
    """Every client must have said once how many examples it has: shares and cohorts follow from it."""
    everybody = range(roll.clients)
    missing = roll.wait_for(everybody, settings.wait)
    unknown = [client for client in everybody if client not in roll.said]
    if unknown:
        raise UserError(
            f"client {', '.join(map(str, unknown))} of {roll.clients} did not come within {settings.wait:g} s: "
            f"{_refusals(roll) or 'start their nodes, or set split.clients'}"
        )
    if missing:
        watcher.notice(f"client {', '.join(map(str, missing))} is not connected")


def _refusals(roll: Roll) -> str:
    """Why those who are there said no: one node's words stand for all that say the same."""
    reasons = {no.why: node for node, no in roll.refused.items()}
    return "; ".join(f"node {node} says: {why}" for why, node in list(reasons.items())[:3])


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
        notice=session.watcher.notice,
    )


def _round_line(record: dict[str, Any]) -> str:
    accuracy = f", test accuracy {record['test_accuracy']:.4f}" if "test_accuracy" in record else ""
    return f"round {record['round']}: {len(record['clients'])} clients{accuracy}"
