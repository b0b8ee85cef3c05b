"""The client side: `ClientApp`, which reads a message, trains or evaluates on the node's own data, and replies.

It does one client's part of a round with the same functions as every engine, so the numbers are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedgg.core.algorithm import Algorithm
from fedgg.core.buffers import starting_buffers, travelling, travels
from fedgg.core.evaluate import Score, evaluate
from fedgg.core.local import LocalEnd
from fedgg.core.net import Net
from fedgg.core.plan import Work
from fedgg.core.rows import Rows
from fedgg.core.server import healthy
from fedgg.data.client_batches import Feed
from fedgg.engines import RoundJob
from fedgg.engines.job import Optimiser
from fedgg.engines.loop import train_one
from fedgg.errors import UserError
from fedgg.flower.app_config import Configuration, NodeSettings, node_settings
from fedgg.flower.data_files import ClientFile, Examples, read_client
from fedgg.flower.messages import (
    NOBODY,
    About,
    Answer,
    BadRecord,
    Hello,
    about_of,
    arrays_of,
    check_buffers,
    check_finite,
    check_kinds,
    check_some,
    from_record,
    kinds,
    reading,
    to_record,
    write,
)
from fedgg.flower.node_state import Kept, NodeMemory, Overtaken
from fedgg.lab.build import build, chosen_device, examined_net, work_of
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.registry import build_algorithm
from fedgg.lab.torch_settings import arithmetic


@dataclass(frozen=True, eq=False)
class Site:
    """Everything a client trains with, but for its memory."""

    client: int
    experiment: Experiment
    algorithm: Algorithm
    net: Net
    feed: Feed
    work: Work
    shape: tuple[int, ...]
    classes: int

    @property
    def examples(self) -> int:
        return self.feed.examples(self.client)

    @property
    def held_out(self) -> int:
        return len(self.feed.held_out[self.client])

    def fingerprint(self) -> str:
        """Of this client's examples, those included that it keeps back."""
        own = np.concatenate([self.feed.clients[self.client], self.feed.held_out[self.client]])
        return Examples(self.feed.x[own], self.feed.y[own]).fingerprint()

    def train(self, round_: int, received: Received, kept: Kept | None) -> LocalEnd:
        """This client's part of a round, counted from 1."""
        number, local = round_ - 1, self.experiment.local
        job = RoundJob(
            algorithm=self.algorithm,
            net=self.net,
            data=self.feed,
            work=self.work,
            optimiser=Optimiser(local.lr * local.lr_decay**number, local.momentum, local.weight_decay),
            policy=self.experiment.model.statistics,
            seed=self.experiment.seed,
            round=number,
            cohort=[self.client],
            w=received.w,
            buffers=received.buffers,
            down=received.down,
            memory={} if kept is None or not kept.memory else {self.client: kept.memory},
            kept_buffers={} if kept is None or not kept.buffers else {self.client: kept.buffers},
        )
        with arithmetic(self.experiment):
            return train_one(job, self.client)

    def score(self, received: Received) -> Score:
        """On what the client keeps back."""
        with arithmetic(self.experiment):
            chunks = self.feed.held_out_chunks(self.client)
            return evaluate(self.net, received.w, received.buffers, chunks)


@dataclass(frozen=True)
class Received:
    """The arrays of a message from the server."""

    w: Tensor
    down: Rows
    buffers: Rows  # the server's, or the model's own where none were sent


def site_of(experiment_file: Path, settings: NodeSettings) -> Site:
    """Built once in a process, however many messages come in; anew when a file has changed."""
    if settings.data is None:
        return _part_of_source(experiment_file, settings.client)
    stamps = _stamp(experiment_file), _stamp(settings.data)
    return _from_file(experiment_file, settings.client, settings.data, stamps)


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@lru_cache(maxsize=1)
def _whole(experiment_file: Path, stamp: int) -> Site:
    """Any client of an experiment whose data set is here; the others differ in their number alone."""
    federation = build(load_experiment(experiment_file))
    origin = federation.origin
    return Site(
        0,
        federation.experiment,
        federation.algorithm,
        federation.net,
        federation.feed,
        federation.work,
        origin.shape,
        len(origin.classes),
    )


def _part_of_source(experiment_file: Path, client: int) -> Site:
    whole = _whole(experiment_file, _stamp(experiment_file))
    clients = len(whole.feed.clients)
    if client >= clients:
        raise UserError(f"this node is client {client}, but the experiment has {clients} clients, 0 to {clients - 1}")
    return Site(**(vars(whole) | {"client": client}))


@lru_cache(maxsize=8)
def _from_file(experiment_file: Path, client: int, data: Path, stamps: tuple[int, int]) -> Site:
    experiment = load_experiment(experiment_file)
    mine = read_client(data, experiment)
    if mine.client not in (client, -1):
        raise UserError(f"{data} holds the examples of client {mine.client}, but this node is client {client}")
    algorithm = build_algorithm(experiment.algorithm.name, experiment.algorithm.settings)
    feed = _feed(mine, client, experiment)
    shape = tuple(mine.train.x.shape[1:])
    with arithmetic(experiment):
        net = examined_net(experiment, algorithm, shape, len(mine.classes), _sample(feed, shape))
    return Site(client, experiment, algorithm, net, feed, work_of(algorithm, experiment), shape, len(mine.classes))


def _sample(feed: Feed, shape: tuple[int, ...]) -> Tensor:
    """Two examples to look at a model with; a client that has less makes do."""
    few = feed.scaling(feed.x[:2])
    return torch.cat([few, few.new_zeros(2, *shape)])[:2]


