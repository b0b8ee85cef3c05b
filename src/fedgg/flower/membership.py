"""Membership of a run: which Flower node is which client, and `flower.json`, which keeps it for a resumed run.

Flower's node ids are random, and a node that reconnects may have a new one. So each new node is queried for its client
(`ClientInfo`), and the membership is updated before each round. A round waits for the reply of a new node for at most
`NEW_NODE_SECONDS`; a later reply is used when it arrives. In a simulation each node stands for several clients and is
queried for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fedgg.errors import UserError
from fedgg.files import read_json, write_json, writing_to
from fedgg.flower.messages import (
    ANY_CLIENT,
    FORMAT,
    NO_ROUND,
    ClientInfo,
    InvalidMessage,
    MessageHeader,
    client_info_of,
    message_content,
)
from fedgg.flower.send_and_receive import POLL_SECONDS, Exchange, OutgoingMessage, one_line
from fedgg.runfolder.checksums import with_checksum, without_checksum

QUERY = "query.hello"  # Flower's message type; part of the message format
NEW_NODE_SECONDS = 60.0  # that a round waits for the reply of a new node
QUERY_SECONDS = 3600.0  # until a query without a reply is repeated
RETRY_SECONDS = 10.0  # until a node is queried again after an error


@dataclass(frozen=True)
class PendingQuery:
    message: OutgoingMessage
    sent_at: float


@dataclass(frozen=True)
class FailedQuery:
    why: str
    at: float


class InvalidClientInfo(Exception):
    """A node reported something that cannot be true; `client` is the client it claims to be."""

    def __init__(self, why: str, client: int = ANY_CLIENT):
        super().__init__(why)
        self.client = client


@dataclass
class Membership:
    """The connected nodes and their clients."""

    exchange: Exchange
    run: str
    experiment: str
    notice: Callable[[str], None]
    clients: int
    refusal: Callable[[ClientInfo], str | None] = lambda info: None  # why the reported data cannot be accepted
    simulation: bool = False  # whether a node may stand for several clients
    members: dict[tuple[int, int], ClientInfo] = field(default_factory=dict)  # by node and client
    simulated_clients: dict[int, range] = field(default_factory=dict)  # by node of a simulation
    client_info: dict[int, ClientInfo] = field(default_factory=dict)  # by client; later reports must equal the first
    pending: dict[str, PendingQuery] = field(default_factory=dict)  # by message id
    failed: dict[int, FailedQuery] = field(default_factory=dict)  # by node; it is queried again after RETRY_SECONDS
    rejected: dict[int, InvalidClientInfo] = field(default_factory=dict)  # by node
    replaced_by: dict[int, int] = field(default_factory=dict)  # by node: a later node with the same client
    duplicate_of: dict[int, int] = field(default_factory=dict)  # by node: the earlier node, still up, with its client
    _reported: set[tuple[int, str]] = field(default_factory=set)

    def nodes(self) -> dict[int, int]:
        """Node by client."""
        return {client: node for node, client in self.members}

    def update(self) -> dict[int, int]:
        """Query new nodes, use the replies that have arrived, remove nodes that are gone; node by client."""
        connected, now = self.exchange.node_ids(), self.exchange.now()
        self._remove_disconnected(connected, now)
        queried = {(query.message.node, query.message.header.client) for query in self.pending.values()}
        for node in sorted(connected - self.failed.keys() - self.duplicate_of.keys()):
            for client in self._clients_to_query(node):
                if (node, client) not in queried:
                    self._query(node, client)
        waiting = {message_id: query.message for message_id, query in self.pending.items()}
        for message_id, reply in self.exchange.receive_available(waiting).items():
            message = self.pending.pop(message_id).message
            try:
                if reply.content is not None:
                    self._add(message.node, client_info_of(reply.content), message.header.client)
            except InvalidMessage as error:
                self._reject(message.node, InvalidClientInfo(str(error)))
            except InvalidClientInfo as error:
                self._reject(message.node, error)
            if reply.why:
                self.failed[message.node] = FailedQuery(reply.why, now)
                self.notice(f"node {message.node} did not report its client: {reply.why}")
        return self.nodes()

    def wait_for(self, clients: Collection[int], seconds: float) -> list[int]:
        """Wait until these clients have nodes; returns those that have none after this time."""
        end = self.exchange.now() + seconds
        while missing := [client for client in clients if client not in self.update()]:
            if self.exchange.now() >= end:
                return missing
            self.exchange.sleep(POLL_SECONDS)
        return []

    def wait_for_new_nodes(self, clients: Collection[int]) -> dict[int, int]:
        """Node by client; if a client has none, waits a limited time for the replies of new nodes."""
        while any(client not in self.update() for client in clients):
            now, limit = self.exchange.now(), min(NEW_NODE_SECONDS, self.exchange.deadline)
            if not any(now - query.sent_at < limit for query in self.pending.values()):
                break
            self.exchange.sleep(POLL_SECONDS)
        return self.nodes()

    def reason_absent(self, client: int) -> str:
        """Why this client has no node."""
        for node, error in self.rejected.items():
            if error.client == client:
                return one_line(f"node {node} is rejected: {error}")
        return "its node is not connected"

    def remove(self, client: int) -> None:
        """Its node is queried again: it may have restarted as another client."""
        self.members = {key: info for key, info in self.members.items() if key[1] != client}

    def _remove_disconnected(self, connected: set[int], now: float) -> None:
        self.members = {key: info for key, info in self.members.items() if key[0] in connected}
        self.replaced_by = {a: b for a, b in self.replaced_by.items() if a in connected and b in connected}
        self.duplicate_of = {a: b for a, b in self.duplicate_of.items() if a in connected and b in connected}
        self.rejected = {node: error for node, error in self.rejected.items() if node in connected}
        self.pending = {
            message_id: query
            for message_id, query in self.pending.items()
            if query.message.node in connected and now - query.sent_at < QUERY_SECONDS
        }
        self.failed = {
            node: query for node, query in self.failed.items() if node in connected and now - query.at < RETRY_SECONDS
        }

    def _clients_to_query(self, node: int) -> list[int]:
        """ANY_CLIENT for a node whose client is not known; in a simulation, the clients it has not reported yet."""
        if node in self.simulated_clients:
            return [client for client in self.simulated_clients[node] if (node, client) not in self.members]
        return [] if any(member == node for member, _ in self.members) else [ANY_CLIENT]

    def _query(self, node: int, client: int = ANY_CLIENT) -> None:
        header = MessageHeader(self.run, self.experiment, round=NO_ROUND, attempt=1, client=client)
        message = OutgoingMessage(node, header, message_content(header))
        message_id = self.exchange.send(QUERY, message, QUERY_SECONDS)
        if message_id is not None:
            self.pending[message_id] = PendingQuery(message, self.exchange.now())

    def _add(self, node: int, info: ClientInfo, queried_client: int) -> None:
        """InvalidClientInfo if the report cannot be true."""
        if info.simulated:
            self._add_simulated(node, info, queried_client)
            return
        if queried_client not in (ANY_CLIENT, info.client):
            raise InvalidClientInfo(f"queried as client {queried_client}, it replied as {info.client}", queried_client)
        refusal = self.refusal(info)
        if refusal is not None:
            raise InvalidClientInfo(refusal, info.client)
        first_report = self.client_info.get(info.client, info)
        if first_report != info:
            raise InvalidClientInfo(_changed_data(info, first_report), info.client)
        client, earlier_node = info.client, self.nodes().get(info.client)
        later_node = self.replaced_by.pop(node, None)
        if later_node is not None and (later_node, client) in self.members:
            # The earlier node replied after all, so both are up: the earlier one stays.
            del self.members[later_node, client]
            self.duplicate_of[later_node] = node
            why = f"node {node} is client {client} already, and replies: give each node its own client-id"
            self._reject(later_node, InvalidClientInfo(why, client))
        elif earlier_node is not None and earlier_node != node:
            # Flower lists a killed node as connected for a while. A query shows whether the earlier one is still up.
            self.replaced_by[earlier_node] = node
            del self.members[earlier_node, client]
            self._query(earlier_node)
        self.client_info[client] = info
        self.members[node, client] = info
        self.rejected.pop(node, None)

    def _add_simulated(self, node: int, info: ClientInfo, queried_client: int) -> None:
        """Node i of n in a simulation stands for clients i, i + n, i + 2n, ..."""
        nodes = len(self.exchange.node_ids())
        if not self.simulation or queried_client != ANY_CLIENT:
            raise InvalidClientInfo("it reports a node of a simulation, and this run is not a simulation")
        if not (nodes <= info.simulated and 0 <= info.client < info.simulated):
            raise InvalidClientInfo(f"it reports node {info.client} of {info.simulated}, and {nodes} are connected")
        self.simulated_clients[node] = range(info.client, self.clients, info.simulated)

    def _reject(self, node: int, error: InvalidClientInfo) -> None:
        why = one_line(str(error))
        if (node, why) not in self._reported:
            self.notice(f"node {node} is rejected: {why}")
            self._reported.add((node, why))
        self.rejected[node] = InvalidClientInfo(why, error.client)
        self.failed[node] = FailedQuery(why, self.exchange.now())


def _changed_data(info: ClientInfo, first_report: ClientInfo) -> str:
    if not first_report.data:
        return f"client {info.client} is left out of this run, which started without it"
    return (
        f"client {info.client} has other data than before: {info.examples} examples, before {first_report.examples}; "
        f"give it the same file as before, or start a new run in another folder"
    )


@dataclass(frozen=True)
class SavedMembership:
    """`flower.json` of a run folder: the run id in its message headers, and its clients."""

    run: str
    clients: dict[int, ClientInfo]
    left_out: dict[int, str] = field(default_factory=dict)  # clients the run started without, and why

    @classmethod
    def read(cls, folder: Path) -> SavedMembership | None:
        path = folder / "flower.json"
        if not path.exists():
            return None
        try:
            content = without_checksum(read_json(path))
            if content["format"] != FORMAT:
                raise UserError(f"{path} has format {content['format']}; this fedgg reads {FORMAT}")
            clients = {entry["client"]: _parsed_client_info(entry) for entry in content["clients"]}
            left_out = {entry["client"]: str(entry["why"]) for entry in content.get("left_out", [])}
            return cls(str(content["run"]), clients, left_out)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read ({error}): the run folder is not complete") from error

    def write(self, folder: Path) -> None:
        clients = [asdict(self.clients[client]) for client in sorted(self.clients)]
        left_out = [{"client": client, "why": why} for client, why in sorted(self.left_out.items())]
        content = {"format": FORMAT, "run": self.run, "clients": clients} | ({"left_out": left_out} if left_out else {})
        with writing_to(folder):
            write_json(folder / "flower.json", with_checksum(content))


def _parsed_client_info(entry: dict[str, Any]) -> ClientInfo:
    """ValueError or TypeError for wrong content: the folder may be of unknown origin."""
    info = ClientInfo(**entry)
    if not all(type(getattr(info, f.name)).__name__ == f.type for f in fields(ClientInfo)):
        raise ValueError(f"client {info.client!r} has values of other types")
    if min(info.client, info.examples, info.held_out) < 0:
        raise ValueError(f"client {info.client} has negative numbers")
    return info
