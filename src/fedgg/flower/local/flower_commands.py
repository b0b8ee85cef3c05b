"""Command lines of Flower: `flower-superlink`, `flower-supernode` and `flwr`, their arguments and output."""

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
from fedgg.flower.local.namespaces import PrivateNetwork, hiding
from fedgg.flower.local.processes import ProcessSpec, StartedProcess, flower_environment, tail
from fedgg.flower.local.setup import FLOWER_HOME, LOOPBACK, FederationFolder, Listening

SECONDS_TO_START = 60.0  # for a SuperLink to listen, and for a ServerApp to start


def superlink(
    federation: str, paths: FederationFolder, listening: Listening, port: int, network: PrivateNetwork | None = None
) -> ProcessSpec:
    """A SuperLink, from which the nodes' folders are hidden."""
    files = paths.certificates
    command = [
        *hiding(paths.nodes),
        *("flower-superlink", "--host", listening.host, "--port", str(port)),
        *("--database", str(paths.database), "--disable-runtime-dependency-installation"),
    ]
    if listening.tls:
        command += ["--ssl-ca-certfile", str(files.authority)]
        command += ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
    else:
        command += ["--insecure"]
    if listening.authentication:
        command += ["--enable-supernode-auth"]
    environment = flower_environment(paths.server / FLOWER_HOME, listening.reached_at)
    return ProcessSpec(federation, "SuperLink", command, environment, paths.server_log, network)


def supernode(
    federation: str,
    paths: FederationFolder,
    listening: Listening,
    server: str,
    client: int,
    port: int,
    network: PrivateNetwork | None = None,
) -> ProcessSpec:
    """A SuperNode, from which everything in the run folder is hidden except the folder of its client."""
    node = paths.node(client)
    command = [
        *hiding(paths.out, node.folder),
        *("flower-supernode", "--superlink", server, "--host", LOOPBACK, "--port", str(port)),
        *("--node-config", str(node.settings)),
    ]
    command += ["--root-certificates", str(node.authority)] if listening.tls else ["--insecure"]
    if listening.authentication:
        command += ["--auth-supernode-private-key", str(node.key)]
    environment = flower_environment(node.home, listening.reached_at)
    return ProcessSpec(federation, f"client-{client}", command, environment, node.log, network)


def wait_until_listening(link: StartedProcess, address: str, authority: Path | None) -> None:
    """Request the SuperLink's health page, from a process in its network."""
    network = link.spec.network
    url = f"{'https' if authority else 'http'}://{address}/health"
    request = [sys.executable, "-c", REQUEST, url, str(authority or "")]
    while link.age() < SECONDS_TO_START:
        if link.exit_code is not None:
            raise process_error(link, f"ended with code {link.exit_code} instead of listening")
        result = subprocess.run(
            request if network is None else network.inside(request),
            pass_fds=() if network is None else network.descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if result.returncode == 0:
            return
        time.sleep(0.1)
    raise process_error(link, f"does not listen on {address} after {SECONDS_TO_START:.0f} s")


REQUEST = """
import ssl, sys, urllib.request
url, authority = sys.argv[1:]
secure = [urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=authority))] if authority else []
urllib.request.build_opener(urllib.request.ProxyHandler({}), *secure).open(url, timeout=2).close()
"""


def process_error(process: StartedProcess, what: str) -> UserError:
    """An error with the name of the process and the end of its log."""
    log = process.spec.log
    return UserError(f"{process.spec.name} {what}; its log {log} ends with: {tail(log)}")


CONNECTION = "here"  # the name of the SuperLink in Flower's config.toml
TIMEOUT = 60.0  # seconds for one command


@dataclass(frozen=True)
class FlwrCommand:
    """`flwr` for one SuperLink."""

    environment: Mapping[str, str]
    network: PrivateNetwork | None = None  # of the SuperLink; None: the network of this machine

    @classmethod
    def of(
        cls,
        environment: Mapping[str, str],
        address: str,
        authority: Path | None,
        network: PrivateNetwork | None = None,
    ) -> FlwrCommand:
        home = Path(environment["FLWR_HOME"])
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        trust = {"insecure": True} if authority is None else {"root-certificates": str(authority)}
        connections = {"superlink": {"default": CONNECTION, CONNECTION: {"address": address, **trust}}}
        write_text(home / "config.toml", tomli_w.dumps(connections))
        return cls(environment, network)

    def register(self, public_key: Path, name: str) -> int:
        """Let the node with this key join; returns its node id."""
        return int(self._json("supernode", "register", str(public_key), CONNECTION, "--name", name)["node-id"])

    def unregister(self, node: int) -> None:
        self._json("supernode", "unregister", str(node), CONNECTION)

    def submit(self, app: Path, settings: Path) -> int:
        """Start a run; returns its run id."""
        return int(self._json("run", str(app), CONNECTION, "--run-config", str(settings))["run-id"])

    def state(self, run: int) -> tuple[str, str]:
        """Status, such as `running` or `finished:failed`, and details."""
        entry = self._json("list", CONNECTION, "--run-id", str(run))["runs"][0]
        return str(entry["status"]), str(entry.get("status-details") or "")

    def log(self, run: int) -> str:
        """The log of the ServerApp of a run."""
        return self._output("log", str(run), CONNECTION, "--show").stdout

    def _json(self, *words: str) -> dict[str, Any]:
        """The JSON object at the end of the output, which may begin with other text."""
        result = self._output(*words, "--format", "json")
        content = _json_object_in(result.stdout)
        if result.returncode != 0 or not content or content.get("success") is False:
            reason = content.get("error-message") or result.stdout + result.stderr
            raise UserError(f"flwr {' '.join(words)}: {' '.join(str(reason).split())}")
        return content

    def _output(self, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                ["flwr", *words] if self.network is None else self.network.inside(["flwr", *words]),
                env=dict(self.environment),
                pass_fds=() if self.network is None else self.network.descriptors,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                start_new_session=True,  # Ctrl-C must not end it
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"flwr {' '.join(words)}: no output within {TIMEOUT:.0f} s") from None


def _json_object_in(text: str) -> dict[str, Any]:
    """Empty if there is none."""
    start = text.find("{")
    try:
        content = json.loads(text[start:]) if start >= 0 else {}
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
