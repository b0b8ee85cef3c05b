"""What a Flower app is told from outside: the run's configuration and the node's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.registry import nearest

Configuration = Mapping[str, Any]
MAX_EXAMPLES = 1_000_000


@dataclass(frozen=True)
class RunSettings:
    """`[tool.flwr.app.config]`, or `flwr run --run-config`."""

    out: Path  # the run folder
    data: Path | None = None  # the server's file; without it, the experiment's source
    deadline: float = 600.0  # seconds for an exchange
    wait: float = 120.0  # seconds to wait for nodes
    attempts: int = 3  # how often a round with too few clients is played
    min_clients: int = 0  # fewer healthy answers than this are too few; 0: half of those asked
    max_examples: int = MAX_EXAMPLES  # a client that claims more is refused

    def enough(self, asked: int) -> int:
        """How many of so many clients must have answered."""
        return min(self.min_clients, asked) if self.min_clients else -(-asked // 2)


def settings_fit(experiment: Experiment, min_clients: int) -> None:
    """UserError where a round could never have as many answers as it needs."""
    asked = experiment.cohort_of(experiment.split.clients)
    if min_clients > asked:
        raise UserError(f"min_clients = {min_clients}, but a round asks {asked} clients: take {asked} or fewer")


@dataclass(frozen=True)
class NodeSettings:
    """`flower-supernode --node-config`; in Flower's simulation, what follows from the number it gives."""

    client: int
    data: Path | None  # without it, the client's part of the experiment's source
    memory: Path
    simulated: int = 0  # nodes in this simulation, which share the clients: node 1 of 3 plays clients 1, 4, 7, ...

    def playing(self, client: int) -> NodeSettings:
        """A simulated node as another of its clients."""
        if client < 0 or (client - self.client) % self.simulated:
            raise UserError(f"simulated node {self.client} of {self.simulated} does not play client {client}")
        return replace(self, client=client, memory=self.memory.with_name(_folder_of(client)))


_KINDS: dict[str, type] = {
    "out": str,
    "data": str,
    "deadline": float,
    "wait": float,
    "attempts": int,
    "min_clients": int,
    "max_examples": int,
}


def run_settings(config: Configuration) -> RunSettings:
    """Flower hands on every key of the app; those of others' are theirs."""
    for key in config:
        if key not in _KINDS and key.replace("-", "_") in _KINDS:
            raise UserError(f"run configuration: unknown key {key!r}{nearest(key, _KINDS)}")
    found = {key: _checked(key, config[key]) for key in _KINDS if config.get(key, "") != ""}
    if "out" not in found:
        raise UserError("run configuration: name the run folder, as in flwr run --run-config 'out=\"/runs/mine\"'")
    found |= {key: Path(found[key]).expanduser() for key in ("out", "data") if key in found}
    return RunSettings(**found)


def node_settings(node: Configuration, run: Configuration) -> NodeSettings:
    own = [key for key in ("client-id", "data", "memory") if key in node]
    if not own and "partition-id" in node:
        client = int(node["partition-id"])
        memory = run_settings(run).out / "nodes" / _folder_of(client)
        return NodeSettings(client, None, memory, simulated=int(node.get("num-partitions", client + 1)))
    if len(own) < 3:
        raise UserError(
            "node configuration: a node needs client-id, data and memory, as in "
            '--node-config \'client-id=0 data="client-0.npz" memory="memory"\''
        )
    client = node["client-id"]
    if isinstance(client, bool) or not isinstance(client, int) or client < 0:
        raise UserError(f"node configuration: client-id = {client!r} must be a whole number, 0 or more")
    return NodeSettings(client, Path(str(node["data"])).expanduser(), Path(str(node["memory"])).expanduser())


def _folder_of(client: int) -> str:
    return f"client-{client}"


def _checked(key: str, value: Any) -> Any:
    kind = _KINDS[key]
    fits = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
    if not fits:
        raise UserError(f"run configuration: {key} = {value!r} must be {_WORDS[kind]}")
    if kind is not str and not math.isfinite(value):
        raise UserError(f"run configuration: {key} = {value!r} must be finite")
    if kind is not str and value < (1 if key in ("attempts", "max_examples") else 0):
        raise UserError(f"run configuration: {key} = {value!r} is too small")
    return value


_WORDS = {str: "text", float: "a number of seconds", int: "a whole number"}
