"""The checkpoints of a run in progress: when one is due, and writing it in a thread while the next round is trained."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from fedgg.core.tensor_rows import Rows
from fedgg.lab.checkpoint import Snapshot
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import State
from fedgg.lab.store import Store

SHARE = 20  # writing checkpoints takes at most one part in so many of the time, unless settings say otherwise


class CheckpointWriter:
    """Writes one checkpoint at a time. One that becomes due meanwhile is postponed to the end of a later round."""

    def __init__(self, store: Store, experiment: Experiment, rounds_done: int):
        self._store = store
        self._experiment = experiment
        self._saved = rounds_done  # of the newest checkpoint on disk
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: tuple[Snapshot, Future[set[int]]] | None = None
        self._copies: Rows = {}  # of the state, in memory that every snapshot uses again
        self._begun = time.monotonic()
        self._seconds = 0.0  # that the last checkpoint took

    def round_done(self, state: State) -> None:
        """Begin a checkpoint if one is due and none is being written; an error of the one before is raised here."""
        if self._in_flight is not None and self._in_flight[1].done():
            self.wait()
        if self._in_flight is None and self._is_due(state.rounds_done):
            self._begun = time.monotonic()
            content = self._store.snapshot(state, self._experiment, copy_into=self._copies)
            self._in_flight = content, self._thread.submit(self._write, content)

    def save_now(self, state: State) -> None:
        """Return when a checkpoint of this state is on the disk."""
        self.wait()
        if state.rounds_done > self._saved:
            self._store.save(state, self._experiment)
            self._saved = state.rounds_done

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; an error in it is raised here, once."""
        if self._in_flight is None:
            return
        content, written = self._in_flight
        try:
            rounds = written.result()
        finally:
            if written.done():  # and not interrupted by Ctrl-C
                self._in_flight = None
        self._store.unpin(content, rounds)
        self._saved = content.rounds_done

    def close(self) -> None:
        """Wait for the thread, Ctrl-C or not: it must not write once the lock on the folder is released."""
        interrupted: KeyboardInterrupt | None = None
        while True:
            try:
                self._thread.shutdown()
                break
            except KeyboardInterrupt as interrupt:
                interrupted = interrupt
        if interrupted is not None:
            raise interrupted

    def _is_due(self, rounds_done: int) -> bool:
        settings = self._experiment.server
        if settings.checkpoint_every is not None:
            return rounds_done // settings.checkpoint_every > self._saved // settings.checkpoint_every
        return time.monotonic() - self._begun >= min(settings.checkpoint_seconds, SHARE * self._seconds)

    def _write(self, content: Snapshot) -> set[int]:
        rounds = self._store.write(content)
        self._seconds = time.monotonic() - self._begun
        return rounds
