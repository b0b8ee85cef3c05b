"""The Flower `ServerApp`: waits for the clients, then runs the experiment or resumes it.

The server has its own data (test set, proxy set), and of each client the number of examples, their shape and a hash.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from fedgg.core.layout import InputPart
from fedgg.core.random_choices import Positions
from fedgg.data.batch_preparation import Feed
from fedgg.errors import UserError
from fedgg.flower.app_project import Configuration, RunConfig, check_min_clients, run_config
from fedgg.flower.data_files import ClientFileSummary, Examples, ServerFile, read_server_file
from fedgg.flower.engine import FlowerEngine
from fedgg.flower.membership import Membership, SavedMembership
from fedgg.flower.messages import ClientInfo
from fedgg.flower.send_and_receive import Exchange, ExchangeLog
from fedgg.lab.build import Federation, assemble, build
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.engine_setup import arithmetic, chosen_device
from fedgg.lab.federated_data import Keeper, WholeData
from fedgg.lab.name_resolution import build_algorithm, check_needs
from fedgg.lab.observer import Observer
from fedgg.lab.preflight_checks import rehearsed
from fedgg.lab.run_result import Run
from fedgg.lab.run_session import Session, opened
from fedgg.lab.runner import run_rounds
from fedgg.lab.trackers import tracked_by
from fedgg.runfolder.measure import first_score

LOG = logging.getLogger("flwr")
ClientInfos = Mapping[int, ClientInfo]


def server_app(experiment_file: str | Path, config: Configuration | None = None) -> ServerApp:
    """The ServerApp for an experiment.

    `config` holds defaults for the run config; in Flower's `run_simulation` there is no other way to set it.
    """

    def main(grid: Grid, context: Context) -> None:
        settings = run_config({**(config or {}), **context.run_config})
        names = [name.strip() for name in settings.track.split(",") if name.strip()]
        with tracked_by(names, LogObserver(), settings.out, LOG.warning) as observer:
            run_on_grid(grid, load_experiment(Path(experiment_file)), settings, observer)

    app = ServerApp()
    app.main()(main)
    return app


class LogObserver(Observer):
    """Writes rounds and notices to Flower's log."""

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        LOG.info("fedgg: %d of %d rounds are finished", rounds_done, rounds)

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        LOG.info("fedgg: %s", _round_line(record))

    def on_notice(self, run: str, message: str) -> None:
        LOG.warning("fedgg: %s", message)


def run_on_grid(grid: Grid, experiment: Experiment, config: RunConfig, observer: Observer) -> Run:
    """Run or resume an experiment whose clients are the nodes of this grid."""
    check_needs(build_algorithm(experiment.algorithm.name, experiment.algorithm.settings), experiment)
    check_min_clients(experiment, config.min_clients)
    saved = SavedMembership.read(config.out)
    run_id = saved.run if saved else secrets.token_hex(8)
    exchange = Exchange(grid, config.deadline)
    with arithmetic(experiment):
        data = ServerData(experiment, config.data)
        notice = partial(observer.on_notice, experiment.name)
        membership = Membership(
            exchange,
            run_id,
            experiment.trajectory(),
            notice,
            experiment.split.clients,
            partial(data.refusal, max_examples=config.max_examples),
            data.is_simulation,
        )
        if saved is not None:
            membership.client_info.update(saved.clients)
        left_out = _wait_for_clients(membership, data, config, notice)
        left_out = (saved.left_out if saved else {}) | left_out
        build_federation = partial(data.federation, membership.client_info)
        with opened(build_federation, experiment, config.out, observer, experiment.name) as session:
            assert session.store is not None
            session.store.check_lock()
            SavedMembership(run_id, membership.client_info, left_out).write(config.out)
            run_rounds(session, _engine(session, membership, exchange, config))
            return session.finish()


def _engine(session: Session, membership: Membership, exchange: Exchange, config: RunConfig) -> FlowerEngine:
    assert session.store is not None
    return FlowerEngine(
        membership=membership,
        exchange=exchange,
        config=config,
        example=rehearsed(session.federation),
        history=session.rounds,
        settled=session.store.settled,
        log=ExchangeLog(config.out, session.store.check_lock),
        notice=session.notice,
        private=session.federation.aggregation.budget is not None,
    )


def _round_line(record: dict[str, Any]) -> str:
    first = first_score(record)
    score = "" if first is None else f", {first[0].title} {first[1]:.4f}"
    return f"round {record['round']}: {len(record['clients'])} clients{score}"


# Waiting for the clients ----------------------------------------------------------------------------------------------


