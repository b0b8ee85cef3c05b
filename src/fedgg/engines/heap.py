"""Memory that a step gives back, kept for the next step.

A step frees what it needed for its activations and gradients, and the next one asks for the same again. The C library
hands large pieces back to the system at once, which clears every page before it lends it out again: for a small CNN
that is a tenth of a step.
"""

from __future__ import annotations

import ctypes
import platform

# The names and numbers of glibc's <malloc.h>.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

KEPT = 512 << 20  # bytes that may lie free at the end of the heap
APART = 64 << 20  # pieces of this size or more, such as data sets, do not come from the heap


def keep_freed_memory() -> bool:
    """For this process, for good; False where the C library is another one. Not for processes that are not our own."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT)) and bool(mallopt(M_MMAP_THRESHOLD, APART))
