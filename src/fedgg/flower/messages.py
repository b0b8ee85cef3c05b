"""Flower messages: rows as raw bytes with type and shape, and the header that says run, round and client.

Flower's own arrays are NumPy files. Ours are the bytes alone: what travels is what the algorithm declares and not a
byte more, nothing in it can be unpickled, and no file format has to be trusted.

A reply that repeats anything else belongs to another run, round, attempt or client, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedgg.core.buffers import not_finite
from fedgg.core.rows import Rows

RAW = "fedgg.raw"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
Kind = tuple[torch.dtype, tuple[int, ...]]


class BadRecord(Exception):
    """What came over the network is not what was asked for; the message says in what."""


def to_record(rows: Rows) -> ArrayRecord:
    return ArrayRecord({name: _packed(name, tensor) for name, tensor in rows.items()})


def from_record(record: ArrayRecord, device: torch.device) -> Rows:
    """Rows of one client, each of a known type and as long as its shape says."""
    return {name: _unpacked(name, array).to(device) for name, array in record.items()}


def kinds(rows: Rows) -> dict[str, Kind]:
    """Names, types and shapes: what rows that take the place of these must have."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in rows.items()}


def check_kinds(rows: Rows, wanted: Mapping[str, Kind], what: str) -> Rows:
    """`rows` in the order of `wanted`; BadRecord if they differ from it in anything."""
    absent, foreign = sorted(wanted.keys() - rows.keys()), sorted(rows.keys() - wanted.keys())
    if absent:
        raise BadRecord(f"{what} lacks {', '.join(absent[:3])}")
    if foreign:
        raise BadRecord(f"{what} holds {', '.join(foreign[:3])}, which nobody asked for")
    for name, (dtype, shape) in wanted.items():
        found = rows[name]
        if found.dtype != dtype or tuple(found.shape) != shape:
            raise BadRecord(
                f"{what} {name} is {found.dtype} {list(found.shape)} where {dtype} {list(shape)} was asked for"
            )
    return {name: rows[name] for name in wanted}


def check_some(rows: Rows, wanted: Mapping[str, Kind], what: str) -> Rows:
    """As `check_kinds`, where any of the names wanted may be absent: what did not change is not sent."""
    return check_kinds(rows, {name: kind for name, kind in wanted.items() if name in rows}, what)


def check_buffers(before: Rows, after: Rows, what: str) -> Rows:
    """`after`; BadRecord where an entry has become NaN or infinite."""
    if sick := not_finite(before, after):
        raise BadRecord(f"not finite: {', '.join(f'{what} {name}'.strip() for name in sick)}")
    return after


def check_finite(rows: Rows, what: str) -> Rows:
    sick = [name for name, tensor in rows.items() if not bool(torch.isfinite(tensor).all())]
    if sick:
        raise BadRecord(f"not finite: {', '.join(f'{what} {name}'.strip() for name in sick)}")
    return rows


def _packed(name: str, tensor: Tensor) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}, which does not travel")
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Array(dtype=dtype, shape=tuple(tensor.shape), stype=RAW, data=numbers.numpy().tobytes())


def _unpacked(name: str, array: Array) -> Tensor:
    if array.stype != RAW:
        raise BadRecord(f"{name} is written as {array.stype!r} where {RAW!r} was asked for")
    if array.dtype not in DTYPES:
        raise BadRecord(f"{name} holds {array.dtype!r}, which is no type of numbers that travels")
    dtype, shape = DTYPES[array.dtype], tuple(array.shape)
    if not shape or shape[0] != 1 or any(not isinstance(length, int) or length < 0 for length in shape):
        raise BadRecord(f"{name} has shape {list(shape)}, which is no row of one client")
    needed = math.prod(shape) * dtype.itemsize
    if len(array.data) != needed:
        raise BadRecord(f"{name} has {len(array.data)} bytes where its shape needs {needed}")
    # The memory is torch's own: kernels may round differently where data are not aligned.
    tensor = torch.empty(shape, dtype=dtype)
    if needed:
        tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(array.data), dtype=torch.uint8))
    return tensor


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
