"""Scratch memory of cuBLAS for captured steps: each stack of graphs has its own.

PyTorch keeps one scratch memory for each stream, hands streams out in turn from a pool of 32, and a captured product
remembers the address. Two graphs captured on what is the same stream would then write into the same scratch memory when
they are replayed side by side, and products of a single row, which are summed in parts there, came out wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_workspaces() -> Iterator[None]:
    """What is captured in here takes its scratch memory from the graph's own pool, and leaves none to others."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
