"""Rows in Flower's records: raw bytes with their type and shape beside them, checked before anything is made of them.

Flower's own arrays are NumPy files. Ours are the bytes alone: what travels is what the algorithm declares and not a
byte more, nothing in it can be unpickled, and no file format has to be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord
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
