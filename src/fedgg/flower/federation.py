"""A whole federation on this machine: a SuperLink and its SuperNodes, looked after until the run is over.

Who dies is started again. A node comes back under a new key, since Flower takes the old one for alive for a minute. A
server that dies is followed by a new Flower run, which goes on after the last finished round of the run folder.
"""

from __future__ import annotations

import json
import secrets
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedgg.errors import UserError
from fedgg.flower.control import Control
from fedgg.flower.history import History
from fedgg.flower.keys import make_node_key
from fedgg.flower.places import Places
from fedgg.flower.ports import LOOPBACK, Listening, free_ports
from fedgg.flower.prepared import prepare
from fedgg.flower.processes import Part, Running, start, surroundings, tail, watched_over
from fedgg.lab.config import Experiment

LOOK_EVERY = 0.3  # seconds between two looks at everybody
TO_START = 60.0  # seconds for a SuperLink to answer, and for a ServerApp to appear
SHORT_LIFE = 15.0  # seconds: who dies younger has not started
LIVES = 4  # short ones in a row before we give up
ASKED_AT_A_TIME = 4

Tell = Callable[[str, Any], None]  # kinds: notice (a sentence), phase (a few words), round (its record)


@dataclass
class Node:
    """A SuperNode, the number Flower knows it by, and how many short lives it has had."""

    client: int
    running: Running | None = None
    number: int | None = None
    failures: int = 0
    not_before: float = 0.0


