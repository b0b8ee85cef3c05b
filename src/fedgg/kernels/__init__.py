"""Triton kernels for operations that are slow in torch: many small models at once.

They do not depend on clients or algorithms. Each kernel has a reference in torch elsewhere in the library, and tests
compare the two. Triton is installed with torch on Linux with CUDA; `available()` tells whether it is installed.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def available() -> bool:
    return find_spec("triton") is not None