def _feed(mine: ClientFile, client: int, experiment: Experiment) -> Feed:
    """The positions of other clients are empty: there is nothing of theirs here."""
    device, nothing = chosen_device(experiment), np.empty(0, np.int64)
    x, y = torch.cat([mine.train.x, mine.held_out.x]), torch.cat([mine.train.y, mine.held_out.y])
    count = len(mine.train.y)
    return Feed(
        x=x.to(device),
        y=y.to(device),
        x_test=x[:0].to(device),
        y_test=y[:0].to(device),
        clients=(*[nothing] * client, np.arange(count)),
        held_out=(*[nothing] * client, np.arange(count, len(y))),
        scaling=mine.scaling.to(device),
        augmentation=experiment.data.augment,
    )


LOG = logging.getLogger("flwr")
Do = Callable[[About, Site, NodeSettings, Message], RecordDict]


def client_app(experiment_file: str | Path, config: Configuration | None = None) -> ClientApp:
    """The app of every node; `config` stands in for a run configuration that Flower does not hand on."""
    app = ClientApp()
    file, defaults = Path(experiment_file), dict(config or {})
    app.train()(partial(_answer, file, defaults, _train))
    app.evaluate()(partial(_answer, file, defaults, _score))
    app.query("hello")(partial(_answer, file, defaults, _introduce))
    return app


def _answer(file: Path, defaults: Configuration, do: Do, message: Message, context: Context) -> Message:
    """Whatever goes wrong here, the server is told in words; nothing is kept of a message that failed."""
    about = About("", "", 0, 0, -1)
    try:
        about = about_of(message.content)
        settings = node_settings(context.node_config, {**defaults, **context.run_config})
        if settings.simulated and about.client == NOBODY:
            hello = Hello(settings.client, 0, 0, "", 0, "", settings.simulated)
            return Message(write(about, answer=Answer(), hello=hello), reply_to=message)
        if settings.simulated:
            settings = settings.playing(about.client)
        site = site_of(file, settings)
        _refuse_another(about, site, settings, message)
        reply = do(about, site, settings, message)
    except (UserError, BadRecord, Overtaken) as error:
        LOG.error("%s", error)
        reply = write(about, answer=Answer(refused=str(error)))
    except Exception as error:  # a bug of a user's algorithm or of ours must reach the server as words, too
        LOG.exception("the client failed")
        reply = write(about, answer=Answer(refused=f"{type(error).__name__}: {error}"))
    return Message(reply, reply_to=message)


def _refuse_another(about: About, site: Site, settings: NodeSettings, message: Message) -> None:
    if about.experiment != site.experiment.trajectory():
        raise BadRecord("this node was given another experiment than the server: start both from the same app")
    if not _is_hello(message) and about.client != settings.client:
        raise BadRecord(f"this node is client {settings.client}, not {about.client}")


def _is_hello(message: Message) -> bool:
    return str(message.metadata.message_type).startswith("query")


def _introduce(about: About, site: Site, settings: NodeSettings, message: Message) -> RecordDict:
    hello = Hello(
        client=settings.client,
        examples=site.examples,
        held_out=site.held_out,
        shape=" ".join(map(str, site.shape)),
        classes=site.classes,
        data=site.fingerprint(),
    )
    return write(about, answer=Answer(), hello=hello)


def _train(about: About, site: Site, settings: NodeSettings, message: Message) -> RecordDict:
    received = _received(site, message.content)
    memory, ticket = NodeMemory(settings.memory, about.run), _ticket(about, message)
    kept, gone = memory.begin(about, ticket, site.net.start.device)
    end = site.train(about.round, received, kept)
    policy = site.experiment.model.statistics
    before = starting_buffers(policy, received.buffers, kept.buffers if kept is not None and kept.buffers else None)
    _, sick = healthy({site.client: end}, lambda client: before)
    if sick:
        raise BadRecord(sick[0].why)
    own_buffers = end.buffers if policy == "local" else {}
    memory.keep(about, ticket, Kept(end.memory, own_buffers))
    _, buffers_go_up = travels(policy)
    sent = travelling(site.net.moving, before, end.buffers) if buffers_go_up else {}
    arrays = {"up": to_record(end.up)} | ({"buffers": to_record(sent)} if sent else {})
    numbers = {"loss": float(end.loss)} | {reading(name): float(value) for name, value in end.readings.items()}
    note = gone if end.memory or own_buffers else ""  # who keeps nothing has lost nothing
    return write(about, arrays, answer=Answer(note=note), numbers=numbers)


def _score(about: About, site: Site, settings: NodeSettings, message: Message) -> RecordDict:
    score = site.score(_received(site, message.content))
    return write(about, answer=Answer(), numbers={"accuracy": score.accuracy, "loss": score.loss})


def _ticket(about: About, message: Message) -> str:
    return f"round {about.round}, attempt {about.attempt}, message {message.metadata.message_id}"


def _received(site: Site, content: RecordDict) -> Received:
    """The arrays of a message, of the model's own types and shapes, and finite."""
    device = site.net.start.device
    model = check_kinds(_rows(content, "model", device), kinds({"w": site.net.start}), "the model")
    down = _rows(content, "down", device) if "down" in content else {}
    buffers = site.net.start_buffers
    if "buffers" in content:
        sent = check_some(from_record(arrays_of(content, "buffers"), device), kinds(buffers), "buffers")
        buffers = buffers | check_buffers(buffers, sent, "buffers")
    return Received(model["w"], down, buffers)


def _rows(content: RecordDict, name: str, device: torch.device) -> Rows:
    return check_finite(from_record(arrays_of(content, name), device), name)
