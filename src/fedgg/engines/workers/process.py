"""The worker process: receives tasks, runs them and sends the results; tensors are sent outside the pickle.

A thread reads the pipe, so that the parent does not block when it sends to a busy worker. child_process.py ends a
worker as soon as its parent has ended, also in the middle of a client.

Tensor data are sent outside the pickle: small ones inline, large ones in an anonymous file in memory, so that no file
is left behind when a process is killed and the size of /dev/shm does not matter. Objects packed as `shared` are mapped
by the processes that receive them and exist once in the machine's memory; others are read at once, so that no file
stays open. Tensors of a GPU are sent by way of the host's memory, and arrive on the current GPU of the receiver.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgg.engines.import_user_file import UserModule, load_user_module, loaded_user_modules
from fedgg.older_python import add_note

VISIBLE = "CUDA_VISIBLE_DEVICES"
INLINE = 1 << 16  # bytes of tensor data that are sent inline; more are sent in a file
ALIGNED = 64  # bytes, like torch's allocations: kernels may round differently on unaligned data


@dataclass(frozen=True)
class PackedObject:
    """A pickled object with its buffers. `places` are start and length of each buffer, in `inline` or in the file."""

    pickled: bytes
    places: tuple[tuple[int, int], ...]
    inline: Any  # bytes, or an array of them
    file: int | None  # descriptor
    shared: bool

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)


def pack(
    value: Any,
    known: Mapping[int, int] | None = None,
    *,
    shared: bool = False,
    in_file: bool = True,
    packer: Callable[..., pickle.Pickler] | None = None,
) -> PackedObject:
    """`known`: numbers of objects that the receiver already has, by the objects' `id`.

    `in_file`: whether large buffers go into a file; else all are inline. `packer`: a subclass of TensorsApart.
    """
    stream, out_of_band = io.BytesIO(), list[pickle.PickleBuffer]()
    (packer or _Packer)(stream, known or {}, out_of_band).dump(value)
    buffers = [buffer.raw() for buffer in out_of_band]
    places, end = [], 0
    for buffer in buffers:
        places.append((end, buffer.nbytes))
        end += -(-buffer.nbytes // ALIGNED) * ALIGNED
    if end <= INLINE or not in_file:
        inline = b"".join(bytes(buffer).ljust(-(-buffer.nbytes // ALIGNED) * ALIGNED, b"\0") for buffer in buffers)
        return PackedObject(stream.getvalue(), tuple(places), inline, None, shared and not in_file)
    return PackedObject(stream.getvalue(), tuple(places), b"", _written(buffers, places, end), shared)


def unpack(packed: PackedObject, known: Mapping[int, Any] | None = None) -> Any:
    """The object, with its tensors copied or mapped; closes the file."""
    try:
        buffers = _mapped(packed) if packed.shared else [_read(packed, *place) for place in packed.places]
    finally:
        packed.close()
    return _Unpacker(io.BytesIO(packed.pickled), known or {}, buffers).load()


def send(pipe: Connection, label: tuple[Any, ...], packed: PackedObject | None = None) -> None:
    """Sends a label and optionally a packed object, whose file stays open here."""
    if packed is None:
        pipe.send_bytes(pickle.dumps((label, None)))
        return
    content = (packed.pickled, packed.places, packed.inline, packed.file is not None, packed.shared)
    pipe.send_bytes(pickle.dumps((label, content)))
    if packed.file is not None:
        reduction.send_handle(pipe, packed.file, None)  # the receiver's process id is used on Windows only


def receive(pipe: Connection) -> tuple[tuple[Any, ...], PackedObject | None]:
    """What `send` sent; the receiver unpacks or closes it. EOFError when the other end is closed."""
    try:
        label, content = pickle.loads(pipe.recv_bytes())
        if content is None:
            return label, None
        pickled, places, inline, has_file, shared = content
        file = reduction.recv_handle(pipe) if has_file else None
    except (OSError, RuntimeError) as error:  # the sender was killed within a message
        raise EOFError from error
    return label, PackedObject(pickled, places, inline, file, shared)


class TensorsApart:
    """Of a pickler: tensor data outside the pickle, and numbers in place of objects that the receiver has."""

    def __init__(self, stream: io.BytesIO, known: Mapping[int, int], out_of_band: list[pickle.PickleBuffer]):
        options: dict[str, Any] = {"protocol": 5, "buffer_callback": out_of_band.append}
        super().__init__(stream, **options)  # type: ignore[call-arg]  # append returns None: out of band
        self._known = known

    def persistent_id(self, value: Any) -> int | None:
        return self._known.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type not in ("cpu", "cuda") or value.layout is not torch.strided:
            return NotImplemented
        content = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        made = _gpu_tensor if value.is_cuda else _tensor
        return made, (pickle.PickleBuffer(content.data), value.dtype, tuple(value.shape))


class _Packer(TensorsApart, pickle.Pickler):
    pass


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, known: Mapping[int, Any], buffers: Sequence[memoryview]):
        super().__init__(stream, buffers=buffers)
        self._known = known

    def persistent_load(self, number: int) -> Any:
        return self._known[number]


def _tensor(content: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _gpu_tensor(content: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return _tensor(content, dtype, shape).cuda()


def _written(buffers: list[memoryview], places: list[tuple[int, int]], size: int) -> int:
    """A new anonymous file with these contents: in memory if possible, else in the temporary folder."""
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
    """Views into a copy-on-write mapping: writes are visible in the writing process only.

    Without a file, views into what came inline, unless it is not aligned.
    """
    if packed.file is None:
        whole = memoryview(packed.inline)
        if len(whole) and np.frombuffer(whole, np.uint8).ctypes.data % ALIGNED:
            return [_read(packed, *place) for place in packed.places]
        return [whole[start : start + length] for start, length in packed.places]
    whole = memoryview(mmap.mmap(packed.file, 0, access=mmap.ACCESS_COPY))
    return [whole[start : start + length] for start, length in packed.places]


def _read(packed: PackedObject, start: int, length: int) -> memoryview:
    buffer = torch.empty(length, dtype=torch.uint8).numpy().data
    if packed.file is None:
        buffer[:] = memoryview(packed.inline)[start : start + length]
        return buffer
    position = 0
    while position < length:
        position += os.preadv(packed.file, [buffer[position:]], start + position)
    return buffer


# Constants of glibc's <malloc.h>.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

KEEP_FREE = 512 << 20  # bytes that may stay free at the end of the heap
OWN_MAPPING = 64 << 20  # allocations of this size or more, such as data sets, are mapped, not taken from the heap


@dataclass(frozen=True)
class TorchSettings:
    """Settings of torch in the parent that affect results, and the user modules it has loaded."""

    dtype: torch.dtype
    deterministic: bool
    matmul_precision: str
    cudnn: tuple[bool, bool, bool]
    user_modules: list[UserModule]

    @classmethod
    def of_this_process(cls) -> TorchSettings:
        deterministic, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn
        return cls(
            torch.get_default_dtype(),
            deterministic,
            torch.get_float32_matmul_precision(),
            (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark),
            loaded_user_modules(),
        )

    def apply(self) -> None:
        torch.set_default_dtype(self.dtype)
        if self.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it takes seconds
            torch.use_deterministic_algorithms(self.deterministic)
        torch.set_float32_matmul_precision(self.matmul_precision)
        cudnn = torch.backends.cudnn
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = self.cudnn
        for user_module in self.user_modules:
            load_user_module(user_module)


@dataclass(frozen=True)
class Done:
    result: object
    seconds: float


@dataclass(frozen=True)
class Unreadable:
    """The task could not be unpickled: it refers to something that another process cannot import."""

    reason: str


def work(pipe: Connection, parents_pipes: Sequence[Connection], device: str) -> None:
    """Runs tasks until the parent ends. It sees no other GPU than its own.

    `parents_pipes`: under fork, the parent's ends of all pipes; while a copy is open, the parent's end is not noticed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker inherits its parent's handler
    for inherited in parents_pipes:
        inherited.close()
    see_only(device)
    torch.set_num_threads(1)
    keep_freed_memory()
    inbox: queue.SimpleQueue[tuple[tuple[Any, ...], PackedObject | None]] = queue.SimpleQueue()
    threading.Thread(target=_read_pipe, args=(pipe, inbox), daemon=True).start()
    try:
        send(pipe, ("ready",))
        _run_tasks(pipe, inbox)
    except OSError:  # the parent has ended
        os._exit(0)


