"""The Flower commands that are called: SuperLink, SuperNode and `flwr`, their arguments and their output."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedgg.errors import UserError
from fedgg.files import write_text
from fedgg.flower.local.private_network import PrivateNetwork
from fedgg.flower.local.processes import Part, Running, surroundings, tail
from fedgg.flower.local.sandbox import REFUSED
from fedgg.flower.local.setup import FLOWER_HOME, LOOPBACK, Listening, Places

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
    return [sys.executable, str(Path(__file__).with_name("sandbox.py")), *view, "--"]


CONNECTION = "here"
TIMEOUT = 60.0  # seconds for one question


@dataclass(frozen=True)
class Control:
    """The address of a SuperLink, and the environment in which `flwr` finds it."""

    environment: Mapping[str, str]
    network: PrivateNetwork | None = None  # in which the SuperLink is; None: that of this machine

    @classmethod
    def of(
        cls,
        environment: Mapping[str, str],
        address: str,
        authority: Path | None,
        network: PrivateNetwork | None = None,
    ) -> Control:
        home = Path(environment["FLWR_HOME"])
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        trust = {"insecure": True} if authority is None else {"root-certificates": str(authority)}
        connections = {"superlink": {"default": CONNECTION, CONNECTION: {"address": address, **trust}}}
        write_text(home / "config.toml", tomli_w.dumps(connections))
        return cls(environment, network)

    def register(self, public_key: Path, name: str) -> int:
        """From now on the owner of this key may join; the number Flower gives it."""
        return int(self._ask("supernode", "register", str(public_key), CONNECTION, "--name", name)["node-id"])

    def unregister(self, node: int) -> None:
        self._ask("supernode", "unregister", str(node), CONNECTION)

    def submit(self, app: Path, settings: Path) -> int:
        """Start a run; its number."""
        return int(self._ask("run", str(app), CONNECTION, "--run-config", str(settings))["run-id"])

    def state(self, run: int) -> tuple[str, str]:
        """As `running` or `finished:failed`, and what Flower says of it."""
        told = self._ask("list", CONNECTION, "--run-id", str(run))["runs"][0]
        return str(told["status"]), str(told.get("status-details") or "")

    def log(self, run: int) -> str:
        """What the ServerApp of a run has said."""
        return self._said("log", str(run), CONNECTION, "--show").stdout

    def _ask(self, *words: str) -> dict[str, Any]:
        """Flower prints sentences too; the answer is the JSON object at the end."""
        done = self._said(*words, "--format", "json")
        answer = _object_in(done.stdout)
        if done.returncode != 0 or not answer or answer.get("success") is False:
            reason = answer.get("error-message") or done.stdout + done.stderr
            raise UserError(f"flwr {' '.join(words)}: {' '.join(str(reason).split())}")
        return answer

    def _said(self, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                ["flwr", *words] if self.network is None else self.network.inside(["flwr", *words]),
                env=dict(self.environment),
                pass_fds=() if self.network is None else self.network.descriptors,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                start_new_session=True,  # Ctrl-C is ours
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"flwr {' '.join(words)}: no answer within {TIMEOUT:.0f} s") from None


def _object_in(text: str) -> dict[str, Any]:
    """Empty where there is none."""
    start = text.find("{")
    try:
        found = json.loads(text[start:]) if start >= 0 else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
