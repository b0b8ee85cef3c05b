"""A run in progress: opened new or from its last checkpoint, round by round with its checkpoints, to its summary."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedgg.core.evaluation import Score
from fedgg.core.server import PLAIN
from fedgg.core.tensor_rows import Rows
from fedgg.engines import RoundJob
from fedgg.engines.base import Look, Scorer, score_here
from fedgg.engines.fused.net import fused_net
from fedgg.lab.build import Federation
from fedgg.lab.checkpoint import Snapshot, snapshot, unpin
from fedgg.lab.client_state import RowsOnDisk
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import Choice
from fedgg.lab.observer import Observer
from fedgg.lab.one_round import (
    Closed,
    Diverged,
    Ends,
    State,
    begin,
    close_before_looking,
    close_without_offender,
    moved,
)
from fedgg.lab.preflight_checks import rehearse
from fedgg.lab.resume import resume
from fedgg.lab.round_record import NamedOnce, by_reason, client_name, early_stop, record_of, summary_of
from fedgg.lab.run_result import (
    Inputs,
    Run,
    final_tensors,
    personal_module,
    personal_module_from_folder,
    trained_module,
)
from fedgg.lab.store import Store

SHARE = 20  # writing checkpoints takes at most one part in so many of the time, unless settings say otherwise


@contextmanager
def opened(
    build_it: Callable[[], Federation],
    experiment: Experiment,
    folder: Path | None,
    observer: Observer | None,
    label: str = "",
) -> Iterator[Session]:
    """A run at its start, or at its last checkpoint, with its folder locked."""
    store = Store(folder) if folder else None
    with ExitStack() as locks:
        known = store is not None and store.lock_file.exists()
        if store is not None and known:
            locks.enter_context(store.locked())  # before anything is built for a run that another process works on
        if store is not None and store.holds_a_run():
            store.check_format()
        federation = build_it()  # before a new folder: a mistake leaves nothing behind
        if store is not None and store.holds_a_run() and store.as_begun(federation.experiment) != federation.experiment:
            federation = under_fused(federation, "the rounds of this folder were trained by the fused step")
        experiment = federation.experiment
        if federation.aggregation.collector is not PLAIN:
            rehearse(federation)
        if store is not None and not known:
            locks.enter_context(store.locked())

        def notice(message: str) -> None:
            if observer is not None:
                observer.on_notice(label, message)

        for message in federation.notices:
            notice(message)
        inputs = Inputs.of(federation)
        if store is not None and store.holds_a_run():
            state, rounds, ended = resume(store, federation, notice)
        else:
            if store is not None:
                store.create(federation, inputs.to_json())
            state, rounds, ended = begin(federation), [], None
        if observer is not None:
            observer.on_experiment(label, experiment)
            observer.on_start(label, state.rounds_done, experiment.rounds)
        checkpoints = CheckpointWriter(store, experiment, state.rounds_done) if store is not None else None
        session = Session(
            experiment, federation, inputs, store, checkpoints, observer, label, notice, state, rounds, ended
        )
        if ended is not None and ended["status"] == "diverged":
            session.diverged = ended["why"]  # the same numbers would come again
        if experiment.stop is not None:
            session.stopped = early_stop(experiment, federation.net.metrics, rounds)
        try:
            yield session
        except BaseException:
            session.keep()
            raise
        finally:
            try:
                if checkpoints is not None:
                    checkpoints.close()
            finally:
                for rows in (session.state.memory, session.state.kept_buffers):
                    if isinstance(rows, RowsOnDisk):
                        rows.shelf.file.close()


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C and SIGTERM, where they have a handler, take effect at the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals do not interrupt other threads
        return
    received: list[tuple[int, Any]] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    called = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in called:
        signal.signal(number, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in called.items():
            signal.signal(number, handler)
    for arrived, frame in received[:1]:
        called[signal.Signals(arrived)](arrived, frame)


@dataclass
class Session:
    """A run in progress: the only thing in the library that changes as it goes."""

    experiment: Experiment
    federation: Federation
    inputs: Inputs  # of the final model
    store: Store | None
    checkpoints: CheckpointWriter | None  # None without a store
    observer: Observer | None
    label: str  # of the run, for the observer
    notice: Callable[[str], None]
    state: State
    rounds: list[dict[str, Any]]
    ended: dict[str, Any] | None  # the summary of a run that had ended when it was opened
    diverged: str | None = None
    stopped: str | None = None  # why the run ends early (`[stop]`)
    closed: Closed | None = None  # a round that has been aggregated but not evaluated
    lost: NamedOnce = field(default_factory=NamedOnce)
    without_value: set[str] = field(default_factory=set)  # test scores that were not finite, as the observer was told
    whole: bool = field(init=False, default=True)  # whether state and history are of the same round

    @property
    def over(self) -> bool:
        ended = self.diverged is not None or self.stopped is not None
        return ended or self.state.rounds_done >= self.federation.last_round

    def aggregate(self, job: RoundJob, ends: Ends, seconds: float) -> tuple[Look, ...] | None:
        """The evaluations that are due of the new model; None if the run has diverged and is over."""
        try:
            self.closed = close_before_looking(self.federation, self.state, job, ends, seconds)
        except Diverged as end:
            self._end(end)
            return None
        return self.closed.looks

    def write_down(self, scores: list[Score], seconds: float | None = None, score: Scorer = score_here) -> None:
        """The round is done: its record goes into the history, and its state into a checkpoint, if one is due."""
        assert self.closed is not None
        closed, self.closed = self.closed, None
        try:
            record = record_of(self.federation, closed, scores, seconds)
        except Diverged as end:
            again = close_without_offender(self.federation, self.state, closed, score)
            if again is None:
                self._end(end)
                return
            closed = again[0]
            record = record_of(self.federation, closed, again[1], seconds)
        with interrupts_deferred():  # so that a checkpoint of this round can be written then
            self.whole = False
            if self.store:
                self.store.check_lock()  # the clients' state may go to a new file
            cohort, clients = closed.job.cohort, len(self.federation.examples)
            folder = self.store.checkpoint_folder if self.store else None
            self.state = moved(closed.state, cohort, clients, self.experiment.server, folder)
            self.rounds.append(record)
            if record["lost"]:
                for sentence in self.lost.sentences(record["round"], record["lost"]):
                    self.notice(sentence)
            for name, value in record.items():
                if value is None and name.startswith("test_") and name not in self.without_value:
                    self.without_value.add(name)
                    self.notice(f"round {record['round']}: {name} is not finite and recorded as null")
            for note in record.get("notes", ()):
                self.notice(f"round {record['round']}: client {client_name(note)}: {note['what']}")
            if self.store:
                self.store.append(record)
            self.whole = True
        if self.experiment.stop is not None:
            self.stopped = early_stop(self.experiment, self.federation.net.metrics, self.rounds)
        if self.checkpoints is not None:
            if self.over:
                self.checkpoints.save_now(self.state)
            else:
                self.checkpoints.round_done(self.state)
        if self.observer is not None:
            self.observer.on_round(self.label, record)

    def keep(self) -> None:
        """Stopped between two checkpoints: rounds that are in the history already need not be trained again."""
        if self.whole and self.checkpoints is not None:
            with suppress(Exception):  # the reason of the stop is what is to be reported
                self.checkpoints.wait()
            with suppress(Exception):
                self.checkpoints.save_now(self.state)

    def _end(self, end: Diverged) -> None:
        lost = [{**self.federation.named(gone.client), "why": gone.why} for gone in end.lost]
        names = "; ".join(f"client {', '.join(who)}: {why}" for why, who in by_reason(lost).items())
        self.diverged = f"{end}" + (f" ({names})" if names else "")
        if self.checkpoints is not None:
            self.checkpoints.save_now(self.state)  # the history up to here is valid, and so is its model

    def finish(self) -> Run:
        weights, unsaved = final_tensors(self.federation.net, self.state.server)
        summary = summary_of(self.federation, self.rounds, self.diverged, self.stopped)
        if self.ended is not None and self._is_written(self.ended, summary, unsaved):
            summary = self.ended  # what was recorded stands, epsilon by an older accountant included
        elif self.store:
            self.store.finish(weights, unsaved, summary)
        trained = partial(trained_module, self.federation.net.module, weights, unsaved)
        folder = self.store.folder if self.store else None
        if self.observer is not None:
            self.observer.on_end(self.label, summary)
        personal: Callable[[int], nn.Module] | None = None
        if self.experiment.personal is not None and self.store is None:
            personal = partial(personal_module, self.federation.net, self.state)
        elif self.experiment.personal is not None and self.store is not None:
            personal = partial(personal_module_from_folder, self.store, self.experiment, self.inputs, trained)
        return Run(self.experiment, folder, self.rounds, summary, weights, self.inputs, trained, personal)

    def _is_written(self, ended: dict[str, Any], summary: dict[str, Any], unsaved: Rows) -> bool:
        """Whether the folder has the end of the run; a summary of fewer rounds is older than the wish for more."""
        assert self.store is not None
        if ended["rounds_done"] != summary["rounds_done"]:
            return False
        names = ["model.safetensors", *(["buffers.safetensors"] if unsaved else [])]
        damaged = [damage for name in names if (damage := self.store.damage_of_final(name)) is not None]
        for damage in damaged:
            self.notice(f"{damage}, and is written again")
        return not damaged


def under_fused(federation: Federation, reason: str) -> Federation:
    """The same federation, trained by the fused step in place of the engine that its experiment names."""
    experiment = federation.experiment.changed({"engine.name": "fused"})
    choice = Choice("fused", reason, f"engine: fused ({reason})")
    notices = (*federation.notices, f"engine: fused ({reason})")
    return replace(federation, experiment=experiment, net=fused_net(federation.net), choice=choice, notices=notices)


class CheckpointWriter:
    """Writes one checkpoint at a time. One that becomes due meanwhile is postponed to the end of a later round."""

    def __init__(self, store: Store, experiment: Experiment, rounds_done: int):
        self._store = store
        self._settings = experiment.server
        self._trajectory = experiment.trajectory()
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
            content = snapshot(state, self._trajectory, self._store.digests(), copy_into=self._copies)
            self._in_flight = content, self._thread.submit(self._write, content)

    def save_now(self, state: State) -> None:
        """Return when a checkpoint of this state is on the disk."""
        self.wait()
        if state.rounds_done > self._saved:
            content = snapshot(state, self._trajectory, self._store.digests())
            rounds = self._store.write(content)
            if content.shelved:
                unpin(content, rounds)
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
        if content.shelved:
            unpin(content, rounds)
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
        if (every := self._settings.checkpoint_every) is not None:
            return rounds_done // every > self._saved // every
        return time.monotonic() - self._begun >= min(self._settings.checkpoint_seconds, SHARE * self._seconds)

    def _write(self, content: Snapshot) -> set[int]:
        rounds = self._store.write(content)
        self._seconds = time.monotonic() - self._begun
        return rounds
