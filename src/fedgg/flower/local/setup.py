"""Setup of a federation on one machine, before its processes start: address and ports, and the files in its folder.

federation/app/              the Flower app
federation/server/           data, certificates and keys, database and log of the server
federation/nodes/client-N/   data, key, client state and log of a node, readable by the owner alone (0700)
federation/events.jsonl      a line for each process that ended and was restarted
federation/lock              locked while the federation is up
"""

from __future__ import annotations

import ipaddress
import shutil
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from fedgg.errors import UserError
from fedgg.files import MEGABYTE, read_bytes, read_toml, refuse_links, write_atomically, write_text, writing_to
from fedgg.flower.app_project import write_app
from fedgg.flower.data_files import divide
from fedgg.flower.local.certificates import Certificates, make_certificates
from fedgg.lab.config import Experiment
from fedgg.lab.store import Store

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Listening:
    """The address of the SuperLink, and how it is protected."""

    host: str = LOOPBACK
    tls: bool = True
    authentication: bool = True
    unprotected_beyond_loopback: bool = False  # --insecure-beyond-loopback
    shared_network: bool = False  # --shared-network: other accounts of this machine can reach it

    def __post_init__(self) -> None:
        if self.authentication and not self.tls:
            raise UserError("authentication of nodes needs TLS: with --no-tls also give --no-authentication")
        unprotected = [
            name for name, active in (("TLS", self.tls), ("authentication", self.authentication)) if not active
        ]
        if unprotected and not is_loopback(self.host) and not self.unprotected_beyond_loopback:
            raise UserError(
                f"refused to listen on {self.host} without {' and '.join(unprotected)}: other machines could join or "
                f"read the traffic; leave --host at {LOOPBACK}, or give --insecure-beyond-loopback"
            )

    @property
    def may_be_private(self) -> bool:
        """Whether to use a private network, which other machines and accounts cannot reach."""
        return is_loopback(self.host) and not self.shared_network

    @property
    def reached_at(self) -> str:
        """The address that nodes on this machine use."""
        return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)

    @property
    def names(self) -> list[str]:
        """Host names and addresses for the server's certificate."""
        host_names = [] if is_loopback(self.host) else [socket.gethostname(), socket.getfqdn()]
        names = ["localhost", LOOPBACK, "::1", self.host, *host_names]
        return list(dict.fromkeys(name for name in names if name not in ("0.0.0.0", "::")))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address; a host name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_ports(host: str, count: int) -> list[int]:
    """Different ports that are free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as sockets:
        ports = []
        for _ in range(count):
            probe = sockets.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                probe.bind((host, 0))
            except OSError as error:
                raise UserError(f"cannot listen on {host}: {error.strerror}; choose another --host") from error
            ports.append(int(probe.getsockname()[1]))
        return ports


FLOWER_HOME = ".flwr"  # hidden, so that its config.toml is not taken for that of a run


@dataclass(frozen=True)
class NodeFolder:
    """Paths of one node."""

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
class FederationFolder:
    """Paths of one federation, below the run folder `out`."""

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

    def node(self, client: int) -> NodeFolder:
        return NodeFolder(self.nodes / f"client-{client}")

    def make(self, clients: int) -> None:
        nodes = [self.node(client).folder for client in range(clients)]
        for folder in (self.folder, self.server, self.nodes, *nodes):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)

    def complete(self, clients: int) -> bool:
        """Whether the data files of the server and of all nodes exist."""
        files = [self.server_data, *(self.node(client).data for client in range(clients))]
        return all(file.is_file() for file in files)

    def refuse_links(self) -> None:
        """The run folder may be of unknown origin: a link in it must not redirect what is deleted and written."""
        nodes = sorted(self.nodes.iterdir()) if self.nodes.is_dir() and not self.nodes.is_symlink() else []
        for path in (self.folder, self.server, self.nodes, self.app, self.home, self.server / FLOWER_HOME, *nodes):
            if path.is_symlink():
                raise UserError(f"{path} is a symbolic link: replace it with the folder itself")

    def delete_temporary_files(self) -> None:
        """Flower's database and settings of the last start, an unfinished division of the data, and the app.

        The app is written again. It is deleted first because Flower would also run other modules in its folder.
        """
        for file in self.server.glob("superlink.db*"):
            file.unlink()
        homes = [self.home, self.server / FLOWER_HOME, *self.nodes.glob(f"*/{FLOWER_HOME}")]
        for folder in (self.folder / "dividing", self.app, *homes):
            shutil.rmtree(folder, ignore_errors=True)


def prepare(
    paths: FederationFolder,
    experiment: Experiment,
    listening: Listening,
    settings: dict[str, int | float],
    data: Path | None,
) -> None:
    """Write the data files, new certificates, the app, its run config and the node configs."""
    clients = experiment.split.clients
    paths.refuse_links()
    with writing_to(paths.out):
        refuse_links(paths.folder)  # Flower's processes write below it too
        if Store(paths.out).holds_a_run():
            settings = _saved_settings(paths) | settings
        else:
            shutil.rmtree(paths.nodes, ignore_errors=True)  # left by a run that did not start
            paths.server_data.unlink(missing_ok=True)
        paths.make(clients)
        paths.delete_temporary_files()
        if not paths.complete(clients):
            _divide_data(paths, experiment, data)
        if listening.tls:
            make_certificates(paths.certificates.key.parent, listening.names)
        write_app(paths.app, experiment, {})
        run_config = {"out": str(paths.out), "data": str(paths.server_data), **settings}
        write_text(paths.run_settings, tomli_w.dumps(run_config))
        for client in range(clients):
            node = paths.node(client)
            node.memory.mkdir(mode=0o700, exist_ok=True)
            if listening.tls:
                write_atomically(node.authority, read_bytes(paths.certificates.authority, MEGABYTE))
            node_config = {"client-id": client, "data": str(node.data), "memory": str(node.memory)}
            write_text(node.settings, tomli_w.dumps(node_config))


def _saved_settings(paths: FederationFolder) -> dict[str, int | float]:
    """The run config of the run that is resumed."""
    try:
        config = read_toml(paths.run_settings)
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in config.items() if isinstance(value, int | float)}


def _divide_data(paths: FederationFolder, experiment: Experiment, data_folder: Path | None) -> None:
    """Divide the data in a temporary folder, then move each file to its place."""
    dividing = paths.folder / "dividing"
    dividing.mkdir(mode=0o700)
    divide(experiment, dividing, data_folder)
    destinations = {f"client-{client}": paths.node(client).data for client in range(experiment.split.clients)}
    for name, destination in {"server": paths.server_data, **destinations}.items():
        file = dividing / f"{name}.npz"
        if not file.is_file():
            raise UserError(f"{name} has no data: {file} was not written")
        file.chmod(0o600)
        file.replace(destination)
    shutil.rmtree(dividing)
