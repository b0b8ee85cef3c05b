"""Child processes that end as soon as their parent has ended, also by kill -9.

On Linux the kernel kills them. On all systems a thread in the child waits for the end of the parent, which closes a
pipe. Both are set up before the child imports large modules.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from fedgg.errors import UserError

PR_SET_PDEATHSIG = 1  # of prctl(2)
STARTED_BY = "FEDGG_FORK_SERVER_STARTED_BY"  # environment variable: process id of the fork server's parent


def child_process(context: Any, target: str, *args: Any) -> BaseProcess:
    """A process, not yet started, that calls `module:function` and ignores Ctrl-C."""
    process: BaseProcess = context.Process(
        target=_run_target, args=(target, kernel_may_end_children(), args), daemon=True
    )
    return process


def kernel_may_end_children() -> bool:
    """Whether this is the main thread: the kernel kills children at the end of the thread that started them."""
    return threading.current_thread() is threading.main_thread()


def fork_server_modules(*modules: str) -> list[str]:
    """Modules that a fork server started by this process preloads, in order, so that it ends with this process."""
    if not kernel_may_end_children():
        return [*modules]
    os.environ[STARTED_BY] = str(os.getpid())
    return ["fedgg.end_fork_server", *modules]


def end_with(parent: int) -> None:
    """On Linux, the kernel kills this process when its parent ends; elsewhere this does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl was called
            os._exit(1)


def _run_target(target: str, by_kernel: bool, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    if by_kernel and os.getppid() == parent.pid:  # not if the kernel's parent is the fork server
        end_with(parent.pid)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(*args)


# Programs of others start processes that outlive them. All inherit an environment variable, by which they are found.


def psutil(command: str, extra: str) -> ModuleType:
    """The optional dependency of these functions; UserError that names the command which needs it."""
    try:
        return importlib.import_module("psutil")
    except ImportError:
        raise UserError(f"{command} needs psutil: pip install 'fedgg[{extra}]'") from None


def marked_processes(library: ModuleType, variable: str, mark: str) -> list[Any]:
    """Running processes whose environment variable has this value, or one below it (`mark/...`)."""
    processes = []
    for process in library.process_iter():
        with suppress(library.Error, OSError):
            value = process.environ().get(variable, "")
            if value == mark or value.startswith(f"{mark}/"):
                processes.append(process)
    return processes


def signal_all(library: ModuleType, processes: Iterable[Any], *, kill: bool) -> None:
    """SIGKILL or SIGTERM; processes that have ended meanwhile are skipped."""
    for process in processes:
        with suppress(library.Error):
            process.kill() if kill else process.terminate()