def _wait_for_clients(
    membership: Membership, data: ServerData, config: RunConfig, notice: Callable[[str], None]
) -> dict[int, str]:
    """Wait until each client has reported how many examples it has: weights and cohorts depend on it.

    The run starts without clients whose nodes were rejected if enough others are connected. Returns the clients that
    are left out of the whole run, because their number of examples is not known, with the reason.
    """
    clients = range(membership.clients)
    missing = membership.wait_for(clients, config.wait)
    unknown = [client for client in clients if client not in membership.client_info]
    enough = len(membership.client_info) >= config.enough(membership.clients)
    if unknown and not (enough and len(membership.rejected) >= len(unknown)):
        raise UserError(
            f"client {', '.join(map(str, unknown))} of {membership.clients} did not connect within {config.wait:g} s: "
            f"{_query_errors(membership) or _remedy(membership)}"
        )
    left_out = {}
    for client in unknown:
        expected = data.expected(client)
        membership.client_info[client] = expected or data.without_examples(client)
        if expected is None:
            left_out[client] = membership.reason_absent(client)
            notice(f"client {client} is left out of this run: {left_out[client]}")
    for client in missing:
        if client not in left_out:
            notice(f"client {client} is not connected: {membership.reason_absent(client)}")
    for sentence in _dominating_clients(membership, data):
        notice(sentence)
    return left_out


def _dominating_clients(membership: Membership, data: ServerData) -> list[str]:
    """Warnings of clients that report more examples than all others together, if the server cannot check it."""
    infos = membership.client_info
    total = sum(info.examples for info in infos.values())
    return [
        f"client {client} reports {info.examples:,} of {total:,} examples and has that weight in the average: "
        f"if that cannot be true, set max_examples, or a robust.rule that weights clients equally"
        for client, info in sorted(infos.items())
        if 2 * info.examples > total and len(infos) > 2 and data.expected(client) is None
    ]


def _query_errors(membership: Membership) -> str:
    """Why connected nodes did not report their client or were rejected; the same reason is listed once."""
    failed = {query.why: node for node, query in membership.failed.items() if node not in membership.rejected}
    rejected = {str(error): node for node, error in membership.rejected.items()}
    errors = [f"node {node} reports: {why}" for why, node in failed.items()]
    return "; ".join([*errors, *(f"node {node} is rejected: {why}" for why, node in rejected.items())][:3])


def _remedy(membership: Membership) -> str:
    silent = {query.message.node for query in membership.pending.values()}
    if not silent:
        return "start their nodes, or set split.clients"
    count = "1 connected node has" if len(silent) == 1 else f"{len(silent)} connected nodes have"
    return f"{count} not replied yet: set `wait` of the run config to more seconds, or look into the nodes' logs"


# Data -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DataOnNodes:
    """Data on nodes as seen by the server: the server's file, and the reports of the clients."""

    file: ServerFile
    client_info: ClientInfos
    name: str
    keeper: Keeper = "nodes"
    labels_are_words: bool = False  # not known here

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.test.x.shape[1:])

    @property
    def parts(self) -> tuple[InputPart, ...]:
        return self.file.parts

    @property
    def classes(self) -> tuple[str, ...]:
        return self.file.classes

    @property
    def client_names(self) -> tuple[str, ...] | None:
        return self.file.client_names

    @property
    def fingerprint(self) -> str:
        hashes = [self.file.test.fingerprint(), self.file.proxy.fingerprint()]
        hashes += [self.client_info[client].data for client in sorted(self.client_info)]
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()

    def split_hash(self) -> str:
        return self.file.split.get("hash") or self.fingerprint

    def described(self) -> dict[str, Any]:
        """Without the classes of each client, which are not reported to the server."""
        scheme, names = self.file.split.get("scheme", "by its owners"), self.client_names
        content = {"scheme": scheme, "hash": self.split_hash(), "classes": list(self.classes), "sizes": self._sizes()}
        return content | ({} if names is None else {"names": list(names)})

    def positions(self) -> dict[str, NDArray[np.int64]]:
        return {"sizes": np.array(self._sizes(), np.int64)}

    def _sizes(self) -> list[int]:
        infos = self.client_info
        return [infos[client].examples + infos[client].held_out for client in sorted(infos)]


