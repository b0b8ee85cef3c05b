"""The Flower `ClientApp`: reads a message, trains or evaluates on the data of its node, and replies.

A client is trained by the fused step, with the same results as the engine `fused`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedgg.core.algorithm import Algorithm
from fedgg.core.buffers import travelling
from fedgg.core.evaluation import Score, evaluate
from fedgg.core.local import LocalEnd
from fedgg.core.model import NeedsFloatingPoint, Net
from fedgg.core.random_choices import Work
from fedgg.core.server import healthy
from fedgg.core.tensor_rows import Rows
from fedgg.data.batch_preparation import Feed
from fedgg.engines import RoundJob
from fedgg.engines.base import personal_job, with_personal_models
from fedgg.engines.fused.engine import train_fused
from fedgg.engines.fused.net import fused_net
from fedgg.engines.loop import trained_personal_tensors
from fedgg.errors import UserError
from fedgg.flower import messages
from fedgg.flower.app_project import Configuration, NodeConfig, node_config
from fedgg.flower.data_files import ClientFile, Examples, read_client_file
from fedgg.flower.messages import (
    ANY_CLIENT,
    ClientInfo,
    InvalidMessage,
    MessageHeader,
    ReplyStatus,
    diagnostic_key,
    from_record,
    message_content,
    specs_of,
    to_record,
)
from fedgg.flower.node_state import NodeStateFolder, SavedClientState, StaleMessage
from fedgg.lab.build import build, examined_net
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.engine_setup import DTYPES, arithmetic, chosen_device
from fedgg.lab.local_optimiser import optimiser_of
from fedgg.lab.name_resolution import build_algorithm
from fedgg.lab.personal_parts import personal_model, personal_settings, unseen_epochs, unseen_job

LOG = logging.getLogger("flwr")


def client_app(experiment_file: str | Path, config: Configuration | None = None) -> ClientApp:
    """The ClientApp for an experiment.

    `config` holds defaults for the run config; in Flower's `run_simulation` there is no other way to set it.
    """
    app = ClientApp()
    file, defaults = Path(experiment_file), dict(config or {})
    app.train()(partial(_reply, file, defaults, _train))
    app.evaluate()(partial(_reply, file, defaults, _evaluate))
    app.query("hello")(partial(_reply, file, defaults, _report_client))
    return app


# A client: data, model and algorithm ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ClientTrainer:
    """Everything needed to train one client, except its state."""

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
        """A hash of this client's examples, training and held-out."""
        positions = np.concatenate([self.feed.clients[self.client], self.feed.held_out[self.client]])
        return Examples(self.feed.x[positions], self.feed.y[positions]).fingerprint()

    def job(self, round_: int, received: ReceivedModel, state: SavedClientState | None) -> RoundJob:
        """The training of this client in a round; rounds are counted from 1."""
        number = round_ - 1
        return RoundJob(
            algorithm=self.algorithm,
            net=self.net,
            data=self.feed,
            work=self.work,
            optimiser=optimiser_of(self.experiment, number),
            policy=self.experiment.model.statistics,
            seed=self.experiment.seed,
            round=number,
            cohort=[self.client],
            w=received.w,
            buffers=received.buffers,
            down=received.down,
            memory={} if state is None or not state.memory else {self.client: state.memory},
            kept_buffers={} if state is None or not state.buffers else {self.client: state.buffers},
            **personal_settings(self.experiment, self.work),
        )

    def train(self, round_: int, received: ReceivedModel, state: SavedClientState | None) -> LocalEnd:
        job, client = self.job(round_, received, state), self.client
        with arithmetic(self.experiment):
            end = train_fused(job, client)
            if job.personal_model is None:
                return end
            personal_end = train_fused(personal_job(job), client)
            merged = with_personal_models(job, {client: end}, {client: personal_end})[client]
            assert isinstance(merged, LocalEnd)
            return merged

    def evaluate(self, w: Tensor, buffers: Rows) -> Score:
        """Metrics and loss on the held-out examples of the client."""
        with arithmetic(self.experiment):
            chunks = self.feed.held_out_chunks(self.client)
            return evaluate(fused_net(self.net), w, buffers, chunks)

    def unseen_tensors(self, round_: int, received: ReceivedModel) -> Rows:
        """The personal tensors of a client that never trains, trained for its score."""
        epochs = unseen_epochs(self.experiment)
        if self.net.personal is None or epochs == 0:
            return {}
        job = unseen_job(self.job(round_, received, None), epochs, self.client, received.w, received.buffers)
        with arithmetic(self.experiment):
            return trained_personal_tensors(job, self.client)


