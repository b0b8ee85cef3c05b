"""Files and ports of a federation on one machine, made before its processes start.

federation/app/              the Flower app
federation/server/           the server's: data, certificates and their keys, database, log
federation/nodes/client-N/   a node's own, for nobody else's eyes: its data, key, memory and log
federation/events.jsonl      what happened to the processes: who ended, and was started again
federation/lock              held while the federation is up
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
from fedgg.files import MEGABYTE, read_bytes, read_toml, refuse_links, write_atomically, write_text
from fedgg.flower.app_folder import write_app
from fedgg.flower.data_files import divide
from fedgg.flower.local.certificates import Certificates, make_certificates
from fedgg.lab.config import Experiment
from fedgg.lab.store import Store
from fedgg.output_files import writing_to

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Listening:
    """The SuperLink's address, and how it is protected."""

    host: str = LOOPBACK
    tls: bool = True
    authentication: bool = True
    unprotected_beyond_loopback: bool = False  # said explicitly
    shared_network: bool = False  # said explicitly: other accounts of this machine reach it, too

    def __post_init__(self) -> None:
        if self.authentication and not self.tls:
            raise UserError("nodes prove who they are over TLS only: with --no-tls say --no-authentication too")
        unprotected = [
            word for word, there in (("TLS", self.tls), ("authentication", self.authentication)) if not there
        ]
        if unprotected and not is_loopback(self.host) and not self.unprotected_beyond_loopback:
            raise UserError(
                f"refused to listen on {self.host} without {' and '.join(unprotected)}: everybody who reaches it could "
                f"join or read along; leave --host at {LOOPBACK}, or say --insecure-beyond-loopback"
            )

    @property
    def may_be_private(self) -> bool:
        """Whether a network of its own is wanted: what is reached from other machines cannot have one."""
        return is_loopback(self.host) and not self.shared_network

    @property
    def reached_at(self) -> str:
        """The address that nodes on this machine use."""
        return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)

    @property
    def names(self) -> list[str]:
        """Everything the server's certificate must say it is."""
        own = [] if is_loopback(self.host) else [socket.gethostname(), socket.getfqdn()]
        wanted = ["localhost", LOOPBACK, "::1", self.host, *own]
        return list(dict.fromkeys(name for name in wanted if name not in ("0.0.0.0", "::")))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it; a name that is not known is not trusted."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_ports(host: str, count: int) -> list[int]:
    """Different ports that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as held:
        ports = []
        for _ in range(count):
            probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                probe.bind((host, 0))
            except OSError as error:
                raise UserError(f"cannot listen on {host}: {error.strerror}; choose another --host") from error
            ports.append(int(probe.getsockname()[1]))
        return ports


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


def prepare(
    places: Places, experiment: Experiment, listening: Listening, settings: dict[str, int | float], data: Path | None
) -> None:
    """Data in the hands of their owners, the app, its settings; certificates anew each time."""
    clients = experiment.split.clients
    places.refuse_links()
    with writing_to(places.out):
        refuse_links(places.folder)  # Flower's processes write below it, too
        if Store(places.out).holds_a_run():
            settings = _said_before(places) | settings
        else:
            shutil.rmtree(places.nodes, ignore_errors=True)  # data and memories of a run that never began
            places.server_data.unlink(missing_ok=True)
        places.make(clients)
        places.forget_the_last_time()
        if not places.complete(clients):
            _hand_out(places, experiment, data)
        if listening.tls:
            make_certificates(places.certificates.key.parent, listening.names)
        write_app(places.app, experiment, {})
        whole = {"out": str(places.out), "data": str(places.server_data), **settings}
        write_text(places.run_settings, tomli_w.dumps(whole))
        for client in range(clients):
            place = places.node(client)
            place.memory.mkdir(mode=0o700, exist_ok=True)
            if listening.tls:
                write_atomically(place.authority, read_bytes(places.certificates.authority, MEGABYTE))
            own = {"client-id": client, "data": str(place.data), "memory": str(place.memory)}
            write_text(place.settings, tomli_w.dumps(own))


def _said_before(places: Places) -> dict[str, int | float]:
    """The settings of the run that is taken up again; those given now come before them."""
    try:
        before = read_toml(places.run_settings)
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in before.items() if isinstance(value, int | float)}


def _hand_out(places: Places, experiment: Experiment, data_folder: Path | None) -> None:
    """Divide beside the places, then move each file to its owner."""
    dividing = places.folder / "dividing"
    dividing.mkdir(mode=0o700)
    divide(experiment, dividing, data_folder)
    owners = {f"client-{client}": places.node(client).data for client in range(experiment.split.clients)}
    for name, place in {"server": places.server_data, **owners}.items():
        file = dividing / f"{name}.npz"
        if not file.is_file():
            raise UserError(f"{name} got no data: {file} was not written")
        file.chmod(0o600)
        file.replace(place)
    shutil.rmtree(dividing)
