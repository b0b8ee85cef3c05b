"""Who takes part: fedgg's engines, two plain loops, and whoever has a folder in `benchmarks/peers`."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fedgg.bench.peers import find_peers, peers_folder
from fedgg.errors import UserError

Device = Literal["cpu", "cuda"]
EVERYWHERE: tuple[Device, ...] = ("cpu", "cuda")
REFERENCE = "tight-2"


@dataclass(frozen=True)
class Contender:
    """A process to start, or the reason why it cannot be."""

    name: str
    label: str
    words: tuple[str, ...]
    kind: Literal["fedgg", "loop", "peer"]
    threads: int = 1  # torch threads of each of its processes
    devices: tuple[Device, ...] = EVERYWHERE
    folder: Path | None = None  # of a peer
    absent: str | None = None


@dataclass(frozen=True)
class EngineEntry:
    """An engine of fedgg's and how it takes part; this version need not have it."""

    name: str
    label: str
    settings: dict[str, Any] = field(default_factory=dict)
    devices: tuple[Device, ...] = EVERYWHERE


# `stacked` and `streams` are made for a GPU; `workers` is given two processes, as the peers are.
ENGINES = (
    EngineEntry("fused", "fedgg fused"),
    EngineEntry("loop", "fedgg loop"),
    EngineEntry("workers", "fedgg workers, 2 processes", {"workers": 2}, ("cpu",)),
    EngineEntry("stacked", "fedgg stacked", {}, ("cuda",)),
    EngineEntry("streams", "fedgg streams", {}, ("cuda",)),
)


def all_contenders(peers: Path | None = None) -> list[Contender]:
    """Everyone, the absent included, in the order in which they take turns."""
    return [*_engines(), *_loops(), *_peers(peers)]


def chosen(
    everyone: Sequence[Contender], device: Device, only: Sequence[str] = (), skip: Sequence[str] = ()
) -> list[Contender]:
    """Those who are wanted and made for this device; a name may be a contender's or its family's, as `pfl`."""
    for name in (*only, *skip):
        if not any(_is_named(contender, name) for contender in everyone):
            names = [contender.name for contender in everyone]
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"unknown contender {name!r}: {hint}choose from {', '.join(names)}")
    wanted = [
        contender
        for contender in everyone
        if device in contender.devices
        and (not only or any(_is_named(contender, name) for name in only))
        and not any(_is_named(contender, name) for name in skip)
    ]
    if not wanted:
        raise UserError(f"nobody is left to measure on {device}: name others with --only, or fewer with --skip")
    return wanted


def _is_named(contender: Contender, name: str) -> bool:
    return name in (contender.name, contender.name.partition("-")[0])


def _engines() -> list[Contender]:
    from fedgg.lab.config import Engine

    known = get_args(Engine.model_fields["name"].annotation)
    return [
        Contender(
            name=f"fedgg-{entry.name}",
            label=entry.label,
            words=(*_module("fedgg_engine"), json.dumps({"name": entry.name, **entry.settings})),
            kind="fedgg",
            devices=entry.devices,
            absent=None if entry.name in known else f"this version of fedgg has no engine {entry.name!r}",
        )
        for entry in ENGINES
    ]


def _loops() -> list[Contender]:
    return [
        Contender("tight-2", "tight loop, 2 threads", _module("tight"), "loop", threads=2),
        Contender("tight-1", "tight loop, 1 thread", _module("tight"), "loop", threads=1, devices=("cpu",)),
        Contender("plain-2", "researcher's loop, 2 threads", _module("plain"), "loop", threads=2),
    ]


def _peers(folder: Path | None) -> list[Contender]:
    return [
        Contender(
            name=entry.name,
            label=entry.label,
            words=(str(peer.python), str(peer.script), *entry.words),
            kind="peer",
            devices=("cpu",),
            folder=peer.folder,
            absent=peer.absent,
        )
        for peer in find_peers(folder or peers_folder())
        for entry in peer.entries
    ]


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"fedgg.bench.runners.{name}")
