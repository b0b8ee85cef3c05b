"""Several streams of work on one GPU: each launches a little in turn, so that none waits for another's queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch


def interleave(works: Sequence[Iterator[None]], streams: Sequence[torch.cuda.Stream]) -> None:
    """Run all to their ends, each on its own stream, one launch after another in turn."""
    here = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(here)
    waiting = list(zip(works, streams, strict=True))
    while waiting:
        still = []
        for work, stream in waiting:
            with torch.cuda.stream(stream), suppress(StopIteration):
                next(work)
                still.append((work, stream))
        waiting = still
    for stream in streams:
        here.wait_stream(stream)
