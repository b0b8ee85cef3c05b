"""Deadlines of an exchange, with a simulated clock: replies in time are used, the others have a reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from flwr.app import Message
from in_process_grid import Federation, small

from fedgg.flower.membership import NEW_NODE_SECONDS, Membership
from fedgg.flower.messages import MessageHeader, client_info_of, message_content
from fedgg.flower.send_and_receive import POLL_SECONDS, Exchange, OutgoingMessage


@dataclass
class Clock:
    time: float = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation(small(model__name="linear"), tmp_path)


def query_all(federation: Federation, clock: Clock, deadline: float) -> dict[int, str]:
    """A query to every node: why there is no reply, or an empty text."""
    exchange = Exchange(federation.grid, deadline, now=clock.now, sleep=clock.sleep)
    header = MessageHeader("run", federation.experiment.trajectory(), 0, 1, -1)
    messages = [OutgoingMessage(node, header, message_content(header)) for node in federation.grid.nodes]
    replies = exchange.send_and_receive("query.hello", messages)
    for message, reply in replies:
        assert reply.content is None or client_info_of(reply.content).client == message.node - 100
    return {message.node: reply.why for message, reply in replies}


def test_replies_in_time_and_too_late(federation: Federation) -> None:
    delays = {100: 0, 101: 20, 102: 45, 103: 500}  # polls
    federation.grid.held = lambda question: delays[question.metadata.dst_node_id]
    clock = Clock()
    assert query_all(federation, clock, 10.0) == {100: "", 101: "", 102: "", 103: "no reply within 10 s"}
    assert 10.0 <= clock.time <= 10.0 + 2 * POLL_SECONDS


def test_it_does_not_wait_once_all_replies_are_there(federation: Federation) -> None:
    clock = Clock()
    assert set(query_all(federation, clock, 10.0).values()) == {""}
    assert clock.time == 0.0


def test_a_message_that_cannot_be_sent(federation: Federation) -> None:
    federation.grid.push_messages = lambda messages: []  # type: ignore[method-assign]
    assert set(query_all(federation, Clock(), 10.0).values()) == {"the message could not be sent"}


def test_messages_do_not_outlive_their_deadline_by_much(federation: Federation) -> None:
    query_all(federation, Clock(), 10.0)
    assert {message.metadata.ttl for message in federation.grid.sent} == {15.0}


def test_a_node_that_does_not_reply_is_waited_for_once_and_may_reply_later(federation: Federation) -> None:
    clock, late = Clock(), [True]

    def held(question: Message) -> int:
        return 10_000 if question.metadata.dst_node_id == 103 and late[0] else 0

    federation.grid.held = held
    exchange = Exchange(federation.grid, 600.0, now=clock.now, sleep=clock.sleep)
    membership = Membership(exchange, "run", federation.experiment.trajectory(), federation.notices.append, 4)
    assert sorted(membership.wait_for_new_nodes(range(4))) == [0, 1, 2]
    waited = clock.time
    assert NEW_NODE_SECONDS <= waited <= NEW_NODE_SECONDS + 2 * POLL_SECONDS
    assert sorted(membership.wait_for_new_nodes(range(4))) == [0, 1, 2]
    assert clock.time == waited
    federation.grid.looks = dict.fromkeys(federation.grid.looks, 0)  # its reply arrives
    assert sorted(membership.wait_for_new_nodes(range(4))) == [0, 1, 2, 3]
    assert clock.time == waited


def test_waiting_for_nodes_is_bounded(federation: Federation) -> None:
    clock = Clock()
    del federation.grid.nodes[102]
    exchange = Exchange(federation.grid, 600.0, now=clock.now, sleep=clock.sleep)
    membership = Membership(exchange, "run", federation.experiment.trajectory(), federation.notices.append, 4)
    assert membership.wait_for(range(4), 30.0) == [2]
    assert 30.0 <= clock.time <= 30.0 + 2 * POLL_SECONDS
