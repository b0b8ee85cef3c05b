"""The inside of a worker process: one task after another until the pipe closes.

A thread of its own listens to the pipe, so that the parent never waits for a worker to listen. That a worker ends at
once when its parent is gone, even in the middle of a client, is child_process.py's doing.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import platform
import queue
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedgg.engines.user_modules import UserModule, load_user_module, loaded_user_modules
from fedgg.engines.workers.transfer import PackedObject, pack, receive, send, unpack

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
