"""The worker process: receives tasks, runs them, sends the results; tensors travel beside the pickled objects.

A thread of its own listens to the pipe, so that the parent never waits for a worker to listen. That a worker ends at
once when its parent is gone, even in the middle of a client, is child_process.py's doing.

The pickle holds everything but the numbers. These travel beside it: a few inline, many in a file that lives in memory
and has no name, so that nothing is left behind when a process is killed, and a small /dev/shm does not matter. What is
`shared` is mapped by every process that receives it and stays one copy in the machine's memory; everything else is read
at once, so that no file stays open.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import platform
import queue
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fedgg.engines.user_code import UserModule, load_user_module, loaded_user_modules

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


# The names and numbers of glibc's <malloc.h>.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

KEEP_FREE = 512 << 20  # bytes that may lie free at the end of the heap
OWN_MAPPING = 64 << 20  # pieces of this size or more, such as data sets, do not come from the heap


@dataclass(frozen=True)
class TorchSettings:
    """Settings of the parent's torch that change results, and the user's files it has read."""

    dtype: torch.dtype
    deterministic: bool
    matmul_precision: str
    user_modules: list[UserModule]

    @classmethod
    def of_this_process(cls) -> TorchSettings:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(
            torch.get_default_dtype(), deterministic, torch.get_float32_matmul_precision(), loaded_user_modules()
        )

    def apply(self) -> None:
        torch.set_default_dtype(self.dtype)
        if self.deterministic != torch.are_deterministic_algorithms_enabled():  # asking is free, setting takes seconds
            torch.use_deterministic_algorithms(self.deterministic)
        torch.set_float32_matmul_precision(self.matmul_precision)
        for user_module in self.user_modules:
            load_user_module(user_module)


@dataclass(frozen=True)
class Done:
    result: object
    seconds: float


@dataclass(frozen=True)
class Unreadable:
    """The task could not be unpacked here: something in it cannot be imported by another process."""

    why: str


def work(pipe: Connection, parents_pipes: Sequence[Connection]) -> None:
    """`parents_pipes`: under fork, the parent's ends of all pipes; a copy left open would hide the parent's death."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker has inherited whatever stops its parent
    for other in parents_pipes:
        other.close()
    torch.set_num_threads(1)
    keep_freed_memory()
    inbox: queue.SimpleQueue[tuple[tuple[Any, ...], PackedObject | None]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, inbox), daemon=True).start()
    try:
        send(pipe, ("ready",))
        _run_tasks(pipe, inbox)
    except OSError:  # the parent is gone
        os._exit(0)


def keep_freed_memory() -> bool:
    """Tell malloc to keep what a step frees, for the rest of this process; False where the C library is not glibc.

    A step frees what it needed for its activations and gradients, and the next one asks for the same again. glibc hands
    large pieces back to the system at once, which clears every page before it lends it out again: for a small CNN that
    is a tenth of a step.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_TRIM_THRESHOLD, KEEP_FREE)) and bool(mallopt(M_MMAP_THRESHOLD, OWN_MAPPING))


def _run_tasks(pipe: Connection, inbox: queue.SimpleQueue[tuple[tuple[Any, ...], PackedObject | None]]) -> None:
    shared = _SharedObjects()
    while True:
        (kind, *content), packed = inbox.get()
        if kind == "unshare":
            for number in content:
                del shared[number]
        elif kind == "settings":
            content[0].apply()
        elif kind == "share":
            assert packed is not None
            shared[content[0]] = _unpacked(packed, shared)
        else:
            assert packed is not None
            kind, result = _result(packed, shared)
            packed = pack(result)
            send(pipe, (kind,), packed)
            packed.close()


def _listen(pipe: Connection, inbox: queue.SimpleQueue[tuple[tuple[Any, ...], PackedObject | None]]) -> None:
    while True:
        try:
            inbox.put(receive(pipe))
        except BaseException:  # the parent is gone, however that shows
            os._exit(0)


def _result(packed: PackedObject, shared: _SharedObjects) -> tuple[str, object]:
    task = _unpacked(packed, shared)
    if isinstance(task, Unreadable):
        return "unreadable", task
    started = time.perf_counter()
    try:
        return "done", Done(task.do(), time.perf_counter() - started)
    except Exception as error:
        error.add_note(f"in the process that worked on {task}:\n{traceback.format_exc()}")
        return "failed", _picklable(error)


def _unpacked(packed: PackedObject, shared: _SharedObjects) -> Any:
    try:
        return unpack(packed, shared)
    except _UnreadablePart as error:
        return error.args[0]
    except Exception as error:
        return Unreadable(f"{type(error).__name__}: {error}")


class _UnreadablePart(Exception):
    pass


class _SharedObjects(dict[int, Any]):
    """What the parent has lent, by number; what builds on something unreadable is unreadable for the same reason."""

    def __getitem__(self, number: int) -> Any:
        thing = super().__getitem__(number)
        if isinstance(thing, Unreadable):
            raise _UnreadablePart(thing)
        return thing


def _picklable(error: Exception) -> Exception:
    """The error itself, or its words where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        words = RuntimeError(f"{type(error).__name__}: {error}")
        words.__notes__ = error.__notes__
        return words
    return error
