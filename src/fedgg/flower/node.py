"""A client on its own machine: its examples, its model, and what it does when a message comes in.

It does one client's part of a round with the fused step, so the numbers are those of the engine `fused`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm
from fedgg.core.evaluate import Score, evaluate
from fedgg.core.local import LocalEnd
from fedgg.core.net import Net
from fedgg.core.plan import Work
from fedgg.core.rows import Rows
from fedgg.core.sgd import learning_rate
from fedgg.data.feed import Feed
from fedgg.engines import RoundJob
from fedgg.engines.base import Optimiser
from fedgg.engines.fused.engine import train_fused
from fedgg.engines.fused.net import fused_net
from fedgg.errors import UserError
from fedgg.flower.files import ClientFile, Examples, read_client
from fedgg.flower.memory import Kept
from fedgg.flower.settings import NodeSettings
from fedgg.lab.arithmetic import arithmetic
from fedgg.lab.build import build, chosen_device, examined_net, work_of
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.parts import build_algorithm


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
            optimiser=Optimiser(learning_rate(local.lr, local.lr_decay, number), local.momentum, local.weight_decay),
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
            return train_fused(job, self.client)

    def score(self, received: Received) -> Score:
        """On what the client keeps back."""
        with arithmetic(self.experiment):
            chunks = self.feed.held_out_chunks(self.client)
            return evaluate(fused_net(self.net), received.w, received.buffers, chunks)


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