@dataclass(frozen=True)
class ReceivedModel:
    """The tensors of a message from the server."""

    w: Tensor
    down: Rows
    buffers: Rows  # the server's, or those of the initial model if none were sent


def trainer_for(experiment_file: Path, config: NodeConfig) -> ClientTrainer:
    """Cached: a process that handles several messages reads its files again only after they have changed."""
    if config.data is None:
        return _trainer_from_source(experiment_file, config.client)
    modified = _modified(experiment_file), _modified(config.data)
    return _trainer_from_file(experiment_file, config.client, config.data, modified)


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _trainer_from_source(experiment_file: Path, client: int) -> ClientTrainer:
    """For a simulation, in which the data set is on this machine."""
    first = _first_trainer_from_source(experiment_file, _modified(experiment_file))
    clients = len(first.feed.clients)
    if client >= clients:
        raise UserError(f"this node is client {client}, but the experiment has {clients} clients, 0 to {clients - 1}")
    return replace(first, client=client)


@lru_cache(maxsize=1)
def _first_trainer_from_source(experiment_file: Path, modified: int) -> ClientTrainer:
    federation = build(load_experiment(experiment_file))
    origin = federation.origin
    return ClientTrainer(
        0,
        federation.experiment,
        federation.algorithm,
        federation.net,
        federation.feed,
        federation.work,
        origin.shape,
        len(origin.classes),
    )


@lru_cache(maxsize=8)
def _trainer_from_file(experiment_file: Path, client: int, data: Path, modified: tuple[int, int]) -> ClientTrainer:
    experiment = load_experiment(experiment_file)
    file = read_client_file(data, experiment)
    if file.client not in (client, -1):
        raise UserError(f"{data} holds the examples of client {file.client}, but this node is client {client}")
    algorithm = build_algorithm(experiment.algorithm.name, experiment.algorithm.settings)
    feed, classes = _feed(file, client, experiment), len(file.classes)
    shape = tuple(file.train.x.shape[1:])
    with arithmetic(experiment):
        try:
            net = examined_net(experiment, algorithm, shape, classes, _sample(feed), parts=file.parts)
        except NeedsFloatingPoint:
            feed = replace(feed, x=feed.x.float(), x_test=feed.x_test.float())
            net = examined_net(experiment, algorithm, shape, classes, _sample(feed), parts=file.parts)
    if net.task.examples_differ:
        feed = replace(feed, weights=net.task.weights)
    local = experiment.local
    work = algorithm.work(local.work())
    return ClientTrainer(client, experiment, algorithm, net, feed, work, shape, classes)


def _sample(feed: Feed) -> tuple[Tensor, Tensor]:
    """Two examples to trace the model with, and their targets, filled up with zeros if the client has fewer."""
    x, y = (
        torch.cat([first, first.new_zeros(2, *first.shape[1:])])[:2] for first in (feed.scaling(feed.x[:2]), feed.y[:2])
    )
    return x, y


def _feed(file: ClientFile, client: int, experiment: Experiment) -> Feed:
    """The examples of this client; the other clients have none here."""
    device, none = chosen_device(experiment), np.empty(0, np.int64)
    x, y = torch.cat([file.train.x, file.held_out.x]), torch.cat([file.train.y, file.held_out.y])
    count = len(file.train.y)
    return Feed(
        x=x.to(device),
        y=y.to(device, DTYPES[experiment.engine.precision] if y.is_floating_point() else y.dtype),
        x_test=x[:0].to(device),
        y_test=y[:0].to(device),
        clients=(*[none] * client, np.arange(count)),
        held_out=(*[none] * client, np.arange(count, len(y))),
        scaling=file.scaling.to(device),
        augmentation=experiment.data.augment,
    )


# Messages -------------------------------------------------------------------------------------------------------------

Handler = Callable[[MessageHeader, ClientTrainer, NodeConfig, Message], RecordDict]


def _reply(file: Path, defaults: Configuration, handle: Handler, message: Message, context: Context) -> Message:
    """Errors are sent to the server as text; a message that failed leaves the client state unchanged."""
    header = MessageHeader("", "", 0, 0, -1)
    try:
        header = messages.header_of(message.content)
        config = node_config(context.node_config, {**defaults, **context.run_config})
        if config.simulated and header.client == ANY_CLIENT:
            info = ClientInfo(config.client, 0, 0, "", 0, "", config.simulated)
            return Message(message_content(header, status=ReplyStatus(), client_info=info), reply_to=message)
        if config.simulated:
            config = config.for_client(header.client)
        trainer = trainer_for(file, config)
        _check_recipient(header, trainer, config, message)
        content = handle(header, trainer, config, message)
    except (UserError, InvalidMessage, StaleMessage) as error:
        LOG.error("%s", error)
        content = message_content(header, status=ReplyStatus(refused=str(error)))
    except Exception as error:  # also an error in a user's algorithm or in fedgg must reach the server
        LOG.exception("the client failed")
        content = message_content(header, status=ReplyStatus(refused=f"{type(error).__name__}: {error}"))
    return Message(content, reply_to=message)


