"""Sends messages to nodes and collects their replies until a deadline; logs each exchange in `exchanges.jsonl`.

Flower's `Grid.send_and_receive` polls every three seconds and does not report which nodes did not reply.

A line of the log counts the bytes of arrays apart from all other bytes (header, status, metrics). Each attempt of a
repeated exchange has a line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedgg.core.server import Lost
from fedgg.files import append_line, writing_to
from fedgg.flower.messages import (
    InvalidMessage,
    MessageHeader,
    ReplyStatus,
    array_bytes,
    header_mismatch,
    header_of,
    other_bytes,
    status_of,
)

POLL_SECONDS = 0.2  # between two requests for replies
TTL_SLACK = 5.0  # seconds by which the time to live exceeds the deadline
LONGEST_REASON = 300  # characters
NO_REPLY = "no reply"  # the beginning of the reason for which a client without a reply is dropped


@dataclass(frozen=True)
class OutgoingMessage:
    node: int
    header: MessageHeader
    content: RecordDict


@dataclass(frozen=True)
class Reply:
    """The checked reply to one message: its content, or the reason why there is none."""

    content: RecordDict | None
    status: ReplyStatus
    why: str = ""


@dataclass
class Traffic:
    """Bytes sent and received: arrays, and everything else (`overhead`)."""

    down: int = 0
    up: int = 0
    overhead_down: int = 0
    overhead_up: int = 0


@dataclass
class Exchange:
    """Sends messages over a Flower grid and waits for the replies."""

    grid: Grid
    deadline: float  # seconds
    traffic: Traffic = field(default_factory=Traffic)
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def node_ids(self) -> set[int]:
        return set(self.grid.get_node_ids())

    def send_and_receive(self, kind: str, messages: Iterable[OutgoingMessage]) -> list[tuple[OutgoingMessage, Reply]]:
        """Each message with its reply; a missing, late or invalid reply has a reason instead of content."""
        messages = list(messages)
        end = self.now() + self.deadline
        ids = [self.send(kind, message, self.deadline) for message in messages]
        replies: dict[str, list[Message]] = {message_id: [] for message_id in ids if message_id}
        while waiting := [message_id for message_id, received in replies.items() if not received]:
            self._pull(waiting, replies)
            if self.now() >= end:
                break
            if not all(replies.values()):
                self.sleep(POLL_SECONDS)
        return [
            (message, self._checked(message, replies[id_]) if id_ else no_reply("the message could not be sent"))
            for message, id_ in zip(messages, ids, strict=True)
        ]

    def send(self, kind: str, message: OutgoingMessage, seconds: float) -> str | None:
        """Send one message with this time to live; returns its id, or None if the grid did not accept it.

        One call per message shows which were accepted; Flower uploads arrays that several messages share once.
        """
        flower_message = Message(
            message.content, message.node, kind, ttl=seconds + TTL_SLACK, group_id=str(message.header.round)
        )
        message_id = next(iter(self.grid.push_messages([flower_message])), None)
        if message_id:
            self.traffic.down += array_bytes(message.content)
            self.traffic.overhead_down += other_bytes(message.content)
        return message_id or None

    def receive_available(self, waiting: dict[str, OutgoingMessage]) -> dict[str, Reply]:
        """Replies, by message id, that have arrived by now; does not wait."""
        replies: dict[str, list[Message]] = {message_id: [] for message_id in waiting}
        if waiting:
            self._pull(list(waiting), replies)
        return {id_: self._checked(waiting[id_], received) for id_, received in replies.items() if received}

    def _pull(self, waiting: list[str], replies: dict[str, list[Message]]) -> None:
        for message in self.grid.pull_messages(waiting):
            if message.metadata.reply_to_message_id in replies:
                replies[message.metadata.reply_to_message_id].append(message)
                if message.has_content():
                    self.traffic.up += array_bytes(message.content)
                    self.traffic.overhead_up += other_bytes(message.content)

    def _checked(self, request: OutgoingMessage, received: list[Message]) -> Reply:
        if not received:
            return no_reply(f"{NO_REPLY} within {self.deadline:g} s")
        if len(received) > 1:
            return no_reply(f"it replied {len(received)} times")
        (message,) = received
        if message.has_error():
            return no_reply(f"its ClientApp failed: {message.error.reason}")
        try:
            mismatch = header_mismatch(request.header, header_of(message.content))
            status = status_of(message.content)
        except InvalidMessage as error:
            return no_reply(str(error))
        if status.refused:
            return no_reply(status.refused)
        return no_reply(mismatch) if mismatch else Reply(message.content, replace(status, note=one_line(status.note)))


def no_reply(why: str) -> Reply:
    return Reply(None, ReplyStatus(), one_line(why))


def one_line(text: str) -> str:
    """Text from a node, shortened to one printable line for logs and reports."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:LONGEST_REASON]


@dataclass(frozen=True)
class ExchangeLog:
    """`exchanges.jsonl` of a run folder."""

    folder: Path
    check_lock: Callable[[], None]  # raises once another process has taken over the folder

    @contextmanager
    def record(
        self, kind: str, round_: int, attempt: int, clients: list[int], exchange: Exchange
    ) -> Iterator[list[Lost]]:
        """Writes one line for the exchange inside the block, which adds the dropped clients to the list."""
        started, exchange.traffic = time.monotonic(), Traffic()
        dropped: list[Lost] = []
        try:
            yield dropped
        finally:
            line = {
                "kind": kind,
                "round": round_,
                "attempt": attempt,
                "clients": clients,
                "lost": [asdict(client) for client in dropped],
                "bytes": asdict(exchange.traffic),
                "seconds": round(time.monotonic() - started, 3),
                "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }
            with writing_to(self.folder):
                append_line(self.folder / "exchanges.jsonl", json.dumps(line), self.check_lock)
