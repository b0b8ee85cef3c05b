"""Content of the messages between ServerApp and ClientApp: a header, tensors as raw bytes, metrics, and a reply status.

A Flower array is a NumPy file by default. Here it holds only the bytes of the tensor, with dtype and shape as separate
fields: nothing is unpickled and no file format is parsed.

Every message has a header (run, experiment, round, attempt, client), and a reply repeats the header of its request. A
reply with another header is rejected.
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
from fedgg.core.tensor_rows import Rows

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
TensorSpec = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape


class InvalidMessage(Exception):
    """A message that does not have the expected content; the text says what is wrong."""


# Tensors --------------------------------------------------------------------------------------------------------------


def to_record(rows: Rows) -> ArrayRecord:
    return ArrayRecord({name: _to_array(name, tensor) for name, tensor in rows.items()})


def from_record(record: ArrayRecord, device: torch.device) -> Rows:
    """Rows of one client; InvalidMessage if dtype, shape and number of bytes do not fit each other."""
    return {name: _to_tensor(name, array).to(device) for name, array in record.items()}


def specs_of(rows: Rows) -> dict[str, TensorSpec]:
    """Name, dtype and shape of each tensor."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in rows.items()}


def check_specs(rows: Rows, expected: Mapping[str, TensorSpec], what: str) -> Rows:
    """`rows` in the order of `expected`; InvalidMessage if names, dtypes or shapes differ."""
    missing, unexpected = sorted(expected.keys() - rows.keys()), sorted(rows.keys() - expected.keys())
    if missing:
        raise InvalidMessage(f"{what} lacks {', '.join(missing[:3])}")
    if unexpected:
        raise InvalidMessage(f"{what} has the unexpected entry {', '.join(unexpected[:3])}")
    for name, (dtype, shape) in expected.items():
        tensor = rows[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise InvalidMessage(
                f"{what}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}"
            )
    return {name: rows[name] for name in expected}


def check_subset(rows: Rows, expected: Mapping[str, TensorSpec], what: str) -> Rows:
    """As `check_specs`, but expected names may be missing: buffers that did not change are not sent."""
    return check_specs(rows, {name: spec for name, spec in expected.items() if name in rows}, what)


def check_buffers(before: Rows, after: Rows, what: str) -> Rows:
    """`after`; InvalidMessage if a value has become NaN or infinite."""
    if names := not_finite(before, after):
        raise InvalidMessage(f"not finite: {', '.join(f'{what} {name}'.strip() for name in names)}")
    return after


def check_finite(rows: Rows, what: str) -> Rows:
    names = [name for name, tensor in rows.items() if not bool(torch.isfinite(tensor).all())]
    if names:
        raise InvalidMessage(f"not finite: {', '.join(f'{what} {name}'.strip() for name in names)}")
    return rows


def _to_array(name: str, tensor: Tensor) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}, which cannot be sent")
    as_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Array(dtype=dtype, shape=tuple(tensor.shape), stype=RAW, data=as_bytes.numpy().tobytes())


def _to_tensor(name: str, array: Array) -> Tensor:
    if array.stype != RAW:
        raise InvalidMessage(f"{name} is serialized as {array.stype!r}, expected {RAW!r}")
    if array.dtype not in DTYPES:
        raise InvalidMessage(f"{name} has the unsupported dtype {array.dtype!r}")
    dtype, shape = DTYPES[array.dtype], tuple(array.shape)
    if not shape or shape[0] != 1 or any(not isinstance(length, int) or length < 0 for length in shape):
        raise InvalidMessage(f"{name} has shape {list(shape)}, expected [1, ...]")
    size = math.prod(shape) * dtype.itemsize
    if len(array.data) != size:
        raise InvalidMessage(f"{name} has {len(array.data)} bytes, its shape needs {size}")
    # Memory allocated by torch is aligned; on unaligned memory some kernels round differently.
    tensor = torch.empty(shape, dtype=dtype)
    if size:
        tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(array.data), dtype=torch.uint8))
    return tensor


# Header, reply status, client info, metrics ---------------------------------------------------------------------------
# The names of records and fields are part of the message format: nodes of older versions use them.

FORMAT = 1
HEADER = "about"
METRICS = "numbers"
STATUS = "answer"
CLIENT_INFO = "hello"
EVALUATION = "evaluation"
NO_ROUND = 0  # rounds are counted from 1
ANY_CLIENT = -1  # the client of a query to a node whose client is not known yet