def see_only(device: str) -> None:
    """In a process that has not used a GPU: hide all but this one, as `cuda:1`, which becomes `cuda`."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        visible = [name for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
        os.environ[VISIBLE] = visible[int(number)] if int(number) < len(visible) else number


def keep_freed_memory() -> bool:
    """Configures malloc to keep freed memory in this process; False if the C library is not glibc.

    Each step frees its activations and gradients, and the next step allocates the same sizes again. By default glibc
    returns large blocks to the system, which clears the pages before it hands them out again: for a small CNN this is a
    tenth of a step.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_TRIM_THRESHOLD, KEEP_FREE)) and bool(mallopt(M_MMAP_THRESHOLD, OWN_MAPPING))


def _run_tasks(pipe: Connection, inbox: queue.SimpleQueue[tuple[tuple[Any, ...], PackedObject | None]]) -> None:
    shared = SharedObjects()
    while True:
        (kind, *content), packed = inbox.get()
        if kind == "unshare":
            for number in content:
                del shared[number]
        elif kind == "settings":
            content[0].apply()
        elif kind == "share":
            assert packed is not None
            shared[content[0]] = unpacked(packed, shared)
        else:
            assert packed is not None
            kind, result = result_of(packed, shared)
            packed = pack(result)
            send(pipe, (kind,), packed)
            packed.close()


def _read_pipe(pipe: Connection, inbox: queue.SimpleQueue[tuple[tuple[Any, ...], PackedObject | None]]) -> None:
    while True:
        try:
            inbox.put(receive(pipe))
        except BaseException:  # the parent has ended; its connection can fail in several ways
            os._exit(0)


def result_of(packed: PackedObject, shared: SharedObjects) -> tuple[str, object]:
    """What the task gives, as "done", "failed" or "unreadable"."""
    task = unpacked(packed, shared)
    if isinstance(task, Unreadable):
        return "unreadable", task
    started = time.perf_counter()
    try:
        return "done", Done(task.do(), time.perf_counter() - started)
    except Exception as error:
        add_note(error, f"in the worker process of {task}:\n{traceback.format_exc()}")
        return "failed", _picklable(error)


def unpacked(packed: PackedObject, shared: SharedObjects) -> Any:
    """The object, or `Unreadable`."""
    try:
        return unpack(packed, shared)
    except _UnreadablePart as error:
        return error.args[0]
    except Exception as error:
        return Unreadable(f"{type(error).__name__}: {error}")


class _UnreadablePart(Exception):
    pass


class SharedObjects(dict[int, Any]):
    """Objects shared by the parent, by number; an object that refers to an unreadable one is unreadable too."""

    def __getitem__(self, number: int) -> Any:
        value = super().__getitem__(number)
        if isinstance(value, Unreadable):
            raise _UnreadablePart(value)
        return value


def _picklable(error: Exception) -> Exception:
    """The error itself, or a RuntimeError with its message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        substitute.__notes__ = error.__notes__
        return substitute
    return error