def _check_recipient(header: MessageHeader, trainer: ClientTrainer, config: NodeConfig, message: Message) -> None:
    """The message must be for this experiment and this client; a query does not name the client."""
    if header.experiment != trainer.experiment.trajectory():
        raise InvalidMessage("this node has another experiment than the server: start both from the same app")
    is_query = str(message.metadata.message_type).startswith("query")
    if not is_query and header.client != config.client:
        raise InvalidMessage(f"this node is client {config.client}, not {header.client}")


def _report_client(header: MessageHeader, trainer: ClientTrainer, config: NodeConfig, message: Message) -> RecordDict:
    info = ClientInfo(
        client=config.client,
        examples=trainer.examples,
        held_out=trainer.held_out,
        shape=" ".join(map(str, trainer.shape)),
        classes=trainer.classes,
        data=trainer.fingerprint(),
    )
    return message_content(header, status=ReplyStatus(), client_info=info)


def _train(header: MessageHeader, trainer: ClientTrainer, config: NodeConfig, message: Message) -> RecordDict:
    received = _received(trainer, message.content)
    state_folder, message_id = NodeStateFolder(config.memory, header.run), _message_id(header, message)
    state, state_missing = state_folder.begin(header, message_id, trainer.net.start.device)
    result = trainer.train(header.round, received, state)
    policy = trainer.experiment.model.statistics
    buffers_before = received.buffers
    if policy == "local" and state is not None and state.buffers:
        buffers_before = state.buffers
    _, not_finite = healthy({trainer.client: result}, lambda client: buffers_before)
    if not_finite:
        raise InvalidMessage(not_finite[0].why)
    local_buffers = result.buffers if policy == "local" else {}
    state_folder.save(header, message_id, SavedClientState(result.memory, local_buffers))
    buffers_up = {}
    if policy != "frozen":
        buffers_up = travelling(trainer.net.moving, buffers_before, result.buffers)
    arrays = {"up": to_record(result.up)} | ({"buffers": to_record(buffers_up)} if buffers_up else {})
    metrics = {"loss": float(result.loss)}
    metrics |= {diagnostic_key(name): float(value) for name, value in result.diagnostics.items()}
    note = state_missing if result.memory or local_buffers else ""  # a stateless client misses nothing
    return message_content(header, arrays, status=ReplyStatus(note=note), metrics=metrics)


def _evaluate(header: MessageHeader, trainer: ClientTrainer, config: NodeConfig, message: Message) -> RecordDict:
    received, model = _received(trainer, message.content), messages.evaluated_model(message.content)
    w, buffers = received.w, received.buffers
    if model == "personal":
        state = NodeStateFolder(config.memory, header.run).read(header.met, trainer.net.start.device)
        memory = {} if state is None else state.memory
        w, buffers = personal_model(trainer.net, w, (state and state.buffers) or buffers, memory)
    elif model == "unseen":
        buffers = buffers | trainer.unseen_tensors(header.round, received)
    score = trainer.evaluate(w, buffers)
    metrics = {**score.values, "loss": score.loss}
    return message_content(header, status=ReplyStatus(), metrics=metrics)


def _message_id(header: MessageHeader, message: Message) -> str:
    return f"round {header.round}, attempt {header.attempt}, message {message.metadata.message_id}"


def _received(trainer: ClientTrainer, content: RecordDict) -> ReceivedModel:
    """The tensors of a message; InvalidMessage if they do not fit the model or are not finite."""
    device = trainer.net.start.device
    expected = specs_of({"w": trainer.net.start})
    model = messages.check_specs(_finite_rows(content, "model", device), expected, "the model")
    down = _finite_rows(content, "down", device) if "down" in content else {}
    buffers = trainer.net.start_buffers
    if "buffers" in content:
        sent = from_record(messages.arrays_of(content, "buffers"), device)
        sent = messages.check_subset(sent, specs_of(buffers), "buffers")
        buffers = buffers | messages.check_buffers(buffers, sent, "buffers")
    return ReceivedModel(model["w"], down, buffers)


def _finite_rows(content: RecordDict, name: str, device: torch.device) -> Rows:
    return messages.check_finite(from_record(messages.arrays_of(content, name), device), name)
