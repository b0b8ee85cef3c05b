"""Deadlines, by a clock of our own: who answers in time counts, who does not is named, and nobody waits longer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from flwr.app import Message
from in_process_grid import Federation, small

from fedgg.flower.exchange import PAUSE, Exchange, Question
from fedgg.flower.membership import PATIENCE, Roll
from fedgg.flower.messages import About, hello_of, write


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


def ask(federation: Federation, clock: Clock, deadline: float) -> dict[int, str]:
    """A hello to every node: why there is no reply, or nothing."""
    exchange = Exchange(federation.grid, deadline, now=clock.now, sleep=clock.sleep)
    about = About("run", federation.experiment.trajectory(), 0, 1, -1)
    questions = [Question(node, about, write(about)) for node in federation.grid.nodes]
    replies = exchange.ask("query.hello", questions)
    for question, reply in replies:
        assert reply.content is None or hello_of(reply.content).client == question.node - 100
    return {question.node: reply.why for question, reply in replies}


def test_who_answers_in_time_and_who_does_not(federation: Federation) -> None:
    delays = {100: 0, 101: 20, 102: 45, 103: 500}  # looks
    federation.grid.held = lambda question: delays[question.metadata.dst_node_id]
    clock = Clock()
    assert ask(federation, clock, 10.0) == {100: "", 101: "", 102: "", 103: "no answer within 10 s"}
    assert 10.0 <= clock.time <= 10.0 + 2 * PAUSE


def test_nobody_waits_once_all_are_there(federation: Federation) -> None:
    clock = Clock()
    assert set(ask(federation, clock, 10.0).values()) == {""}
    assert clock.time == 0.0


def test_a_message_that_cannot_be_sent(federation: Federation) -> None:
    federation.grid.push_messages = lambda messages: []  # type: ignore[method-assign]
    assert set(ask(federation, Clock(), 10.0).values()) == {"the message could not be sent"}


def test_messages_do_not_outlive_their_deadline_by_much(federation: Federation) -> None:
    ask(federation, Clock(), 10.0)
    assert {message.metadata.ttl for message in federation.grid.sent} == {15.0}


def test_nobody_waits_twice_for_a_silent_node_and_it_may_come_late(federation: Federation) -> None:
    clock, late = Clock(), [True]

    def held(question: Message) -> int:
        return 10_000 if question.metadata.dst_node_id == 103 and late[0] else 0

    federation.grid.held = held
    exchange = Exchange(federation.grid, 600.0, now=clock.now, sleep=clock.sleep)
    roll = Roll(exchange, "run", federation.experiment.trajectory(), federation.notices.append, 4)
    assert sorted(roll.after_hellos(range(4))) == [0, 1, 2]
    waited = clock.time
    assert PATIENCE <= waited <= PATIENCE + 2 * PAUSE
    assert sorted(roll.after_hellos(range(4))) == [0, 1, 2]
    assert clock.time == waited
    federation.grid.looks = dict.fromkeys(federation.grid.looks, 0)  # it wakes up
    assert sorted(roll.after_hellos(range(4))) == [0, 1, 2, 3]
    assert clock.time == waited


def test_waiting_for_nodes_is_bounded(federation: Federation) -> None:
    clock = Clock()
    del federation.grid.nodes[102]
    exchange = Exchange(federation.grid, 600.0, now=clock.now, sleep=clock.sleep)
    roll = Roll(exchange, "run", federation.experiment.trajectory(), federation.notices.append, 4)
    assert roll.wait_for(range(4), 30.0) == [2]
    assert 30.0 <= clock.time <= 30.0 + 2 * PAUSE
