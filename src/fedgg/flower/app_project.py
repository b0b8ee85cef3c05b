"""The Flower app as a project: its run config and node config, and the folder that `fedgg flower new` writes.

The folder holds `pyproject.toml`, a ClientApp and a ServerApp of a few lines each, and `experiment.toml`.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedgg.errors import UserError
from fedgg.files import make_folder, write_text, writing_to
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import PartConfig
from fedgg.lab.name_resolution import check_parts, named_parts
from fedgg.lab.trusted_code import VARIABLE
from fedgg.registry import ARRAYS_IN_FILE, HUGGING_FACE, NAMED_PARTS, names_code, nearest

Configuration = Mapping[str, Any]
MAX_EXAMPLES = 1_000_000


# Run config and node config -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunConfig:
    """`[tool.flwr.app.config]` of pyproject.toml, which `flwr run --run-config` overrides."""

    out: Path
    data: Path | None = None
    deadline: float = 600
    wait: float = 120
    attempts: int = 3
    min_clients: int = 0
    max_examples: int = MAX_EXAMPLES
    track: str = ""

    def enough(self, clients: int) -> int:
        """How many of this number of clients must have replied."""
        return min(self.min_clients, clients) if self.min_clients else -(-clients // 2)


MEANINGS = {
    "out": "the run folder, on the server's machine",
    "data": "the server's data file; empty: the data source of the experiment",
    "deadline": "seconds to wait for the replies of clients",
    "wait": "seconds to wait for nodes to connect",
    "attempts": "how often a round with too few replies is tried before the run stops",
    "min_clients": "the fewest replies a round needs; 0: half of its clients",
    "max_examples": "a client that reports more examples is rejected",
    "track": "trackers of the server: tensorboard, wandb, mlflow; several with commas",
}
_TYPES: dict[str, type] = {
    setting.name: {"Path": str, "Path | None": str, "float": float, "int": int, "str": str}[str(setting.type)]
    for setting in fields(RunConfig)
}
_TYPE_NAMES = {str: "text", float: "a number of seconds", int: "an integer"}


def run_config(config: Configuration) -> RunConfig:
    """Other keys are ignored, since the app may have its own; UserError for a key of fedgg written with hyphens."""
    for key in config:
        if key not in _TYPES and key.replace("-", "_") in _TYPES:
            raise UserError(f"run config: unknown key {key!r}{nearest(key, _TYPES)}")
    values = {key: _checked(key, config[key]) for key in _TYPES if config.get(key, "") != ""}
    if "out" not in values:
        raise UserError("run config: name the run folder, as in flwr run --run-config 'out=\"/runs/mine\"'")
    values |= {key: Path(values[key]).expanduser() for key in ("out", "data") if key in values}
    return RunConfig(**values)


def _checked(key: str, value: Any) -> Any:
    kind = _TYPES[key]
    valid = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
    if not valid:
        raise UserError(f"run config: {key} = {value!r} must be {_TYPE_NAMES[kind]}")
    if kind is not str and not math.isfinite(value):
        raise UserError(f"run config: {key} = {value!r} must be finite")
    if kind is not str and value < (1 if key in ("attempts", "max_examples") else 0):
        raise UserError(f"run config: {key} = {value!r} is too small")
    return value


def check_min_clients(experiment: Experiment, min_clients: int) -> None:
    """UserError if `min_clients` is more than the clients of a round."""
    cohort = experiment.cohort_of(experiment.split.clients)
    if min_clients > cohort:
        raise UserError(f"min_clients = {min_clients}, but a round has {cohort} clients: take {cohort} or fewer")


@dataclass(frozen=True)
class NodeConfig:
    """`flower-supernode --node-config`; in a simulation it follows from Flower's `partition-id`."""

    client: int
    data: Path | None  # None: the client's part of the experiment's data source
    memory: Path  # the folder for the client state
    simulated: int = 0  # number of nodes in this simulation: node 1 of 3 stands for clients 1, 4, 7, ...

    def for_client(self, client: int) -> NodeConfig:
        """The config of a simulated node for another of its clients."""
        if client < 0 or (client - self.client) % self.simulated:
            raise UserError(f"simulated node {self.client} of {self.simulated} does not have client {client}")
        return replace(self, client=client, memory=self.memory.with_name(_folder_of(client)))