@dataclass
class LocalFederation:
    """Held by one process from its first to its last."""

    experiment: Experiment
    places: Places
    listening: Listening
    tell: Tell
    word: str = field(default_factory=lambda: secrets.token_hex(8))  # marks its processes

    def __post_init__(self) -> None:
        ports = free_ports(self.listening.reached_at, 1 + self.experiment.split.clients)
        self.port, self.node_ports = ports[0], ports[1:]
        self.nodes = [Node(client) for client in range(self.experiment.split.clients)]
        self.history = History(self.places.out)
        self.run: int | None = None
        self.submitted = 0.0
        self.seen = False  # the ServerApp of this run
        self.lives = 0  # of ServerApps since the last finished round
        self.link: Running | None = None

    # From the first process to the last --------------------------------------------------------------------------------

    def play(self) -> dict[str, Any]:
        """Until the run has its summary; everybody is gone afterwards, whatever happened."""
        with watched_over(self.word):
            self.tell("phase", "starting the SuperLink")
            self.start_link()
            self.tell("phase", f"starting {len(self.nodes)} SuperNodes")
            with ThreadPoolExecutor(ASKED_AT_A_TIME) as pool:
                list(pool.map(self.start_node, self.nodes))
            self.submit()
            while (summary := self.history.summary(self.experiment)) is None:
                self.pass_on_news()
                self.look_after_link()
                self.look_after_nodes()
                self.look_after_run()
                time.sleep(LOOK_EVERY)
            self.pass_on_news()
        return summary

    def pass_on_news(self) -> None:
        for record in self.history.news():
            self.lives = 0
            self.tell("round", record)
            for lost in record["lost"]:
                if lost["why"].startswith("no answer"):
                    self.wake(self.nodes[lost["client"]], record["round"])

    # The server ---------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        host = self.listening.reached_at
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def start_link(self) -> None:
        files = self.places.certificates
        command = [
            *_cell(self.places.nodes),
            *("flower-superlink", "--host", self.listening.host, "--port", str(self.port)),
            *("--database", str(self.places.database), "--disable-runtime-dependency-installation"),
        ]
        if self.listening.tls:
            command += ["--ssl-ca-certfile", str(files.authority)]
            command += ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
        else:
            command += ["--insecure"]
        if self.listening.authentication:
            command += ["--enable-supernode-auth"]
        environment = surroundings(self.places.server / ".flwr", self.listening.reached_at)
        self.link = start(Part(self.word, "SuperLink", command, environment, self.places.server_log))
        authority = files.authority if self.listening.tls else None
        own = surroundings(self.places.home, self.listening.reached_at)
        self.control = Control.of(own, self.address, authority)
        self.wait_for_link(self.link, authority)

    def wait_for_link(self, link: Running, authority: Path | None) -> None:
        trust = ssl.create_default_context(cafile=authority) if authority else None
        question = f"{'https' if authority else 'http'}://{self.address}/health"
        direct = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=trust)] if trust else [])
        )
        while link.age() < TO_START:
            if link.ended is not None:
                raise self.complaint(link, f"ended with code {link.ended} instead of listening")
            try:
                with direct.open(question, timeout=2):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.1)
        raise self.complaint(link, f"does not answer at {self.address} after {TO_START:.0f} s")

    def look_after_link(self) -> None:
        assert self.link is not None
        if self.link.ended is None:
            return
        self.note("SuperLink", f"ended with code {self.link.ended}; started again")
        self.link.end()  # what it left behind
        self.start_link()
        self.submit()

    # The run ------------------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        self.tell("phase", "starting the run")
        self.run = self.control.submit(self.places.app, self.places.run_settings)
        self.submitted, self.seen = time.monotonic(), False

    def look_after_run(self) -> None:
        """A ServerApp that is gone before the run is over was killed, or has said why."""
        assert self.link is not None
        assert self.run is not None
        if any(_is_server_app(process) for process in self.link.family()):
            if not self.seen:
                self.tell("phase", "rounds")
            self.seen = True
            return
        if not self.seen and time.monotonic() - self.submitted < TO_START:
            state, why = ("", "") if self.young() else self.control.state(self.run)
            if not state.startswith("finished"):
                return
        if self.link.ended is not None or self.history.summary(self.experiment) is not None:
            return  # the next look sees to that
        state, why = self.control.state(self.run)
        if state.startswith("finished") or not self.seen:
            raise self.complaint(self.link, f"the run ended without an end ({state}: {' '.join(why.split())})")
        self.lives += 1
        if self.lives >= LIVES:
            raise self.complaint(self.link, f"the ServerApp died {self.lives} times without finishing a round")
        self.note("ServerApp", f"died; a new run goes on after round {self.history.told}")
        self.submit()

    def young(self) -> bool:
        return time.monotonic() - self.submitted < 10

    # The nodes ----------------------------------------------------------------------------------------------------------

    def start_node(self, node: Node) -> None:
        place = self.places.node(node.client)
        command = [
            *_cell(self.places.out, place.folder),
            *("flower-supernode", "--superlink", self.address),
            *("--host", LOOPBACK, "--port", str(self.node_ports[node.client])),
            *("--node-config", str(place.settings)),
        ]
        command += ["--root-certificates", str(place.authority)] if self.listening.tls else ["--insecure"]
        if self.listening.authentication:
            node.number = self.new_identity(node)
            command += ["--auth-supernode-private-key", str(place.key)]
        environment = surroundings(place.home, self.listening.reached_at)
        node.running = start(Part(self.word, f"client-{node.client}", command, environment, place.log))

    def new_identity(self, node: Node) -> int:
        """The server forgets the old key at once, rather than taking it for alive for a minute."""
        place, public = self.places.node(node.client), self.places.server / f"client-{node.client}.pub"
        if node.number is not None:
            self.control.unregister(node.number)
        make_node_key(place.key, public)
        return self.control.register(public, f"client-{node.client}")

    def look_after_nodes(self) -> None:
        for node in self.nodes:
            if node.running is not None and node.running.ended is not None:
                self.bury(node, node.running)
            if node.running is None and time.monotonic() >= node.not_before:
                self.start_node(node)

    def bury(self, node: Node, dead: Running) -> None:
        """What it left behind goes too; who dies again and again is started less and less often, then not at all."""
        dead.end()
        node.failures = node.failures + 1 if dead.age() < SHORT_LIFE else 0
        if node.failures >= LIVES:
            raise self.complaint(dead, f"ended with code {dead.ended}, {node.failures} times in a row")
        self.note(f"client {node.client}", f"its SuperNode ended with code {dead.ended}; started again")
        node.running, node.not_before = None, time.monotonic() + 2.0 * node.failures

    def wake(self, node: Node, number: int) -> None:
        """Who let a deadline pass may hang, and would in the next round too."""
        if node.running is None:
            return
        self.note(f"client {node.client}", f"gave no answer in round {number}; its SuperNode is started again")
        node.running.end()
        node.running = None

    # What is said -------------------------------------------------------------------------------------------------------

    def note(self, who: str, what: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with self.places.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"when": now, "after_round": self.history.told, "who": who, "what": what}) + "\n")
        self.tell("notice", f"{who}: {what}")

    def complaint(self, running: Running, what: str) -> UserError:
        log = running.part.log
        return UserError(f"{running.part.name} {what}; its log {log} ends with: {tail(log)}")


def up(
    experiment: Experiment,
    out: Path,
    *,
    listening: Listening,
    settings: dict[str, int | float],
    data_folder: Path | None,
    tell: Tell,
) -> dict[str, Any]:
    """Run an experiment as a federation of processes, or go on with it; how it ended."""
    places = Places(out.absolute())
    known = History(places.out).summary(experiment)
    if known is not None:
        return known
    with held(places):
        prepare(places, experiment, listening, settings, data_folder)
        return LocalFederation(experiment, places, listening, tell).play()


@contextmanager
def held(places: Places) -> Iterator[None]:
    """One federation for one run folder."""
    places.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(places.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{places.out} has a federation that is up: wait for it, or stop it") from None
    try:
        yield
    finally:
        lock.release()


def _cell(hidden: Path, own: Path | None = None) -> list[str]:
    """The words before a command that keep it from reading what is others'."""
    view = [str(hidden)] if own is None else [str(hidden), str(own)]
    return [sys.executable, str(Path(__file__).with_name("cell.py")), *view, "--"]


def _is_server_app(process: Any) -> bool:
    try:
        return any(word.endswith("flwr-serverapp") for word in process.cmdline()[:3])
    except Exception:  # it ended while we looked
        return False
