"""A process that keeps what it has freed does not ask the system for it again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Eight pieces of 4 MB, again and again: 8,192 pages each time, if they are new.
PROGRAM = """
import ctypes, resource, sys
import torch
from fedgg.engines.workers.process import keep_freed_memory

torch.set_num_threads(1)
ctypes.CDLL(None).mallopt(-3, 1 << 17)  # where glibc starts; named, so that it does not move on by itself
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def use() -> None:
    pieces = [torch.ones(1 << 20) for _ in range(8)]
    del pieces

for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages(word: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own")
def test_freed_memory_is_kept() -> None:
    assert pages("keep") < 2048
    assert pages("leave") > 8192