def node_config(node: Configuration, run: Configuration) -> NodeConfig:
    keys = [key for key in ("client-id", "data", "memory") if key in node]
    if not keys and "partition-id" in node:
        client = int(node["partition-id"])
        memory = run_config(run).out / "nodes" / _folder_of(client)
        return NodeConfig(client, None, memory, simulated=int(node.get("num-partitions", client + 1)))
    if len(keys) < 3:
        raise UserError(
            "node config: a node needs client-id, data and memory, as in "
            '--node-config \'client-id=0 data="client-0.npz" memory="memory"\''
        )
    client = node["client-id"]
    if isinstance(client, bool) or not isinstance(client, int) or client < 0:
        raise UserError(f"node config: client-id = {client!r} must be an integer, 0 or more")
    return NodeConfig(client, Path(str(node["data"])).expanduser(), Path(str(node["memory"])).expanduser())


def _folder_of(client: int) -> str:
    return f"client-{client}"


# The folder of an app -------------------------------------------------------------------------------------------------

LONGEST_NAME = 32  # characters that Flower allows
MODULE = '''"""The {kind} of the experiment in experiment.toml beside this file."""

from pathlib import Path

from fedgg.flower import {function}

app = {function}(Path(__file__).with_name("experiment.toml"))
'''


@dataclass(frozen=True)
class AppNames:
    """The name of the Flower app, and of its Python package."""

    project: str
    package: str

    @classmethod
    def of(cls, folder: Path) -> AppNames:
        """From the folder's name. The suffix `_app` keeps an app called `torch` from shadowing the package."""
        project = re.sub(r"[^A-Za-z0-9]+", "-", folder.resolve().name).strip("-").lower()
        project = project if project[:1].isalpha() else f"app-{project}".rstrip("-")
        project = project[:LONGEST_NAME].rstrip("-")
        return cls(project, f"{project.removesuffix('-app').replace('-', '_')}_app")


