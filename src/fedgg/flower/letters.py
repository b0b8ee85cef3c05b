"""What stands on every message beside its arrays: what it is about, and for whom. A reply repeats it.

A reply that repeats anything else belongs to another run, round, attempt or client, and is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedgg.flower.records import BadRecord

FORMAT = 1
ABOUT = "about"
NUMBERS = "numbers"
ANSWER = "answer"
HELLO = "hello"
NEVER = 0  # rounds are counted from 1
NOBODY = -1  # the client of a message that asks a node who it is


@dataclass(frozen=True)
class About:
    """What a message is about."""

    run: str
    experiment: str  # its trajectory: a node with another one must not take part
    round: int  # the one that is played, from 1
    attempt: int
    client: int
    settled: int = NEVER  # no resume of the server goes back further than this round
    met: int = NEVER  # the last round in which the server used this client's answer
    format: int = FORMAT


@dataclass(frozen=True)
class Answer:
    """What a node says beside its arrays."""

    refused: str = ""  # why there is nothing else in this reply
    note: str = ""  # what the server should write down of this client's round


@dataclass(frozen=True)
class Hello:
    """Who a node is. How many examples it has is told to the server, and a hash of them; nothing else of them is."""

    client: int
    examples: int
    held_out: int
    shape: str  # of one example, as "1 8 8"
    classes: int
    data: str  # hash
    simulated: int = 0  # of a node in a simulation: how many nodes share the clients; it has no examples of its own


def write(
    about: About,
    arrays: Mapping[str, ArrayRecord] | None = None,
    *,
    answer: Answer | None = None,
    numbers: Mapping[str, float] | None = None,
    hello: Hello | None = None,
) -> RecordDict:
    content = RecordDict({ABOUT: ConfigRecord(asdict(about))})
    for name, record in (arrays or {}).items():
        content[name] = record
    if answer is not None:
        content[ANSWER] = ConfigRecord(asdict(answer))
    if hello is not None:
        content[HELLO] = ConfigRecord(asdict(hello))
    if numbers is not None:
        content[NUMBERS] = MetricRecord(dict(numbers))
    return content


def about_of(content: RecordDict) -> About:
    """BadRecord where there is none, or one that another version wrote."""
    found = _fields(content, ABOUT, About)
    if found["format"] != FORMAT:
        raise BadRecord(f"it was written in format {found['format']}; this fedgg reads {FORMAT}: install the same one")
    return About(**found)


def answer_of(content: RecordDict) -> Answer:
    return Answer(**_fields(content, ANSWER, Answer))


def hello_of(content: RecordDict) -> Hello:
    return Hello(**_fields(content, HELLO, Hello))


def arrays_of(content: RecordDict, name: str) -> ArrayRecord:
    record = content.get(name)
    if not isinstance(record, ArrayRecord):
        raise BadRecord(f"it has no arrays called {name!r}")
    return record


def numbers_of(content: RecordDict, wanted: Collection[str]) -> dict[str, float]:
    """These and no others."""
    record = content.get(NUMBERS)
    if not isinstance(record, MetricRecord) or set(record) != set(wanted):
        told = sorted(record) if isinstance(record, MetricRecord) else "no numbers"
        raise BadRecord(f"it told {told} where {sorted(wanted)} was asked for")
    numbers = {name: value for name, value in record.items() if isinstance(value, float)}
    if len(numbers) < len(record):
        raise BadRecord("it told something that is no number")
    return numbers


def reading(name: str) -> str:
    """What a reading is called among the numbers."""
    return f"reading {name}"


def difference(asked: About, told: About) -> str | None:
    """In what a reply is not the one that was waited for."""
    for name, shown in _SHOWN.items():
        a, b = getattr(asked, name), getattr(told, name)
        if a != b:
            return f"it answered for {shown} {b} instead of {a}"
    return None


_SHOWN = {"run": "the run", "experiment": "the experiment", "client": "client", "round": "round", "attempt": "attempt"}


def payload_of(content: RecordDict) -> int:
    """Bytes of all arrays."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def overhead_of(content: RecordDict) -> int:
    """Bytes of what stands beside the arrays, as Flower writes it."""
    beside = [*content.config_records.values(), *content.metric_records.values()]
    return sum(len(record.deflate()) for record in beside)


def _fields(content: RecordDict, name: str, kind: type[Any]) -> dict[str, Any]:
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise BadRecord(f"it does not say {name!r}: this is no message of fedgg's")
    wanted = {field.name: type(_DEFAULTS[field.type]) for field in fields(kind)}
    for key, type_ in wanted.items():
        if type(record.get(key)) is not type_:
            raise BadRecord(f"its {key!r} is {record.get(key)!r}, not {type_.__name__}")
    return {key: record[key] for key in wanted}


_DEFAULTS: dict[Any, Any] = {"str": "", "int": 0}
