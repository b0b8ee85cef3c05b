"""A Flower app of a few lines that runs an experiment: `flwr run DIR` does the rest."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedgg.errors import UserError
from fedgg.files import make_folder, write_text
from fedgg.flower.app_config import MAX_EXAMPLES
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import PartConfig
from fedgg.lab.registry import check_parts, named_parts
from fedgg.lab.trust import VARIABLE
from fedgg.output_files import writing_to
from fedgg.registry import ARRAYS_IN_FILE, NAMED_PARTS, names_code

LONGEST_NAME = 32  # letters that Flower allows
SETTINGS: dict[str, str | int | float] = {
    "out": "",
    "data": "",
    "deadline": 600,
    "wait": 120,
    "attempts": 3,
    "min_clients": 0,
    "max_examples": MAX_EXAMPLES,
}

SIDE = '''"""{what}: everything else is in experiment.toml beside this file."""

from pathlib import Path
from typing import Any

from fedgg.flower import {maker}

app = {maker}(Path(__file__).with_name("experiment.toml"))
'''


@dataclass(frozen=True)
class AppNames:
    """What Flower calls the app, and what Python calls its package."""

    project: str
    package: str

    @classmethod
    def of(cls, folder: Path) -> AppNames:
        """From the folder's name; the ending keeps the package from standing before one of the same name."""
        project = re.sub(r"[^A-Za-z0-9]+", "-", folder.resolve().name).strip("-").lower()
        project = project if project[:1].isalpha() else f"app-{project}".rstrip("-")
        project = project[:LONGEST_NAME].rstrip("-")
        return cls(project, f"{project.removesuffix('-app').replace('-', '_')}_app")


def new_app(folder: Path, experiment: Experiment, out: Path) -> AppNames:
    """Write the app into a folder that is not there yet, or empty."""
    check_parts(experiment)
    with writing_to(folder, "name another folder"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is there already: nothing is overwritten; name a folder that is not")
        return write_app(folder, with_full_paths(experiment), {"out": str(out.absolute())})


def write_app(folder: Path, experiment: Experiment, settings: Mapping[str, str | int | float]) -> AppNames:
    names = AppNames.of(folder)
    package = folder / names.package
    make_folder(package, folder)
    write_text(folder / "pyproject.toml", _project(names, SETTINGS | dict(settings)))
    write_text(folder / "README.md", _readme(folder, names, experiment))
    write_text(package / "__init__.py", '"""A Flower app made by `fedgg flower new`."""\n')
    for name, what in (("client_app", "A client's side"), ("server_app", "The server's side")):
        write_text(package / f"{name}.py", SIDE.format(what=what, maker=name))
    write_text(package / "experiment.toml", experiment.to_toml())
    return names


def with_full_paths(experiment: Experiment) -> Experiment:
    """Files the experiment names are found from wherever Flower starts its processes."""
    changes: dict[str, Any] = {}
    if experiment.data.source.startswith(ARRAYS_IN_FILE):
        file = Path(experiment.data.source.removeprefix(ARRAYS_IN_FILE))
        changes["data.source"] = f"{ARRAYS_IN_FILE}{file.absolute()}"
    names = named_parts(experiment)
    for key in NAMED_PARTS:
        section, _, last = key.partition(".")
        place, _, name = names.get(section, "").rpartition(":")
        if place.endswith(".py"):
            config = getattr(experiment, section)
            # Another name drops a section's settings: they are set again.
            settings = config.model_dump(exclude={last}, exclude_none=True) if isinstance(config, PartConfig) else {}
            changes |= {f"{section}.{setting}": value for setting, value in settings.items()}
            changes[key] = f"{Path(place).absolute()}:{name}"
    if experiment.model.start is not None:
        changes["model.start"] = str(Path(experiment.model.start).absolute())
    return experiment.changed(changes) if changes else experiment


def _project(names: AppNames, settings: Mapping[str, str | int | float]) -> str:
    """Every setting that `--run-config` may change must stand here."""
    return tomli_w.dumps(
        {
            "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
            "project": {
                "name": names.project,
                "version": "1.0.0",
                "description": "An experiment of fedgg on Flower",
                # Flower installs what stands here anew for every run; fedgg is there, with the torch of its machine.
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
                        "config": dict(settings),
                    }
                },
            },
        }
    )


def _code_section(experiment: Experiment) -> str:
    """On which machines somebody must allow what; empty where the experiment is all the library's."""
    places = [name.rpartition(":")[0] for name in named_parts(experiment).values() if names_code(name)]
    if not places:
        return ""
    return f"""## Code of your own

The experiment names code that is not part of fedgg. The server and every node need it under the same name, and run it
only where their owner allows it, in the environment of the SuperLink and of the SuperNode:

```
export {VARIABLE}={shlex.quote(os.pathsep.join(dict.fromkeys(places)))}
```

"""


def _readme(folder: Path, names: AppNames, experiment: Experiment) -> str:
    clients = experiment.split.clients
    return f"""# {names.project}

{experiment.algorithm.name} on {experiment.data.source}, {clients} clients, {experiment.rounds} rounds, as
[{names.package}/experiment.toml]({names.package}/experiment.toml) says. Needs `pip install 'fedgg[flower]'` wherever a
part of it runs.

## In Flower's simulation

```
flwr run {folder.name} --stream
```

Flower simulates as many nodes as its configuration says, two at first, and they share the {clients} clients among them;
`--federation-config 'num-supernodes={clients} client-resources-num-cpus=1'` gives each client a node and a core of its
own. The numbers are the same.

The first run starts a SuperLink that stays in the background, with the environment it was started in; `pkill -f
flower-superlink` ends it, and every other SuperLink of yours on this machine.

## A whole federation on this machine

```
fedgg flower up --clients {clients} {folder.name}/{names.package}/experiment.toml
```

starts a SuperLink and {clients} SuperNodes, each with its own data, over TLS and with keys made on the spot.

## Against a deployment

Name its SuperLink in `~/.flwr/config.toml` (or `$FLWR_HOME/config.toml`):

```toml
[superlink.ours]
address = "superlink.example.org:8000"
root-certificates = "/path/to/ca.pem"
```

Each SuperNode says who it is: `--node-config 'client-id=0 data="/its/own/client-0.npz" memory="/its/own/folder"'`. Then

```
flwr run {folder.name} ours --stream --run-config 'out="/server/runs/one" data="/server/server.npz"'
```

The paths are those of the machine on which the SuperLink runs. Started again with the same `out`, it goes on after the
last finished round. fedgg's documentation, "Flower on several machines", has every command.

{_code_section(experiment)}## Settings of a run

They stand under `[tool.flwr.app.config]` in `pyproject.toml`, and `--run-config` changes them:

| setting | meaning |
| --- | --- |
| `out` | the run folder, on the server's machine |
| `data` | the server's data file; empty: what the experiment names |
| `deadline` | seconds that clients have for an answer |
| `wait` | seconds to wait for enough nodes |
| `attempts` | how often a round with too few answers is repeated before the run stops |
| `min_clients` | the fewest answers a round may stand on; 0: half of the clients asked |
| `max_examples` | a client that claims to have more examples is refused |

`fedgg report OUT` makes a page of the run folder.
"""
