"""Child processes that end as soon as their parent is gone, by kill -9 too.

On Linux the kernel ends them. Everywhere a thread waits for the parent's end, which the system shows by closing a pipe.
Both begin before the child imports anything large.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.process import BaseProcess
from typing import Any

PR_SET_PDEATHSIG = 1  # of prctl(2)
STARTED_BY = "FEDGG_FORK_SERVER_STARTED_BY"  # environment variable: the process that a fork server belongs to


def child_process(context: Any, target: str, *args: Any) -> BaseProcess:
    """A process, not started yet, that calls `module:function`; Ctrl-C is left to its parent."""
    process: BaseProcess = context.Process(target=_begin, args=(target, kernel_may_end_children(), args), daemon=True)
    return process


def kernel_may_end_children() -> bool:
    """The kernel takes the end of the thread that starts a child for the end of its parent."""
    return threading.current_thread() is threading.main_thread()


def fork_server_modules(*modules: str) -> list[str]:
    """What a fork server that this process starts is to import, in order, so that it ends with this process."""
    if not kernel_may_end_children():
        return [*modules]
    os.environ[STARTED_BY] = str(os.getpid())
    return ["fedgg.fork_server", *modules]


def end_with(parent: int) -> None:
    """Have the kernel end this process with its parent; where it cannot, nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it could be watched
            os._exit(1)


def _begin(target: str, by_kernel: bool, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    if by_kernel and os.getppid() == parent.pid:  # for the kernel, a fork server's processes are its children
        end_with(parent.pid)
    threading.Thread(target=wait, daemon=True).start()
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(*args)
