"""Several streams of work on one GPU: each launches a little in turn, so that none waits for another's queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch


class CudaStreams:
    """As many streams as are needed, kept from round to round; on a CPU there are none, and work is done in turns."""

    def __init__(self) -> None:
        self._streams: list[torch.cuda.Stream] = []

    def run(self, works: Sequence[Iterator[None]], device: torch.device) -> None:
        """All to their ends, each on its own stream, one launch after another in turn."""
        if device.type != "cuda":
            _in_turn([(work, None) for work in works])
            return
        while len(self._streams) < len(works):
            self._streams.append(torch.cuda.Stream(device))
        streams, here = self._streams[: len(works)], torch.cuda.current_stream(device)
        for stream in streams:
            stream.wait_stream(here)
        try:
            _in_turn(list(zip(works, streams, strict=True)))
        finally:
            torch.cuda.set_stream(here)
        for stream in streams:
            here.wait_stream(stream)


def _in_turn(waiting: Sequence[tuple[Iterator[None], torch.cuda.Stream | None]]) -> None:
    while waiting:
        still = []
        for work, stream in waiting:
            if stream is not None:
                torch.cuda.set_stream(stream)  # a context would ask which one it was each time, and small steps wait
            with suppress(StopIteration):
                next(work)
                still.append((work, stream))
        waiting = still
