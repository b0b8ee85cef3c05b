"""`fedgg flower up`: runs a SuperLink and its SuperNodes on this machine and supervises them until the run has ended.

A process that ends early is restarted. A SuperNode is restarted with a new key, because Flower treats the old node as
connected for about a minute. When the ServerApp or the SuperLink ends, a new Flower run resumes the experiment after
the last finished round of the run folder.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedgg.errors import UserError
from fedgg.files import make_folder, parse_lines, read_bytes, read_json, write_text, writing_to
from fedgg.flower.app_project import check_min_clients
from fedgg.flower.local.certificates import make_node_key
from fedgg.flower.local.flower_commands import (
    SECONDS_TO_START,
    FlwrCommand,
    process_error,
    superlink,
    supernode,
    wait_until_listening,
)
from fedgg.flower.local.namespaces import PrivateNetwork, hiding_available, private_network
from fedgg.flower.local.processes import StartedProcess, flower_environment, is_running, supervised
from fedgg.flower.local.setup import LOOPBACK, FederationFolder, Listening, free_ports, is_loopback, prepare
from fedgg.flower.send_and_receive import NO_REPLY
from fedgg.lab.config import Experiment
from fedgg.lab.federated_data import data_of
from fedgg.lab.observer import Observer
from fedgg.lab.preflight_checks import try_to_build
from fedgg.lab.store import Store
from fedgg.runfolder.checksums import FILE, HISTORY, append_checked
from fedgg.runfolder.locks import InUse, LockFile
from fedgg.runfolder.read_rounds import read_intact_rounds
from fedgg.runfolder.validation import summary_in


@dataclass
class JsonLinesTail:
    """New lines of a growing JSON Lines file; those it has at first are counted and not returned."""

    file: Path
    read: Callable[[bytes], list[dict[str, Any]]]  # the objects of a file's content, up to the first damaged line

    def __post_init__(self) -> None:
        self.count = 0
        self.new_lines()

    def new_lines(self) -> list[dict[str, Any]]:
        """Complete lines since the last call."""
        try:
            new = self.read(read_bytes(self.file))[self.count :]
        except FileNotFoundError:
            return []
        self.count += len(new)
        return new


def read_rounds(content: bytes) -> list[dict[str, Any]]:
    """The rounds of rounds.jsonl."""
    return read_intact_rounds(content).rounds


def read_exchanges(content: bytes) -> list[dict[str, Any]]:
    """The complete lines of exchanges.jsonl."""
    complete = content[: content.rfind(b"\n") + 1]
    lines = itertools.takewhile(lambda line: isinstance(line, dict), (line for _, line in parse_lines(complete)))
    return [line for line in lines if isinstance(line, dict)]


class FederationProgress:
    """Progress of a run, read from its run folder: rounds, exchanges, summary."""

    def __init__(self, out: Path):
        self.rounds = JsonLinesTail(out / HISTORY, read_rounds)
        self.exchanges = JsonLinesTail(out / "exchanges.jsonl", read_exchanges)
        self._summary = out / "summary.json"
        self._ignored: tuple[int, int] | None = None

    def ignore_present_summary(self) -> None:
        """The run is resumed, so the present summary is that of its earlier end."""
        self._ignored = self._summary_identity()

    def _summary_identity(self) -> tuple[int, int] | None:
        try:
            status = self._summary.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def clients_without_reply(self) -> dict[int, int]:
        """Clients whose reply has missed a deadline since the last call, with the round."""
        return {
            dropped["client"]: exchange["round"]
            for exchange in self.exchanges.new_lines()
            for dropped in exchange["lost"]
            if str(dropped["why"]).startswith(NO_REPLY)
        }

    def summary(self, experiment: Experiment) -> dict[str, Any] | None:
        """The summary once the run has ended; None for that of a shorter run which is to be continued."""
        if self._ignored is not None and self._summary_identity() == self._ignored:
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


POLL_SECONDS = 0.3
SHORT_LIFE = 15.0  # seconds: a process that ends earlier has failed to start
MAX_FAILURES = 4  # in a row
REGISTRATIONS_AT_A_TIME = 4
SERVER_APP = "flwr-serverapp"


def up(
    experiment: Experiment,
    out: Path,
    *,
    listening: Listening,
    settings: dict[str, int | float],
    data_folder: Path | None,
    observer: Observer,
) -> dict[str, Any]:
    """Run an experiment as a federation of processes, or resume it; returns the summary of the run."""
    paths = FederationFolder(out.absolute())
    with writing_to(out):
        Store(paths.out).refuse_another(experiment)
        summary = FederationProgress(paths.out).summary(experiment)
    if summary is not None and summary["status"] != "diverged":
        return summary
    check_min_clients(experiment, int(settings.get("min_clients", 0)))
    free_ports(listening.reached_at, 1)
    if not paths.complete(experiment.split.clients):
        try_to_build(experiment, data_of(experiment, None, data_folder))  # before anything is written
    with _locked(paths) as lock:
        observer.on_phase(experiment.name, "dividing the data")
        prepare(paths, experiment, listening, settings, data_folder)
        federation = LocalFederation(experiment, paths, listening, observer, lock)
        if summary is not None:
            observer.on_notice(
                experiment.name, f"the run had diverged ({summary['why']}): it is resumed from its last good model"
            )
            federation.progress.ignore_present_summary()
        return federation.run()


@dataclass
class LocalNode:
    """A SuperNode process, its node id at the SuperLink, and how often in a row it failed to start."""

    client: int
    port: int
    process: StartedProcess | None = None
    node_id: int | None = None
    failures: int = 0
    not_before: float = 0.0  # time of the next start


class LocalFederation:
    """The processes of one federation, and their supervision."""

    server_app_failures = 0  # since the last finished round

    def __init__(
        self, experiment: Experiment, paths: FederationFolder, listening: Listening, observer: Observer, lock: LockFile
    ):
        self.experiment, self.paths, self.listening, self.observer = experiment, paths, listening, observer
        self.lock = lock
        self.id = secrets.token_hex(8)  # marks its processes
        host = listening.reached_at
        port, *node_ports = free_ports(host, 1 + experiment.split.clients)
        self.port, self.address = port, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.nodes = [LocalNode(client, node_port) for client, node_port in enumerate(node_ports)]
        self.authority = paths.certificates.authority if listening.tls else None
        self.network: PrivateNetwork | None = None
        self.progress = FederationProgress(paths.out)

    def _notice(self, message: str) -> None:
        self.observer.on_notice(self.experiment.name, message)

    def _phase(self, phase: str) -> None:
        self.observer.on_phase(self.experiment.name, phase)

    def run(self) -> dict[str, Any]:
        """Start all processes and supervise them until the run has a summary; all of them have ended afterwards."""
        self.observer.on_experiment(self.experiment.name, self.experiment)
        self.observer.on_start(self.experiment.name, self.progress.rounds.count, self.experiment.rounds)
        if not hiding_available(self.paths.nodes):
            self._notice("this system has no mount namespaces: file permissions alone protect nodes' data")
        with ExitStack() as stack:
            self.network = stack.enter_context(self.private_network_if_available())
            environment = flower_environment(self.paths.home, self.listening.reached_at)
            self.flwr = FlwrCommand.of(environment, self.address, self.authority, self.network)
            self.start = stack.enter_context(supervised(self.id))
            self.start_superlink()
            self._phase(f"starting {len(self.nodes)} SuperNodes")
            with ThreadPoolExecutor(REGISTRATIONS_AT_A_TIME) as pool:
                list(pool.map(self.start_node, self.nodes))
            self.submit_run()
            while (summary := self.progress.summary(self.experiment)) is None:
                self.check_processes()
                time.sleep(POLL_SECONDS)
            self.report_progress()
        self.observer.on_end(self.experiment.name, summary)
        return summary

    @contextmanager
    def private_network_if_available(self) -> Iterator[PrivateNetwork | None]:
        """Also notifies the user who can reach the federation."""
        who = "every account of this machine" if is_loopback(self.listening.host) else "every machine that reaches it"
        warning = f"{who} can submit an app to {self.address}, which runs with your rights: Flower has no password"
        if not self.listening.may_be_private:
            self._notice(warning)
            yield None
            return
        with private_network(self.listening.host) as network:
            if isinstance(network, PrivateNetwork):
                self._notice("the federation has a private network: no other account can submit an app to it")
                yield network
            else:
                self._notice(f"{warning}; a private network is not available ({network.why})")
                yield None

    def check_processes(self) -> None:
        self.lock.check()
        self.report_progress()
        if self.link.exit_code is not None:
            self.restart_superlink()
        try:
            self.check_nodes()
            self.check_server_app()
        except UserError:
            if self.link.exit_code is None:
                raise  # otherwise the error comes from the end of the SuperLink, which the next check handles

    def report_progress(self) -> None:
        for record in self.progress.rounds.new_lines():
            self.server_app_failures = 0
            self.observer.on_round(self.experiment.name, record)
        for client, number in self.progress.clients_without_reply().items():
            self.restart_node_without_reply(self.nodes[client], number)

    def record_event(self, process: str, event: str) -> None:
        """Into `events.jsonl`, and as a notice."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        line = {"when": now, "after_round": self.progress.rounds.count, "who": process, "what": event}
        append_checked(self.paths.events, line)
        self._notice(f"{process}: {event}")

    # SuperLink and ServerApp ------------------------------------------------------------------------------------------

    def start_superlink(self) -> None:
        self._phase("starting the SuperLink")
        self.link = self.start(superlink(self.id, self.paths, self.listening, self.port, self.network))
        wait_until_listening(self.link, self.address, self.authority)

    def restart_superlink(self) -> None:
        self.record_event("SuperLink", f"ended with code {self.link.exit_code}; restarting it")
        self.link.end()  # its descendants
        self.start_superlink()
        self.submit_run()

    def submit_run(self) -> None:
        self._phase("starting the run")
        self.run_id = self.flwr.submit(self.paths.app, self.paths.run_settings)
        self.submitted_at, self.server_app_seen = time.monotonic(), False

    def check_server_app(self) -> None:
        """A ServerApp that ended before the run was over has failed with an error, or was killed."""
        if any(is_running(process, SERVER_APP) for process in self.link.tree()):
            if not self.server_app_seen:
                self._phase("running rounds")
            self.server_app_seen = True
            return
        waited = time.monotonic() - self.submitted_at
        if not self.server_app_seen and waited < SECONDS_TO_START / 4:
            return
        state, details = self.flwr.state(self.run_id)
        if self.link.exit_code is not None or self.progress.summary(self.experiment) is not None:
            return  # the run or the SuperLink has ended meanwhile
        if state.startswith("finished"):
            raise self.run_failed(state, details)
        if self.server_app_seen:
            self.resume_run()
        elif waited > SECONDS_TO_START:
            raise process_error(self.link, f"has started no ServerApp in {SECONDS_TO_START:.0f} s; the run is {state}")

    def run_failed(self, state: str, details: str) -> UserError:
        """The error of a ServerApp whose failure Flower reports."""
        write_text(self.paths.app_log, self.flwr.log(self.run_id))
        reason = details.removeprefix("ServerApp failed with exception:").strip() or f"Flower reports {state}"
        return UserError(
            f"the run stopped before its last round: {reason} (the log of its ServerApp is {self.paths.app_log}; "
            f"the same command resumes {self.paths.out})"
        )

    def resume_run(self) -> None:
        self.server_app_failures += 1
        if self.server_app_failures >= MAX_FAILURES:
            times = self.server_app_failures
            raise process_error(self.link, f"has lost its ServerApp {times} times without a finished round")
        self.record_event("ServerApp", f"ended; a new Flower run resumes after round {self.progress.rounds.count}")
        self.submit_run()

    # SuperNodes -------------------------------------------------------------------------------------------------------

    def start_node(self, node: LocalNode) -> None:
        if self.listening.authentication:
            self.register_new_key(node)
        node.process = self.start(
            supernode(self.id, self.paths, self.listening, self.address, node.client, node.port, self.network)
        )

    def register_new_key(self, node: LocalNode) -> None:
        """Unregister the old key as well: Flower would treat its node as connected for about a minute."""
        if node.node_id is not None:
            old, node.node_id = node.node_id, None
            self.flwr.unregister(old)
        public = self.paths.server / f"client-{node.client}.pub"
        make_node_key(self.paths.node(node.client).key, public)
        node.node_id = self.flwr.register(public, f"client-{node.client}")

    def check_nodes(self) -> None:
        for node in self.nodes:
            if node.process is not None and node.process.exit_code is not None:
                self.handle_ended_node(node, node.process)
            if node.process is None and time.monotonic() >= node.not_before:
                self.start_node(node)

    def handle_ended_node(self, node: LocalNode, process: StartedProcess) -> None:
        """End its descendants and schedule a restart, with a growing delay; give up after MAX_FAILURES short lives."""
        code, age = process.exit_code, process.age()
        process.end()
        node.failures = node.failures + 1 if age < SHORT_LIFE else 0
        if node.failures >= MAX_FAILURES:
            raise process_error(process, f"ended with code {code}, {node.failures} times in a row")
        self.record_event(f"client {node.client}", f"its SuperNode ended with code {code}; restarting it")
        node.process, node.not_before = None, time.monotonic() + 2.0 * node.failures
        (node.port,) = free_ports(LOOPBACK, 1)  # the old one may be in use

    def restart_node_without_reply(self, node: LocalNode, number: int) -> None:
        """Its process may hang, and would not reply in the next round either."""
        if node.process is not None:
            self.record_event(f"client {node.client}", f"no reply in round {number}; restarting its SuperNode")
            node.process.end()
            node.process = None


@contextmanager
def _locked(paths: FederationFolder) -> Iterator[LockFile]:
    """One federation at a time for a run folder."""
    paths.refuse_links()
    with writing_to(paths.out):
        make_folder(paths.folder, paths.out, 0o700)
        lock = LockFile(paths.lock)
        if not lock.acquire():
            raise InUse(f"{paths.out} has a federation that is up: wait for it, or stop it")
    try:
        yield lock
    finally:
        lock.release()