def new_app(folder: Path, experiment: Experiment, out: Path) -> AppNames:
    """Write the app into a folder that does not exist or is empty."""
    check_parts(experiment)
    with writing_to(folder, "name another folder"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists and is not empty: name another folder")
        return write_app(folder, with_full_paths(experiment), {"out": str(out.absolute())})


def write_app(folder: Path, experiment: Experiment, config: Mapping[str, str | int | float]) -> AppNames:
    names = AppNames.of(folder)
    package = folder / names.package
    defaults = {setting.name: "" if _TYPES[setting.name] is str else setting.default for setting in fields(RunConfig)}
    make_folder(package, folder)
    write_text(folder / "pyproject.toml", _pyproject(names, defaults | dict(config)))
    write_text(folder / "README.md", _readme(folder, names, experiment))
    write_text(package / "__init__.py", '"""A Flower app written by `fedgg flower new`."""\n')
    for function, kind in (("client_app", "ClientApp"), ("server_app", "ServerApp")):
        write_text(package / f"{function}.py", MODULE.format(kind=kind, function=function))
    write_text(package / "experiment.toml", experiment.to_toml())
    return names


def with_full_paths(experiment: Experiment) -> Experiment:
    """Relative paths in the experiment made absolute: Flower starts its processes in other folders."""
    changes: dict[str, Any] = {}
    kind, _, path = experiment.data.source.partition(":")
    if f"{kind}:" == ARRAYS_IN_FILE or (f"{kind}:" == HUGGING_FACE and path.startswith(".")):
        changes |= {f"data.{setting}": value for setting, value in experiment.data.settings.items()}
        changes["data.source"] = f"{kind}:{Path(path).absolute()}"
    names = named_parts(experiment)
    for key in NAMED_PARTS:
        section, _, last = key.partition(".")
        if names.get(section, "").rpartition(":")[0].endswith(".py"):
            config = getattr(experiment, section)
            # A change of the name removes the section's settings, so they are set again.
            settings = config.model_dump(exclude={last}, exclude_none=True) if isinstance(config, PartConfig) else {}
            changes |= {f"{section}.{setting}": value for setting, value in settings.items()}
            changes[key] = _with_full_path(names[section])
    if (experiment.task.loss or "").rpartition(":")[0].endswith(".py"):
        changes["task.loss"] = _with_full_path(str(experiment.task.loss))
    if any(name.rpartition(":")[0].endswith(".py") for name in experiment.metrics):
        changes["metrics"] = [_with_full_path(name) for name in experiment.metrics]
    if experiment.model.start is not None:
        changes["model.start"] = str(Path(experiment.model.start).absolute())
    return experiment.changed(changes) if changes else experiment


def _with_full_path(name: str) -> str:
    path, _, part = name.rpartition(":")
    return f"{Path(path).absolute()}:{part}" if path.endswith(".py") else name


def _pyproject(names: AppNames, config: Mapping[str, Any]) -> str:
    """`--run-config` overrides only keys that are listed here, so all of them are."""
    return tomli_w.dumps(
        {
            "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
            "project": {
                "name": names.project,
                "version": "1.0.0",
                "description": "An experiment of fedgg on Flower",
                # Flower installs dependencies for every run; fedgg is installed already, with the torch of its machine.
                "dependencies": [],
            },
            "tool": {
                "hatch": {"build": {"targets": {"wheel": {"packages": [names.package]}}}},
                "flwr": {
                    "app": {
                        "publisher": "fedgg",
                        "components": {
                            "serverapp": f"{names.package}.server_app:app",
                            "clientapp": f"{names.package}.client_app:app",
                        },
                        "config": dict(config),
                    }
                },
            },
        }
    )


def _readme(folder: Path, names: AppNames, experiment: Experiment) -> str:
    clients = experiment.split.clients
    settings = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in MEANINGS.items())
    return f"""# {names.project}

A Flower app for the experiment [{names.package}/experiment.toml]({names.package}/experiment.toml): \
{experiment.algorithm.name} on {experiment.data.source}, {clients} clients, {experiment.rounds} rounds. \
Install `pip install 'fedgg[flower]'` on the server and on every node.

## In Flower's simulation

```
flwr run {folder.name} --stream
```

The clients are spread over the nodes of the simulation, of which Flower starts two by default; \
`--federation-config 'num-supernodes={clients} client-resources-num-cpus=1'` gives each client its own node and CPU \
core. The results are the same.

The first run starts a SuperLink that keeps running in the background, with the environment of that command. \
`pkill -f flower-superlink` stops it, and every other SuperLink of yours on this machine.

## As a federation of processes on this machine

```
fedgg flower up --clients {clients} {folder.name}/{names.package}/experiment.toml
```

starts a SuperLink and {clients} SuperNodes, each with its own data file, over TLS and with node authentication.

## In a deployment

Add the SuperLink to `~/.flwr/config.toml` (or `$FLWR_HOME/config.toml`):

```toml
[superlink.ours]
address = "superlink.example.org:8000"
root-certificates = "/path/to/ca.pem"
```

Start each SuperNode with its node config: \
`--node-config 'client-id=0 data="/its/own/client-0.npz" memory="/its/own/folder"'`. Then

```
flwr run {folder.name} ours --stream --run-config 'out="/server/runs/one" data="/server/server.npz"'
```

The paths in the run config are on the machine of the SuperLink. A second run with the same `out` continues after the \
last finished round. docs/flower-deployment.md of fedgg has all commands of a deployment.

{_code_section(experiment)}## Run config

The settings under `[tool.flwr.app.config]` in `pyproject.toml`; `--run-config` overrides them:

| setting | meaning |
| --- | --- |
{settings}

`fedgg report OUT` makes an HTML report of the run folder.
"""


def _code_section(experiment: Experiment) -> str:
    """How to allow the experiment's own code on each machine; empty if it names none."""
    paths = [name.rpartition(":")[0] for name in named_parts(experiment).values() if names_code(name)]
    if not paths:
        return ""
    return f"""## Your own code

The experiment names code that is not part of fedgg. It must be installed under the same name on the server and on every
node, and it runs only if the owner of the machine allows it in the environment of the SuperLink or SuperNode:

```
export {VARIABLE}={shlex.quote(os.pathsep.join(dict.fromkeys(paths)))}
```

"""
