"""The federation as the server sees it: its own test set, and clients of whom it knows how many examples they have."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedgg.core.plan import Positions
from fedgg.data.client_batches import Feed
from fedgg.errors import UserError
from fedgg.flower.data_files import Examples, Holding, ServerFile, read_server
from fedgg.flower.messages import Hello
from fedgg.lab.build import assemble, build, chosen_device
from fedgg.lab.client_data import Keeper, WholeData
from fedgg.lab.config import Experiment
from fedgg.lab.federation import Federation

Said = Mapping[int, Hello]


@dataclass(frozen=True, eq=False)
class OnNodes:
    """What the server knows of data that are elsewhere: its own file, and what every client said of its examples."""

    file: ServerFile
    said: Said
    name: str
    keeper: Keeper = "nodes"
    labels_are_words: bool = False  # the names of the classes tell

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.test.x.shape[1:])

    @property
    def classes(self) -> tuple[str, ...]:
        return self.file.classes

    @property
    def client_names(self) -> tuple[str, ...] | None:
        return self.file.client_names

    @property
    def fingerprint(self) -> str:
        parts = [self.file.test.fingerprint(), self.file.proxy.fingerprint()]
        parts += [self.said[client].data for client in sorted(self.said)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def split_hash(self) -> str:
        return self.file.split.get("hash") or self.fingerprint

    def described(self) -> dict[str, Any]:
        """Who holds which class is the clients' own business."""
        scheme, names = self.file.split.get("scheme", "by its owners"), self.client_names
        content = {"scheme": scheme, "hash": self.split_hash(), "classes": list(self.classes), "sizes": self._sizes()}
        return content | ({} if names is None else {"names": list(names)})

    def positions(self) -> dict[str, NDArray[np.int64]]:
        return {"sizes": np.array(self._sizes(), np.int64)}

    def _sizes(self) -> list[int]:
        return [self.said[client].examples + self.said[client].held_out for client in sorted(self.said)]


class ServerData:
    """What the server has before the first client has come: its file, or the experiment's source, as in a simulation.

    What it says of a client's data is what that client must say, too.
    """

    def __init__(self, experiment: Experiment, data: Path | None):
        self.experiment = experiment
        self.file: ServerFile | None = None
        self.whole: Federation | None = None
        if data is None:
            federation = build(experiment)
            assert isinstance(federation.origin, WholeData)
            notices = tuple(sentence for sentence in federation.notices if sentence != federation.choice.notice)
            origin = replace(federation.origin, keeper="nodes")
            self.whole = replace(federation, origin=origin, notices=notices)
            self.shape, self.classes = _written(origin.shape), len(origin.classes)
        else:
            self.file, self.name = read_server(data, experiment), str(data)
            if self.file.clients != experiment.split.clients:
                raise UserError(
                    f"{data} was divided for {self.file.clients} clients, split.clients = {experiment.split.clients}"
                )
            self.shape, self.classes = _written(self.file.test.x.shape[1:]), len(self.file.classes)

    @property
    def is_simulation(self) -> bool:
        return self.whole is not None

    def expected(self, client: int) -> Hello | None:
        """What this client must say of its data; None where that is not known here."""
        if self.whole is not None:
            feed = self.whole.feed
            own = np.concatenate([feed.clients[client], feed.held_out[client]])
            holding = Holding(
                len(feed.clients[client]), len(feed.held_out[client]), Examples(feed.x[own], feed.y[own]).fingerprint()
            )
        elif self.file is not None and self.file.holdings is not None:
            holding = self.file.holdings[client]
        else:
            return None
        return Hello(client, holding.examples, holding.held_out, self.shape, self.classes, holding.fingerprint)

    def nothing_of(self, client: int) -> Hello:
        """In the place of what a client has not said: it has no part in the run."""
        return Hello(client, 0, 0, self.shape, self.classes, "")

    def refusal(self, hello: Hello, max_examples: int) -> str | None:
        """Why a node's claims cannot be taken for true."""
        clients, least = self.experiment.split.clients, 0 if self.experiment.split.allow_empty else 1
        if not 0 <= hello.client < clients:
            return (
                f"it says that it is client {hello.client}, but the experiment has {clients} clients: "
                f"give it a client-id from 0 to {clients - 1}, or set split.clients"
            )
        expected = self.expected(hello.client)
        if expected is not None:
            return _difference(hello, expected)
        if not least <= hello.examples <= max_examples or not 0 <= hello.held_out <= max_examples:
            return (
                f"it says that client {hello.client} has {hello.examples} examples and keeps {hello.held_out} back, "
                f"which may be {least} to max_examples = {max_examples}"
            )
        if (hello.shape, hello.classes) != (self.shape, self.classes):
            return _difference(hello, replace(hello, shape=self.shape, classes=self.classes))
        if not re.fullmatch("[0-9a-f]{64}", hello.data):
            return f"it says that the hash of client {hello.client}'s examples is {hello.data!r}"
        return None

    def federation(self, said: Said) -> Federation:
        if self.whole is not None:
            federation = self.whole
        else:
            assert self.file is not None
            feed = _feed(self.file, said, self.experiment)
            federation = assemble(self.experiment, feed, OnNodes(self.file, said, self.name))
        for client, hello in sorted(said.items()):
            here = (federation.examples[client], len(federation.feed.held_out[client]), self.shape, self.classes)
            if (hello.examples, hello.held_out, hello.shape, hello.classes) != here:
                expected = Hello(client, *here, hello.data)
                raise UserError(str(_difference(hello, expected)))
        return federation


def _written(shape: Sequence[int]) -> str:
    return " ".join(map(str, shape))


def _difference(hello: Hello, expected: Hello) -> str | None:
    """What is another here and there."""
    if hello == expected:
        return None
    there, here = _shown(hello), _shown(expected)
    if there == here:
        return f"client {hello.client} has other examples than the server expects: give both the files of one division"
    return f"client {hello.client} has {there}, where the server expects {here}: give both the files of one division"


def _shown(hello: Hello) -> str:
    return (
        f"{hello.examples} examples and {hello.held_out} kept back, of shape {hello.shape[:30]} "
        f"in {hello.classes} classes"
    )


def _feed(file: ServerFile, said: Said, experiment: Experiment) -> Feed:
    """The server's own examples. Those of clients are counted only: each is a stand-in, the first test example, which
    is looked at when it is found out, before the first round, what an algorithm's clients send."""
    device = chosen_device(experiment)
    x, y = torch.cat([file.proxy.x, file.test.x[:1]]), torch.cat([file.proxy.y, file.test.y[:1]])
    own = Examples(x.to(device), y.to(device))
    elsewhere = len(file.proxy.y)
    everybody = [said[client] for client in range(experiment.split.clients)]

    def counted(count: int) -> Positions:
        return np.broadcast_to(np.int64(elsewhere), count)  # whatever a node claims, one number in memory

    return Feed(
        x=own.x,
        y=own.y,
        x_test=file.test.x.to(device),
        y_test=file.test.y.to(device),
        clients=tuple(counted(hello.examples) for hello in everybody),
        held_out=tuple(counted(hello.held_out) for hello in everybody),
        scaling=file.scaling.to(device),
        augmentation=experiment.data.augment,
        proxy=np.arange(len(file.proxy.y)),
    )
