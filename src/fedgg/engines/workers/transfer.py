"""Python objects with tensors, on their way to another process.

The pickle holds everything but the numbers. These travel beside it: a few inline, many in a file that lives in memory
and has no name, so that nothing is left behind when a process is killed, and a small /dev/shm does not matter. What is
`shared` is mapped by every process that receives it and stays one copy in the machine's memory; everything else is read
at once, so that no file stays open.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

INLINE = 1 << 16  # bytes of numbers that go with the pickle; more go into a file
ALIGNED = 64  # torch's own allocations are, and kernels may round differently where data are not


@dataclass(frozen=True)
class PackedObject:
    """A packed object. `places` are start and length of each buffer, in `inline` or in the file."""

    pickled: bytes
    places: tuple[tuple[int, int], ...]
    inline: bytes
    file: int | None  # descriptor
    shared: bool

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)


def pack(thing: Any, known: Mapping[int, int] | None = None, *, shared: bool = False) -> PackedObject:
    """`known`: objects, by their `id`, that the receiver has under a number already."""
    stream, out_of_band = io.BytesIO(), list[pickle.PickleBuffer]()
    _Packer(stream, known or {}, out_of_band).dump(thing)
    buffers = [buffer.raw() for buffer in out_of_band]
    places, end = [], 0
    for buffer in buffers:
        places.append((end, buffer.nbytes))
        end += -(-buffer.nbytes // ALIGNED) * ALIGNED
    if end <= INLINE:
        inline = b"".join(bytes(buffer).ljust(-(-buffer.nbytes // ALIGNED) * ALIGNED, b"\0") for buffer in buffers)
        return PackedObject(stream.getvalue(), tuple(places), inline, None, False)
    return PackedObject(stream.getvalue(), tuple(places), b"", _written(buffers, places, end), shared)


def unpack(packed: PackedObject, known: Mapping[int, Any] | None = None) -> Any:
    """The object again, with tensors of its own or mapped; the file is closed."""
    try:
        buffers = _mapped(packed) if packed.shared else [_read(packed, *place) for place in packed.places]
    finally:
        packed.close()
    return _Unpacker(io.BytesIO(packed.pickled), known or {}, buffers).load()


def send(pipe: Connection, label: tuple[Any, ...], packed: PackedObject | None = None) -> None:
    """A label, and perhaps a packed, whose file stays open here."""
    if packed is None:
        pipe.send_bytes(pickle.dumps((label, None)))
        return
    sheet = (packed.pickled, packed.places, packed.inline, packed.file is not None, packed.shared)
    pipe.send_bytes(pickle.dumps((label, sheet)))
    if packed.file is not None:
        reduction.send_handle(pipe, packed.file, None)  # whose process it goes to matters on Windows only


def receive(pipe: Connection) -> tuple[tuple[Any, ...], PackedObject | None]:
    """What `send` sent; the receiver unpacks or closes it. EOFError when the other end is gone."""
    try:
        label, sheet = pickle.loads(pipe.recv_bytes())
        if sheet is None:
            return label, None
        pickled, places, inline, has_file, shared = sheet
        file = reduction.recv_handle(pipe) if has_file else None
    except (OSError, RuntimeError) as torn:  # killed within a message
        raise EOFError from torn
    return label, PackedObject(pickled, places, inline, file, shared)


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, known: Mapping[int, int], out_of_band: list[pickle.PickleBuffer]):
        super().__init__(stream, protocol=5, buffer_callback=out_of_band.append)  # append gives None: out of band
        self._known = known

    def persistent_id(self, thing: Any) -> int | None:
        return self._known.get(id(thing))

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not Tensor or thing.device.type != "cpu" or thing.layout is not torch.strided:
            return NotImplemented
        numbers = thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(numbers.data), thing.dtype, tuple(thing.shape))


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, known: Mapping[int, Any], buffers: Sequence[memoryview]):
        super().__init__(stream, buffers=buffers)
        self._known = known

    def persistent_load(self, number: int) -> Any:
        return self._known[number]


def _tensor(numbers: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(numbers, dtype=dtype).view(shape)


def _written(buffers: list[memoryview], places: list[tuple[int, int]], size: int) -> int:
    """A new file with these contents: in memory, or where that has no room or no files, in the temporary folder."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("fedgg")
        try:
            return _filled(file, buffers, places, size)
        except OSError:
            os.close(file)
    with tempfile.TemporaryFile() as nameless:
        return _filled(os.dup(nameless.fileno()), buffers, places, size)


def _filled(file: int, buffers: list[memoryview], places: list[tuple[int, int]], size: int) -> int:
    os.ftruncate(file, size)
    for buffer, (start, length) in zip(buffers, places, strict=True):
        position = 0
        while position < length:
            position += os.pwrite(file, buffer[position:], start + position)
    return file


def _mapped(packed: PackedObject) -> list[memoryview]:
    """Views into a mapping that is shared until it is written to; what is written stays in the writing process."""
    assert packed.file is not None
    whole = memoryview(mmap.mmap(packed.file, 0, access=mmap.ACCESS_COPY))
    return [whole[start : start + length] for start, length in packed.places]


def _read(packed: PackedObject, start: int, length: int) -> memoryview:
    mine = torch.empty(length, dtype=torch.uint8).numpy().data
    if packed.file is None:
        mine[:] = packed.inline[start : start + length]
        return mine
    position = 0
    while position < length:
        position += os.preadv(packed.file, [mine[position:]], start + position)
    return mine
