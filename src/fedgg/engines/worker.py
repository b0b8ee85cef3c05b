"""The inside of a worker process: one task after another until the pipe closes.

A thread of its own listens to the pipe, so that the parent never waits for a worker to listen. That a worker ends at
once when its parent is gone, even in the middle of a client, is child_process.py's doing.
"""

from __future__ import annotations

import os
import pickle
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

from fedgg.engines.heap import keep_freed_memory
from fedgg.engines.parcel import Parcel, pack, receive, send, unpack
from fedgg.engines.strangers import Stranger, meet, strangers


@dataclass(frozen=True)
class Manners:
    """Settings of the parent's torch that move numbers, and the user's files it has read."""

    dtype: torch.dtype
    deterministic: bool
    matmul_precision: str
    strangers: list[Stranger]

    @classmethod
    def of_this_process(cls) -> Manners:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(torch.get_default_dtype(), deterministic, torch.get_float32_matmul_precision(), strangers())

    def adopt(self) -> None:
        torch.set_default_dtype(self.dtype)
        if self.deterministic != torch.are_deterministic_algorithms_enabled():  # asking is free, setting takes seconds
            torch.use_deterministic_algorithms(self.deterministic)
        torch.set_float32_matmul_precision(self.matmul_precision)
        for stranger in self.strangers:
            meet(stranger)


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
    inbox: queue.SimpleQueue[tuple[tuple[Any, ...], Parcel | None]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, inbox), daemon=True).start()
    try:
        send(pipe, ("ready",))
        _work_off(pipe, inbox)
    except OSError:  # the parent is gone, and nobody is left to tell
        os._exit(0)


def _work_off(pipe: Connection, inbox: queue.SimpleQueue[tuple[tuple[Any, ...], Parcel | None]]) -> None:
    kept = _Kept()
    while True:
        (kind, *about), parcel = inbox.get()
        if kind == "forget":
            for number in about:
                del kept[number]
        elif kind == "manners":
            about[0].adopt()
        elif kind == "keep":
            assert parcel is not None
            kept[about[0]] = _unpacked(parcel, kept)
        else:
            assert parcel is not None
            kind, answer = _answer(parcel, kept)
            packed = pack(answer)
            send(pipe, (kind,), packed)
            packed.close()


def _listen(pipe: Connection, inbox: queue.SimpleQueue[tuple[tuple[Any, ...], Parcel | None]]) -> None:
    while True:
        try:
            inbox.put(receive(pipe))
        except BaseException:  # the parent is gone, however that shows
            os._exit(0)


def _answer(parcel: Parcel, kept: _Kept) -> tuple[str, object]:
    task = _unpacked(parcel, kept)
    if isinstance(task, Unreadable):
        return "unreadable", task
    started = time.perf_counter()
    try:
        return "done", Done(task.do(), time.perf_counter() - started)
    except Exception as error:
        error.add_note(f"in the process that worked on {task}:\n{traceback.format_exc()}")
        return "failed", _that_travels(error)


def _unpacked(parcel: Parcel, kept: _Kept) -> Any:
    try:
        return unpack(parcel, kept)
    except _NotRead as error:
        return error.args[0]
    except Exception as error:
        return Unreadable(f"{type(error).__name__}: {error}")


class _NotRead(Exception):
    pass


class _Kept(dict[int, Any]):
    """What the parent has lent, by number; what builds on something unreadable is unreadable for the same reason."""

    def __getitem__(self, number: int) -> Any:
        thing = super().__getitem__(number)
        if isinstance(thing, Unreadable):
            raise _NotRead(thing)
        return thing


def _that_travels(error: Exception) -> Exception:
    """The error itself, or its words where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        words = RuntimeError(f"{type(error).__name__}: {error}")
        words.__notes__ = error.__notes__
        return words
    return error
