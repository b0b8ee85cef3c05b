"""Messages to nodes and their replies, bounded by a deadline, over the two calls every Flower grid has.

Flower's own `send_and_receive` looks once in three seconds and does not say who was silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedgg.flower.letters import About, Answer, about_of, answer_of, difference, overhead_of, payload_of
from fedgg.flower.records import BadRecord

PAUSE = 0.2  # seconds between looks at what has come in
SLACK = 5.0  # seconds a message lives beyond its deadline: whoever asks for it later gets nothing


@dataclass(frozen=True)
class Question:
    """A message on its way: to which node, what it is about, and what it carries."""

    node: int
    about: About
    content: RecordDict


@dataclass(frozen=True)
class Reply:
    """What came back for one question: content that repeats what the question was about, or why there is none."""

    content: RecordDict | None
    answer: Answer
    why: str = ""


@dataclass
class Traffic:
    """Bytes that went out and came in: arrays, and what stands beside them."""

    down: int = 0
    up: int = 0
    overhead_down: int = 0
    overhead_up: int = 0


@dataclass
class Exchange:
    """One grid, and how long to wait for it."""

    grid: Grid
    deadline: float
    traffic: Traffic = field(default_factory=Traffic)
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def node_ids(self) -> set[int]:
        return set(self.grid.get_node_ids())

    def ask(self, kind: str, questions: Iterable[Question], deadline: float | None = None) -> dict[int, Reply]:
        """One reply for each question, by its place: who is silent, late, or says something else is named as such."""
        asked = list(questions)
        limit = self.deadline if deadline is None else deadline
        until = self.now() + limit
        sent = self._send(kind, asked, limit)
        came: dict[int, list[Message]] = {place: [] for place in range(len(asked))}
        while waiting := [number for number, place in sent.items() if not came[place]]:
            for message in self.grid.pull_messages(waiting):
                place = sent.get(message.metadata.reply_to_message_id)
                if place is not None:
                    came[place].append(message)
            if self.now() >= until:
                break
            if any(not came[place] for place in sent.values()):
                self.sleep(PAUSE)
        unsent = came.keys() - set(sent.values())
        silent = f"no answer within {limit:g} s"
        return {
            place: _judged(asked[place], messages, "the message could not be sent" if place in unsent else silent, self)
            for place, messages in came.items()
        }

    def _send(self, kind: str, asked: list[Question], limit: float) -> dict[str, int]:
        """One by one, so that it is known which went out; arrays that several share are uploaded once."""
        sent: dict[str, int] = {}
        for place, question in enumerate(asked):
            message = Message(
                question.content, question.node, kind, ttl=limit + SLACK, group_id=str(question.about.round)
            )
            for number in self.grid.push_messages([message]):
                if number:
                    sent[number] = place
                    self.traffic.down += payload_of(question.content)
                    self.traffic.overhead_down += overhead_of(question.content)
        return sent


def _judged(question: Question, messages: list[Message], silent: str, exchange: Exchange) -> Reply:
    if not messages:
        return _nothing(silent)
    for message in messages:
        if message.has_content():
            exchange.traffic.up += payload_of(message.content)
            exchange.traffic.overhead_up += overhead_of(message.content)
    if len(messages) > 1:
        return _nothing(f"it answered {len(messages)} times")
    (message,) = messages
    if message.has_error():
        return _nothing(f"its app failed: {' '.join(str(message.error.reason).split())[:200]}")
    try:
        answer = answer_of(message.content)
        if answer.refused:
            return _nothing(answer.refused)
        other = difference(question.about, about_of(message.content))
    except BadRecord as error:
        return _nothing(str(error))
    return _nothing(other) if other else Reply(message.content, answer)


def _nothing(why: str) -> Reply:
    return Reply(None, Answer(), why)


def by_client(questions: list[Question], replies: Mapping[int, Reply]) -> dict[int, Reply]:
    return {question.about.client: replies[place] for place, question in enumerate(questions)}
