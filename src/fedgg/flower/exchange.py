"""Sending messages to nodes and collecting replies until a deadline; each exchange is logged in `exchanges.jsonl`.

Flower's own `send_and_receive` looks once in three seconds and does not say who was silent.

Bytes of arrays are what the rounds' own record counts; what stands beside them (who is meant, which round, the loss) is
told apart. An exchange that was repeated has a line for each attempt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedgg.core.server import Lost
from fedgg.files import append_line
from fedgg.flower.messages import About, Answer, BadRecord, about_of, answer_of, difference, overhead_of, payload_of
from fedgg.output_files import writing_to


@dataclass
class Line:
    lost: list[Lost] = field(default_factory=list)


@dataclass(frozen=True)
class ExchangeLog:
    folder: Path
    check_lock: Callable[[], None]  # raises once the folder is no longer this process's

    @contextmanager
    def exchange(self, kind: str, round_: int, attempt: int, clients: list[int], exchange: Exchange) -> Iterator[Line]:
        line, started, exchange.traffic = Line(), time.monotonic(), Traffic()
        try:
            yield line
        finally:
            told = {
                "kind": kind,
                "round": round_,
                "attempt": attempt,
                "clients": clients,
                "lost": [asdict(gone) for gone in line.lost],
                "bytes": asdict(exchange.traffic),
                "seconds": round(time.monotonic() - started, 3),
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            with writing_to(self.folder):
                append_line(self.folder / "exchanges.jsonl", json.dumps(told), self.check_lock)


PAUSE = 0.2  # seconds between looks at what has come in
LINE = 300  # signs
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

    def ask(self, kind: str, questions: Iterable[Question]) -> list[tuple[Question, Reply]]:
        """Every question with its reply: who is silent, late, or says something else is named as such."""
        asked = list(questions)
        until = self.now() + self.deadline
        numbers = [self.post(kind, question, self.deadline) for question in asked]
        came: dict[str, list[Message]] = {number: [] for number in numbers if number}
        while waiting := [number for number, messages in came.items() if not messages]:
            self._pull(waiting, came)
            if self.now() >= until:
                break
            if not all(came.values()):
                self.sleep(PAUSE)
        return [
            (question, self._judged(question, came[number]) if number else nothing("the message could not be sent"))
            for question, number in zip(asked, numbers, strict=True)
        ]

    def post(self, kind: str, question: Question, seconds: float) -> str | None:
        """Send one message that lives so long; its number, or None where the grid did not take it.

        One by one, so that it is known which went out; arrays that several share are uploaded once all the same.
        """
        message = Message(
            question.content, question.node, kind, ttl=seconds + SLACK, group_id=str(question.about.round)
        )
        number = next(iter(self.grid.push_messages([message])), None)
        if number:
            self.traffic.down += payload_of(question.content)
            self.traffic.overhead_down += overhead_of(question.content)
        return number or None

    def collect(self, waiting: dict[str, Question]) -> dict[str, Reply]:
        """What has come in by now for messages posted before; nobody waits."""
        came: dict[str, list[Message]] = {number: [] for number in waiting}
        if waiting:
            self._pull(list(waiting), came)
        return {number: self._judged(waiting[number], messages) for number, messages in came.items() if messages}

    def _pull(self, waiting: list[str], came: dict[str, list[Message]]) -> None:
        for message in self.grid.pull_messages(waiting):
            if message.metadata.reply_to_message_id in came:
                came[message.metadata.reply_to_message_id].append(message)
                if message.has_content():
                    self.traffic.up += payload_of(message.content)
                    self.traffic.overhead_up += overhead_of(message.content)

    def _judged(self, question: Question, messages: list[Message]) -> Reply:
        if not messages:
            return nothing(f"no answer within {self.deadline:g} s")
        if len(messages) > 1:
            return nothing(f"it answered {len(messages)} times")
        (message,) = messages
        if message.has_error():
            return nothing(f"its app failed: {message.error.reason}")
        try:
            other = difference(question.about, about_of(message.content))
            answer = answer_of(message.content)
        except BadRecord as error:
            return nothing(str(error))
        if answer.refused:
            return nothing(answer.refused)
        return nothing(other) if other else Reply(message.content, replace(answer, note=one_line(answer.note)))


def one_line(told: str) -> str:
    """What a node says goes into logs and reports: no more than a line of it."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in told).split())[:LINE]


def nothing(why: str) -> Reply:
    return Reply(None, Answer(), one_line(why))
