"""Where the parts of a federation on one machine lie, below its run folder.

federation/app/              the Flower app
federation/server/           the server's: data, certificates and their keys, database, log
federation/nodes/client-N/   a node's own, for nobody else's eyes: its data, key, memory and log
federation/events.jsonl      what happened to the processes: who ended, and was started again
federation/lock              held while the federation is up
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from fedgg.errors import UserError
from fedgg.flower.certificates import Certificates

FLOWER_HOME = ".flwr"  # a dot: its config.toml is not a run's


@dataclass(frozen=True)
class NodePlace:
    """Everything of one node."""

    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data.npz"

    @property
    def memory(self) -> Path:
        return self.folder / "memory"

    @property
    def key(self) -> Path:
        return self.folder / "key"

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def settings(self) -> Path:
        return self.folder / "node.toml"

    @property
    def log(self) -> Path:
        return self.folder / "supernode.log"

    @property
    def home(self) -> Path:
        return self.folder / FLOWER_HOME


@dataclass(frozen=True)
class Places:
    """Everything of one federation."""

    out: Path

    @property
    def folder(self) -> Path:
        return self.out / "federation"

    @property
    def app(self) -> Path:
        return self.folder / "app"

    @property
    def run_settings(self) -> Path:
        return self.folder / "run.toml"

    @property
    def home(self) -> Path:
        return self.folder / FLOWER_HOME

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def server(self) -> Path:
        return self.folder / "server"

    @property
    def server_data(self) -> Path:
        return self.server / "data.npz"

    @property
    def database(self) -> Path:
        return self.server / "superlink.db"

    @property
    def server_log(self) -> Path:
        return self.server / "superlink.log"

    @property
    def app_log(self) -> Path:
        return self.server / "serverapp.log"

    @property
    def certificates(self) -> Certificates:
        return Certificates.within(self.server / "certificates")

    @property
    def nodes(self) -> Path:
        return self.folder / "nodes"

    def node(self, client: int) -> NodePlace:
        return NodePlace(self.nodes / f"client-{client}")

    def make(self, clients: int) -> None:
        own = [self.folder, self.server, self.nodes, *(self.node(client).folder for client in range(clients))]
        for folder in own:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)

    def complete(self, clients: int) -> bool:
        """Whether everybody has their data."""
        files = [self.server_data, *(self.node(client).data for client in range(clients))]
        return all(file.is_file() for file in files)

    def refuse_links(self) -> None:
        """A folder may come from somebody else; what is cleared and written in it must not be elsewhere."""
        nodes = sorted(self.nodes.iterdir()) if self.nodes.is_dir() and not self.nodes.is_symlink() else []
        for place in (self.folder, self.server, self.nodes, self.app, self.home, self.server / FLOWER_HOME, *nodes):
            if place.is_symlink():
                raise UserError(f"{place} is a link, which no federation has: put the folder itself in its place")

    def forget_the_last_time(self) -> None:
        """Numbers that Flower gave out, and a half-finished division, mean nothing to the next start.

        Nor do files of the app: all of them are written again, and Flower would run a module put beside them.
        """
        for file in self.server.glob("superlink.db*"):
            file.unlink()
        homes = [self.home, self.server / FLOWER_HOME, *self.nodes.glob(f"*/{FLOWER_HOME}")]
        for folder in (self.folder / "dividing", self.app, *homes):
            shutil.rmtree(folder, ignore_errors=True)
