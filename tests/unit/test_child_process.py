"""Child processes: gone as soon as their parent is, however that ends, and not before."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from fedgg.child_process import child_process

PATIENCE = 60.0  # seconds; only a process that never ends takes that long
PARENT = """
import multiprocessing, sys, time
from fedgg.child_process import child_process, fork_server_modules
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    if sys.argv[1] == "forkserver":
        context.set_forkserver_preload(fork_server_modules())
    children = [child_process(context, "time:sleep", 600) for _ in range(2)]
    for child in children:
        child.start()
    print(*(child.pid for child in children), flush=True)
    time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_of_a_killed_parent_end(method: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(word) for word in parent.stdout.readline().split()]
    try:
        assert len(children) == 2
        assert all(map(is_alive, children))
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate()
        end = time.monotonic() + PATIENCE
        while any(map(is_alive, children)):
            assert time.monotonic() < end, "a child has outlived its parent"
            time.sleep(0.02)
    finally:
        for left in filter(is_alive, children):
            os.kill(left, signal.SIGKILL)


def test_a_child_outlives_the_thread_that_started_it() -> None:
    """The kernel would end it with that thread."""
    started: list[BaseProcess] = []

    def start() -> None:
        started.append(child_process(multiprocessing.get_context("spawn"), "time:sleep", 1.0))
        started[0].start()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    started[0].join()
    assert started[0].exitcode == 0