class ServerData:
    """The server's data: its file or, in a simulation, the data source of the experiment.

    If it contains a summary of a client's data, the client's report must agree.
    """

    def __init__(self, experiment: Experiment, data: Path | None):
        self.experiment = experiment
        self.file: ServerFile | None = None
        self.simulated: Federation | None = None
        if data is None:
            federation = build(experiment)
            assert isinstance(federation.origin, WholeData)
            notices = tuple(sentence for sentence in federation.notices if sentence != federation.choice.notice)
            origin = replace(federation.origin, keeper="nodes")
            self.simulated = replace(federation, origin=origin, notices=notices)
            self.shape, self.classes = _shape_text(origin.shape), len(origin.classes)
        else:
            self.file, self.name = read_server_file(data, experiment), str(data)
            if self.file.clients != experiment.split.clients:
                raise UserError(
                    f"{data} was divided for {self.file.clients} clients, split.clients = {experiment.split.clients}"
                )
            self.shape, self.classes = _shape_text(self.file.test.x.shape[1:]), len(self.file.classes)

    @property
    def is_simulation(self) -> bool:
        return self.simulated is not None

    def expected(self, client: int) -> ClientInfo | None:
        """The report that this client must send; None if the server has no summary of its data."""
        if self.simulated is not None:
            feed = self.simulated.feed
            positions = np.concatenate([feed.clients[client], feed.held_out[client]])
            fingerprint = Examples(feed.x[positions], feed.y[positions]).fingerprint()
            summary = ClientFileSummary(len(feed.clients[client]), len(feed.held_out[client]), fingerprint)
        elif self.file is not None and self.file.client_files is not None:
            summary = self.file.client_files[client]
        else:
            return None
        return ClientInfo(client, summary.examples, summary.held_out, self.shape, self.classes, summary.fingerprint)

    def without_examples(self, client: int) -> ClientInfo:
        """The info of a client that is left out of the run."""
        return ClientInfo(client, 0, 0, self.shape, self.classes, "")

    def refusal(self, info: ClientInfo, max_examples: int) -> str | None:
        """Why a client's report cannot be accepted."""
        clients, least = self.experiment.split.clients, 0 if self.experiment.split.allow_empty else 1
        if not 0 <= info.client < clients:
            return (
                f"it reports client {info.client}, but the experiment has {clients} clients: "
                f"give it a client-id from 0 to {clients - 1}, or set split.clients"
            )
        expected = self.expected(info.client)
        if expected is not None:
            return _difference(info, expected)
        if not least <= info.examples <= max_examples or not 0 <= info.held_out <= max_examples:
            return (
                f"it reports {info.examples} training and {info.held_out} held-out examples for client {info.client}; "
                f"allowed are {least} to max_examples = {max_examples}"
            )
        if (info.shape, info.classes) != (self.shape, self.classes):
            return _difference(info, replace(info, shape=self.shape, classes=self.classes))
        if not re.fullmatch("[0-9a-f]{64}", info.data):
            return f"it reports {info.data!r} as the hash of client {info.client}'s examples"
        return None

    def federation(self, client_info: ClientInfos) -> Federation:
        if self.simulated is not None:
            federation = self.simulated
        else:
            assert self.file is not None
            feed = _feed(self.file, client_info, self.experiment)
            federation = assemble(self.experiment, feed, DataOnNodes(self.file, client_info, self.name))
        for client, info in sorted(client_info.items()):
            expected = (federation.examples[client], len(federation.feed.held_out[client]), self.shape, self.classes)
            if (info.examples, info.held_out, info.shape, info.classes) != expected:
                raise UserError(str(_difference(info, ClientInfo(client, *expected, info.data))))
        return federation


def _shape_text(shape: Sequence[int]) -> str:
    return " ".join(map(str, shape))


def _difference(info: ClientInfo, expected: ClientInfo) -> str | None:
    if info == expected:
        return None
    reported, known = _summary(info), _summary(expected)
    advice = "give both the files of one `divide`"
    if reported == known:
        return f"client {info.client} has other examples than the server expects: {advice}"
    return f"client {info.client} has {reported}, the server expects {known}: {advice}"


def _summary(info: ClientInfo) -> str:
    return (
        f"{info.examples} training and {info.held_out} held-out examples of shape {info.shape[:30]} "
        f"in {info.classes} classes"
    )


def _feed(file: ServerFile, client_info: ClientInfos, experiment: Experiment) -> Feed:
    """The server's examples, and the numbers of examples of the clients.

    All examples of clients are represented by one placeholder, the first test example. The dry run before the first
    round, which determines the content of the clients' updates, reads it.
    """
    device = chosen_device(experiment)
    x, y = torch.cat([file.proxy.x, file.test.x[:1]]), torch.cat([file.proxy.y, file.test.y[:1]])
    placeholder = len(file.proxy.y)
    infos = [client_info[client] for client in range(experiment.split.clients)]

    def positions(count: int) -> Positions:
        return np.broadcast_to(np.int64(placeholder), count)  # one number in memory for any count a node reports

    return Feed(
        x=x.to(device),
        y=y.to(device),
        x_test=file.test.x.to(device),
        y_test=file.test.y.to(device),
        clients=tuple(positions(info.examples) for info in infos),
        held_out=tuple(positions(info.held_out) for info in infos),
        scaling=file.scaling.to(device),
        augmentation=experiment.data.augment,
        proxy=np.arange(placeholder),
    )
