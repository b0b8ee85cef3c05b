"""Hand-written GPU kernels (Triton) for what torch's own leave slow: many small models side by side.

Nothing here knows of clients or algorithms. Every kernel has a plain torch twin elsewhere in the library, which is the
definition; tests hold the two together. Triton comes with torch on Linux with CUDA; `available()` says whether it does.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def available() -> bool:
    return find_spec("triton") is not None
