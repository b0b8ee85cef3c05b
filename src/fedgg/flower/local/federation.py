"""`fedgg flower up`: a SuperLink and its SuperNodes on this machine, supervised until the run has ended.

Who dies is started again. A node comes back under a new key, since Flower takes the old one for alive for a minute. A
server that dies is followed by a new Flower run, which goes on after the last finished round of the run folder.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedgg.errors import UserError
from fedgg.files import make_folder, parse_lines, read_bytes, read_json, write_text
from fedgg.flower.app_config import settings_fit
from fedgg.flower.local.certificates import make_node_key
from fedgg.flower.local.flower_commands import (
    TO_START,
    Control,
    cells_allowed,
    complaint,
    superlink,
    supernode,
    wait_until_it_answers,
)
from fedgg.flower.local.private_network import PrivateNetwork, private_network
from fedgg.flower.local.processes import Running, is_running, surroundings, watched_over
from fedgg.flower.local.setup import LOOPBACK, Listening, Places, free_ports, is_loopback, prepare
from fedgg.lab.build import load_data
from fedgg.lab.config import Experiment
from fedgg.lab.dry_run import try_to_build
from fedgg.lab.store import Store
from fedgg.output_files import writing_to
from fedgg.runfolder.checksums import FILE, append_checked
from fedgg.runfolder.locks import InUse, LockFile
from fedgg.runfolder.records import summary_in


@dataclass
class Lines:
    """A file that grows by a JSON object a line. Each is told once; what was there before us, not at all."""

    file: Path

    def __post_init__(self) -> None:
        self.told = 0
        self.news()

    def news(self) -> list[dict[str, Any]]:
        """What was written since the last look; a line that is not whole yet comes with the next one."""
        try:
            lines = read_bytes(self.file).split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        new: list[dict[str, Any]] = []
        for _, line in parse_lines(b"\n".join(lines[self.told :])):
            if not isinstance(line, dict):
                break
            new.append(line)
        self.told += len(new)
        return new


class History:
    """A run: its rounds, and the exchanges of messages behind them."""

    def __init__(self, out: Path):
        self.rounds, self.exchanges = Lines(out / "rounds.jsonl"), Lines(out / "exchanges.jsonl")
        self._summary = out / "summary.json"
        self._earlier: tuple[int, int] | None = None

    def resume(self) -> None:
        """The run goes on: the summary that is there is of its earlier end."""
        self._earlier = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._summary.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def silent(self) -> dict[int, int]:
        """Clients that have let a deadline pass since the last look, and in which round."""
        return {
            gone["client"]: exchange["round"]
            for exchange in self.exchanges.news()
            for gone in exchange["lost"]
            if str(gone["why"]).startswith("no answer")
        }

    def summary(self, experiment: Experiment) -> dict[str, Any] | None:
        """How the run ended, once it has; the end of a shorter run that is to be followed further is none."""
        if self._earlier is not None and self._identity() == self._earlier:
            return None
        try:
            content = read_json(self._summary)
            summary, _ = summary_in(content, checksum_required=(self._summary.parent / FILE).exists())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{self._summary} cannot be read ({error}): delete it, and it is written again") from error
        over = summary["status"] != "finished" or summary["rounds_done"] >= experiment.rounds
        return summary if over else None


LOOK_EVERY = 0.3  # seconds between two looks at everybody
SHORT_LIFE = 15.0  # seconds: who dies younger has not started
LIVES = 4  # short ones in a row before we give up
ASKED_AT_A_TIME = 4
SERVER_APP = "flwr-serverapp"

Tell = Callable[[str, Any], None]  # kinds: done (rounds so far), phase (a few words), round (its record), notice


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
    with writing_to(out):
        Store(places.out).refuse_another(experiment)
        known = History(places.out).summary(experiment)
    if known is not None and known["status"] != "diverged":
        return known
    settings_fit(experiment, int(settings.get("min_clients", 0)))
    free_ports(listening.reached_at, 1)
    if not places.complete(experiment.split.clients):
        try_to_build(experiment, load_data(experiment.data.source, data_folder))  # before anything is begun
    with _held(places) as lock:
        tell("phase", "dividing the data")
        prepare(places, experiment, listening, settings, data_folder)
        federation = LocalFederation(experiment, places, listening, tell, lock)
        if known is not None:
            tell("notice", f"the run had diverged ({known['why']}): it is resumed from its last good model")
            federation.history.resume()
        return federation.play()


@dataclass
class Node:
    """A SuperNode, the number Flower knows it by, and how many short lives in a row it has had."""

    client: int
    port: int
    running: Running | None = None
    number: int | None = None
    failures: int = 0
    not_before: float = 0.0


class LocalFederation:
    """Held by one process from its first to its last."""

    def __init__(self, experiment: Experiment, places: Places, listening: Listening, tell: Tell, lock: LockFile):
        self.experiment, self.places, self.listening, self.tell = experiment, places, listening, tell
        self.lock = lock
        self.word = secrets.token_hex(8)  # marks its processes
        host = listening.reached_at
        port, *others = free_ports(host, 1 + experiment.split.clients)
        self.port, self.address = port, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.nodes = [Node(client, own) for client, own in enumerate(others)]
        self.authority = places.certificates.authority if listening.tls else None
        self.network: PrivateNetwork | None = None
        self.history = History(places.out)

    # From the first process to the last ----------------------------------------------------------------------------

    def play(self) -> dict[str, Any]:
        """Until the run has its summary; everybody is gone afterwards, whatever happened."""
        self.tell("done", self.history.rounds.told)
        if not cells_allowed(self.places.nodes):
            self.tell("notice", "only permissions keep nodes from each other's data: this system allows no more")
        with ExitStack() as held:
            self.network = held.enter_context(self.network_for_all())
            self.control = Control.of(
                surroundings(self.places.home, self.listening.reached_at), self.address, self.authority, self.network
            )
            self.start = held.enter_context(watched_over(self.word))
            self.start_link()
            self.tell("phase", f"starting {len(self.nodes)} SuperNodes")
            with ThreadPoolExecutor(ASKED_AT_A_TIME) as pool:
                list(pool.map(self.start_node, self.nodes))
            self.submit()
            while (summary := self.history.summary(self.experiment)) is None:
                self.look_at_everybody()
                time.sleep(LOOK_EVERY)
            self.pass_on_news()
        return summary

    @contextmanager
    def network_for_all(self) -> Iterator[PrivateNetwork | None]:
        """A network of their own where there can be one; says in a line who can reach the federation."""
        open_to = "every account of this machine" if is_loopback(self.listening.host) else "everybody who reaches it"
        warning = f"{open_to} can submit an app to {self.address}, and it runs as you: Flower asks for no password"
        if not self.listening.may_be_private:
            self.tell("notice", warning)
            yield None
            return
        with private_network(self.listening.host) as network:
            if isinstance(network, PrivateNetwork):
                self.tell("notice", "the federation has a network of its own: no other account can submit an app to it")
                yield network
            else:
                self.tell("notice", f"{warning}, and this system gives it no network of its own ({network.why})")
                yield None

    def look_at_everybody(self) -> None:
        self.lock.check()
        self.pass_on_news()
        if self.link.ended is not None:
            self.replace_link()
        try:
            self.look_after_nodes()
            self.look_after_run()
        except UserError:
            if self.link.ended is None:
                raise  # else it is the SuperLink's death that was met, and the next look sees to that

    def pass_on_news(self) -> None:
        for record in self.history.rounds.news():
            self.deaths = 0
            self.tell("round", record)
        for client, number in self.history.silent().items():
            self.wake(self.nodes[client], number)

    # The server -----------------------------------------------------------------------------------------------------

    def start_link(self) -> None:
        self.tell("phase", "starting the SuperLink")
        self.link = self.start(superlink(self.word, self.places, self.listening, self.port, self.network))
        wait_until_it_answers(self.link, self.address, self.authority)

    def replace_link(self) -> None:
        self.note("SuperLink", f"ended with code {self.link.ended}; it is started again")
        self.link.end()  # what it left behind
        self.start_link()
        self.submit()

    # The run --------------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        self.tell("phase", "starting the run")
        self.run = self.control.submit(self.places.app, self.places.run_settings)
        self.submitted, self.seen = time.monotonic(), False  # the ServerApp of this run was seen

    def look_after_run(self) -> None:
        """A ServerApp that is gone before the run is over was killed, or has told Flower why it ended."""
        if any(is_running(process, SERVER_APP) for process in self.link.family()):
            if not self.seen:
                self.tell("phase", "playing rounds")
            self.seen = True
            return
        waited = time.monotonic() - self.submitted
        if not self.seen and waited < TO_START / 4:
            return
        state, why = self.control.state(self.run)
        if self.link.ended is not None or self.history.summary(self.experiment) is not None:
            return  # it came to its end while we asked
        if state.startswith("finished"):
            raise self.stopped(state, why)
        if self.seen:
            self.replace_server_app()
        elif waited > TO_START:
            raise complaint(self.link, f"has started no ServerApp in {TO_START:.0f} s, the run is {state}")

    def stopped(self, state: str, why: str) -> UserError:
        """The ServerApp has ended by itself, and Flower knows what it said."""
        write_text(self.places.app_log, self.control.log(self.run))
        reason = why.removeprefix("ServerApp failed with exception:").strip() or f"Flower says {state}, and no more"
        return UserError(
            f"the run stopped before its last round: {reason} (the log of its ServerApp is {self.places.app_log}; "
            f"the same command again goes on in {self.places.out})"
        )

    def replace_server_app(self) -> None:
        self.deaths += 1
        if self.deaths >= LIVES:
            raise complaint(self.link, f"has lost its ServerApp {self.deaths} times without finishing a round")
        self.note("ServerApp", f"died; a new run goes on after round {self.history.rounds.told}")
        self.submit()

    deaths = 0  # of ServerApps since the last finished round

    # The nodes ------------------------------------------------------------------------------------------------------

    def start_node(self, node: Node) -> None:
        if self.listening.authentication:
            self.give_identity(node)
        node.running = self.start(
            supernode(self.word, self.places, self.listening, self.address, node.client, node.port, self.network)
        )

    def give_identity(self, node: Node) -> None:
        """A new key; the server forgets the old one at once, rather than taking it for alive for a minute."""
        if node.number is not None:
            old, node.number = node.number, None
            self.control.unregister(old)
        public = self.places.server / f"client-{node.client}.pub"
        make_node_key(self.places.node(node.client).key, public)
        node.number = self.control.register(public, f"client-{node.client}")

    def look_after_nodes(self) -> None:
        for node in self.nodes:
            if node.running is not None and node.running.ended is not None:
                self.bury(node, node.running)
            if node.running is None and time.monotonic() >= node.not_before:
                self.start_node(node)

    def bury(self, node: Node, dead: Running) -> None:
        """What it left behind goes too. Who dies at once again and again is waited for, then given up."""
        code, lived = dead.ended, dead.age()
        dead.end()
        node.failures = node.failures + 1 if lived < SHORT_LIFE else 0
        if node.failures >= LIVES:
            raise complaint(dead, f"ended with code {code}, {node.failures} times in a row")
        self.note(f"client {node.client}", f"its SuperNode ended with code {code}; it is started again")
        node.running, node.not_before = None, time.monotonic() + 2.0 * node.failures
        (node.port,) = free_ports(LOOPBACK, 1)  # somebody else may have taken the old one

    def wake(self, node: Node, number: int) -> None:
        """Who let a deadline pass may hang, and would in the next round too."""
        if node.running is not None:
            self.note(f"client {node.client}", f"gave no answer in round {number}; its SuperNode is started again")
            node.running.end()
            node.running = None

    def note(self, who: str, what: str) -> None:
        """For whoever watches, and into the run folder."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"when": now, "after_round": self.history.rounds.told, "who": who, "what": what}
        append_checked(self.places.events, line)
        self.tell("notice", f"{who}: {what}")


@contextmanager
def _held(places: Places) -> Iterator[LockFile]:
    """One federation for one run folder."""
    places.refuse_links()
    with writing_to(places.out):
        make_folder(places.folder, places.out, 0o700)
        lock = LockFile(places.lock)
        if not lock.acquire():
            raise InUse(f"{places.out} has a federation that is up: wait for it, or stop it")
    try:
        yield lock
    finally:
        lock.release()