@dataclass(frozen=True)
class MessageHeader:
    """Identifies a request; its reply repeats it."""

    run: str
    experiment: str  # hash of the experiment; a node with another experiment does not take part
    round: int  # from 1
    attempt: int
    client: int
    settled: int = NO_ROUND  # the oldest checkpoint of the server: no resume starts from an earlier round
    met: int = NO_ROUND  # the last round in which the server used a reply of this client
    format: int = FORMAT


@dataclass(frozen=True)
class ReplyStatus:
    """Whether a node did what was requested."""

    refused: str = ""  # an error message; the reply then has no other content
    note: str = ""  # written into the record of the round


@dataclass(frozen=True)
class ClientInfo:
    """Which client a node is, and a summary of its data for the server."""

    client: int
    examples: int
    held_out: int
    shape: str  # of one example, such as "1 8 8"
    classes: int
    data: str  # hash of the examples
    simulated: int = 0  # in a simulation: the number of nodes that share the clients; the other fields are then empty


def message_content(
    header: MessageHeader,
    arrays: Mapping[str, ArrayRecord] | None = None,
    *,
    status: ReplyStatus | None = None,
    metrics: Mapping[str, float] | None = None,
    client_info: ClientInfo | None = None,
) -> RecordDict:
    content = RecordDict({HEADER: ConfigRecord(asdict(header))})
    for name, record in (arrays or {}).items():
        content[name] = record
    if status is not None:
        content[STATUS] = ConfigRecord(asdict(status))
    if client_info is not None:
        content[CLIENT_INFO] = ConfigRecord(asdict(client_info))
    if metrics is not None:
        content[METRICS] = MetricRecord(dict(metrics))
    return content


def header_of(content: RecordDict) -> MessageHeader:
    """InvalidMessage if the header is missing or of another format."""
    values = _fields_of(content, HEADER, MessageHeader)
    if values["format"] != FORMAT:
        raise InvalidMessage(
            f"its message format is {values['format']}, this fedgg reads {FORMAT}: install the same version"
        )
    return MessageHeader(**values)


def status_of(content: RecordDict) -> ReplyStatus:
    return ReplyStatus(**_fields_of(content, STATUS, ReplyStatus))


def client_info_of(content: RecordDict) -> ClientInfo:
    return ClientInfo(**_fields_of(content, CLIENT_INFO, ClientInfo))


def arrays_of(content: RecordDict, name: str) -> ArrayRecord:
    record = content.get(name)
    if not isinstance(record, ArrayRecord):
        raise InvalidMessage(f"it has no arrays {name!r}")
    return record


def metrics_of(content: RecordDict, expected: Collection[str]) -> dict[str, float]:
    """The metrics; InvalidMessage if their names are not exactly the expected ones."""
    record = content.get(METRICS)
    if not isinstance(record, MetricRecord) or set(record) != set(expected):
        names = sorted(record) if isinstance(record, MetricRecord) else "none"
        raise InvalidMessage(f"its metrics are {names}, expected {sorted(expected)}")
    metrics = {name: value for name, value in record.items() if isinstance(value, float)}
    if len(metrics) < len(record):
        raise InvalidMessage("a metric is not a number")
    return metrics


def diagnostic_key(name: str) -> str:
    """The name of an algorithm's diagnostic among the metrics of a reply."""
    return f"reading {name}"


def evaluated_model(content: RecordDict) -> str:
    """The model that a message wants scored: `global` (where it does not say), `personal` or `unseen`."""
    record = content.get(EVALUATION)
    model = record.get("model") if isinstance(record, ConfigRecord) else "global"
    if model not in ("global", "personal", "unseen"):
        raise InvalidMessage(f"it asks for the score of {model!r}, which this fedgg does not know")
    return str(model)


def header_mismatch(request: MessageHeader, reply: MessageHeader) -> str | None:
    """How the header of a reply differs from that of its request; None if it does not."""
    for name in ("run", "experiment", "client", "round", "attempt"):
        expected, value = getattr(request, name), getattr(reply, name)
        if expected != value:
            return f"it replied for {name} {value} instead of {expected}"
    return None


def array_bytes(content: RecordDict) -> int:
    """Bytes of all arrays."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def other_bytes(content: RecordDict) -> int:
    """Bytes of all config and metric records, serialized by Flower."""
    records = [*content.config_records.values(), *content.metric_records.values()]
    return sum(len(record.deflate()) for record in records)


def _fields_of(content: RecordDict, name: str, kind: type[Any]) -> dict[str, Any]:
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise InvalidMessage(f"it has no record {name!r}, so fedgg did not write it")
    types = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(kind)}
    for key, type_ in types.items():
        if type(record.get(key)) is not type_:
            raise InvalidMessage(f"its {key!r} is {record.get(key)!r}, not {type_.__name__}")
    return {key: record[key] for key in types}
