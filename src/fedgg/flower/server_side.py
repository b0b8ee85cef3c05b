"""The federation as the server sees it: its own test set, and clients of whom it knows how many examples they have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedgg.core.plan import Positions
from fedgg.data.feed import Feed
from fedgg.errors import UserError
from fedgg.flower.files import Examples, ServerFile, read_server
from fedgg.flower.letters import Hello
from fedgg.lab.build import Federation, assemble, build, chosen_device
from fedgg.lab.config import Experiment
from fedgg.lab.origin import Keeper, WholeData

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


def federation_of(experiment: Experiment, data: Path | None, said: Said) -> Federation:
    """From the server's file, or, where the experiment's source is here (as in a simulation), from that."""
    if data is None:
        federation = build(experiment)
        assert isinstance(federation.origin, WholeData)
        notices = tuple(sentence for sentence in federation.notices if sentence != federation.choice.notice)
        federation = replace(federation, origin=replace(federation.origin, keeper="nodes"), notices=notices)
    else:
        file = read_server(data, experiment)
        if file.clients != experiment.split.clients:
            raise UserError(
                f"{data} was divided for {file.clients} clients, split.clients = {experiment.split.clients}"
            )
        federation = assemble(experiment, _feed(file, said, experiment), OnNodes(file, said, str(data)))
    _compare(federation, said)
    return federation


def _compare(federation: Federation, said: Said) -> None:
    shape, classes = " ".join(map(str, federation.origin.shape)), len(federation.origin.classes)
    for client, hello in sorted(said.items()):
        here = (federation.examples[client], len(federation.feed.held_out[client]), shape, classes)
        there = (hello.examples, hello.held_out, hello.shape, hello.classes)
        if here != there:
            raise UserError(
                f"client {client} has {_shown(*there)}, where the server expects {_shown(*here)}: "
                f"give both the files of one division"
            )


def _shown(examples: int, held_out: int, shape: str, classes: int) -> str:
    return f"{examples} examples and {held_out} kept back, of shape {shape} in {classes} classes"


def _feed(file: ServerFile, said: Said, experiment: Experiment) -> Feed:
    """The server's own examples. Those of clients are counted only: each is a stand-in, the first test example, which
    is looked at when it is found out, before the first round, what an algorithm's clients send."""
    device = chosen_device(experiment)
    x, y = torch.cat([file.proxy.x, file.test.x[:1]]), torch.cat([file.proxy.y, file.test.y[:1]])
    own = Examples(x.to(device), y.to(device))
    elsewhere = len(file.proxy.y)
    everybody = [said[client] for client in range(experiment.split.clients)]

    def counted(count: int) -> Positions:
        return np.full(count, elsewhere, np.int64)

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
