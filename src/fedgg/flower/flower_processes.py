"""Flower's two long-lived processes: the command that starts each, and how to know that it listens."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from fedgg.errors import UserError
from fedgg.flower.cell import REFUSED
from fedgg.flower.places import FLOWER_HOME, Places
from fedgg.flower.ports import LOOPBACK, Listening
from fedgg.flower.private_network import PrivateNetwork
from fedgg.flower.processes import Part, Running, surroundings, tail

TO_START = 60.0  # seconds for a SuperLink to answer, and for a ServerApp to appear


def superlink(
    word: str, places: Places, listening: Listening, port: int, network: PrivateNetwork | None = None
) -> Part:
    """The server; it sees no node's folder."""
    files = places.certificates
    command = [
        *_cell(places.nodes),
        *("flower-superlink", "--host", listening.host, "--port", str(port)),
        *("--database", str(places.database), "--disable-runtime-dependency-installation"),
    ]
    if listening.tls:
        command += ["--ssl-ca-certfile", str(files.authority)]
        command += ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
    else:
        command += ["--insecure"]
    if listening.authentication:
        command += ["--enable-supernode-auth"]
    environment = surroundings(places.server / FLOWER_HOME, listening.reached_at)
    return Part(word, "SuperLink", command, environment, places.server_log, network)


def supernode(
    word: str,
    places: Places,
    listening: Listening,
    server: str,
    client: int,
    port: int,
    network: PrivateNetwork | None = None,
) -> Part:
    """A client; of the run folder it sees its own part alone."""
    place = places.node(client)
    command = [
        *_cell(places.out, place.folder),
        *("flower-supernode", "--superlink", server, "--host", LOOPBACK, "--port", str(port)),
        *("--node-config", str(place.settings)),
    ]
    command += ["--root-certificates", str(place.authority)] if listening.tls else ["--insecure"]
    if listening.authentication:
        command += ["--auth-supernode-private-key", str(place.key)]
    environment = surroundings(place.home, listening.reached_at)
    return Part(word, f"client-{client}", command, environment, place.log, network)


def wait_until_it_answers(link: Running, address: str, authority: Path | None) -> None:
    """Asked by a process in the SuperLink's network, which need not be ours."""
    network = link.part.network
    url = f"{'https' if authority else 'http'}://{address}/health"
    question = [sys.executable, "-c", ASK, url, str(authority or "")]
    while link.age() < TO_START:
        if link.ended is not None:
            raise complaint(link, f"ended with code {link.ended} instead of listening")
        asked = subprocess.run(
            question if network is None else network.inside(question),
            pass_fds=() if network is None else network.descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if asked.returncode == 0:
            return
        time.sleep(0.1)
    raise complaint(link, f"does not answer at {address} after {TO_START:.0f} s")


ASK = """
import ssl, sys, urllib.request
url, authority = sys.argv[1:]
secure = [urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=authority))] if authority else []
urllib.request.build_opener(urllib.request.ProxyHandler({}), *secure).open(url, timeout=2).close()
"""


def complaint(running: Running, what: str) -> UserError:
    """Names the process, where its log lies, and how that ends."""
    log = running.part.log
    return UserError(f"{running.part.name} {what}; its log {log} ends with: {tail(log)}")


def cells_allowed(folder: Path) -> bool:
    """Whether this system gives a process a view of the disk of its own."""
    tried = subprocess.run([*_cell(folder), sys.executable, "-c", ""], capture_output=True, text=True)
    return REFUSED not in tried.stderr


def _cell(hidden: Path, own: Path | None = None) -> list[str]:
    """The words before a command that keep it from reading what is others'."""
    view = [str(hidden)] if own is None else [str(hidden), str(own)]
    return [sys.executable, str(Path(__file__).with_name("cell.py")), *view, "--"]
