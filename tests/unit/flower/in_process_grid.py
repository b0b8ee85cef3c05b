"""A Flower grid in one process, in place of the network; ClientApps, messages and their serialization are real.

It can lose, repeat, delay and change messages, and nodes can be added and removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from observers import Callbacks

import fedgg
from fedgg.flower import client_app, divide
from fedgg.flower.app_project import RunConfig
from fedgg.flower.server import run_on_grid
from fedgg.lab.config import Experiment

Deliver = Callable[[], Message]
Carry = Callable[[Message, Deliver], list[Message]]  # (message, function that delivers it) -> replies that arrive
Record = dict[str, Any]


def unchanged(question: Message, deliver: Deliver) -> list[Message]:
    return [deliver()]


@dataclass
class Node:
    app: ClientApp
    config: dict[str, Any]


@dataclass
class InProcessGrid(Grid):
    nodes: dict[int, Node]
    run_config: dict[str, Any]
    carry: Carry = unchanged
    held: Callable[[Message], int] = lambda question: 0  # how many polls until the reply is there
    boxes: dict[str, list[Message]] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    looks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            question = serialized(message)
            self.boxes[number] = [serialized(reply) for reply in self.carry(question, lambda q=question: self._ask(q))]  # type: ignore[misc]
            self.looks[number] = self.held(question)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        there = []
        for number in message_ids:
            self.looks[number] -= 1
            if self.looks[number] < 0:
                there += self.boxes.pop(number, [])
        return there

    def _ask(self, question: Message) -> Message:
        node = self.nodes[question.metadata.dst_node_id]
        return node.app(question, self._context(node, question))

    def _context(self, node: Node, question: Message) -> Context:
        """A new one for each message: client state must not depend on Flower's context."""
        return Context(1, question.metadata.dst_node_id, dict(node.config), RecordDict(), dict(self.run_config))

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **more: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def serialized(message: Message) -> Message:
    """Serialized and deserialized."""
    return message_from_proto(message_to_proto(message))


@dataclass
class Federation:
    """An experiment, its divided data, its nodes and its run folder, all under one folder."""

    experiment: Experiment
    folder: Path
    grid: InProcessGrid = field(init=False)
    notices: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "data").exists():
            divide(self.experiment, self.folder / "data")
        self.file.write_text(self.experiment.to_toml())
        clients = range(self.experiment.split.clients)
        self.grid = InProcessGrid({100 + client: self.node(client) for client in clients}, {})

    @property
    def file(self) -> Path:
        return self.folder / "experiment.toml"

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def node(self, client: int) -> Node:
        config = {"client-id": client, "data": str(self.folder / "data" / f"client-{client}.npz")}
        return Node(client_app(self.file), config | {"memory": str(self.memory(client))})

    def memory(self, client: int) -> Path:
        return self.folder / f"node-{client}" / "memory"

    def run(self, rounds: int | None = None) -> fedgg.Run:
        experiment = self.experiment if rounds is None else self.experiment.changed({"rounds": rounds})
        chosen: dict[str, Any] = {"out": self.out, "data": self.folder / "data" / "server.npz"}
        settings = RunConfig(**(chosen | {"deadline": 0.5, "wait": 0.5} | self.settings))
        return run_on_grid(self.grid, experiment, settings, Callbacks(notice=self.notices.append))


def remove_client_summaries(federation: Federation) -> None:
    """As with files that `divide` did not write: the server's file has no numbers of the clients' examples."""
    path = federation.folder / "data" / "server.npz"
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files if name not in ("sizes", "fingerprints")}
    np.savez_compressed(path, **arrays)


def same(one: fedgg.Run, other: fedgg.Run) -> None:
    """The same weights and the same history, bit for bit, except for the seconds."""
    assert [line | {"seconds": 0} for line in one.rounds] == [line | {"seconds": 0} for line in other.rounds]
    assert one.weights.keys() == other.weights.keys()
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, other.weights[name]), name


SMALL: dict[str, Any] = {
    "rounds": 4,
    "seed": 3,
    "split": {"clients": 4, "beta": 0.5},
    "model": {"name": "mlp", "hidden": 16},
    "local": {"epochs": 1, "batch": 32, "lr": 0.05, "lr_decay": 0.9},
    "server": {"cohort": 3},
    "engine": {"name": "fused", "precision": "fp64"},
}


def small(**changes: Any) -> Experiment:
    return Experiment(**SMALL).changed({key.replace("__", "."): value for key, value in changes.items()})
