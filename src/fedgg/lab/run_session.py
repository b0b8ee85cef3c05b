"""A run in progress: opened new or from its last checkpoint, round by round, to its summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedgg.aggregation.privacy import OLD_ACCOUNTANT
from fedgg.core.client_rows import Rows
from fedgg.core.evaluation import Score
from fedgg.core.server import PLAIN
from fedgg.engines import RoundJob
from fedgg.engines.base import Look, Scorer, score_here
from fedgg.errors import UserError
from fedgg.lab.build import Federation, under_fused
from fedgg.lab.client_state import RowsOnDisk
from fedgg.lab.config import Experiment
from fedgg.lab.dry_run import rehearse
from fedgg.lab.observer import Observer
from fedgg.lab.predictions import Inputs
from fedgg.lab.round_record import NamedOnce, by_reason, client_name, summary_of
from fedgg.lab.run_result import Run, final_weights, trained_module, unsaved_buffers
from fedgg.lab.run_state import (
    Closed,
    Diverged,
    Ends,
    State,
    begin,
    close_before_looking,
    close_without_offender,
    moved,
    next_job,
    record_of,
)
from fedgg.lab.store import Store, described_engine


@contextmanager
def opened(
    build_it: Callable[[], Federation],
    experiment: Experiment,
    folder: Path | None,
    observer: Observer,
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
        if store is not None and store.as_begun(federation.experiment) != federation.experiment:
            federation = under_fused(federation, "the rounds of this folder were trained by the fused step")
        experiment = federation.experiment
        if federation.aggregation.collector is not PLAIN:
            rehearse(federation)
        if store is not None and not known:
            locks.enter_context(store.locked())
        notice = partial(observer.on_notice, label)
        for message in federation.notices:
            notice(message)
        state, rounds = _open(store, federation, notice)
        observer.on_start(label, state.rounds_done, experiment.rounds)
        session = Session(experiment, federation, store, observer, label, state, rounds)
        try:
            yield session
        except BaseException:
            session.keep()
            raise
        finally:
            session.close_files()


@dataclass
class Session:
    """A run in progress: the only thing in the library that changes as it goes."""

    experiment: Experiment
    federation: Federation
    store: Store | None
    observer: Observer
    label: str  # of the run, for the observer
    state: State
    rounds: list[dict[str, Any]]
    diverged: str | None = None
    closed: Closed | None = None  # a round that has been aggregated but not looked at
    lost: NamedOnce = field(default_factory=NamedOnce)
    saved: int = field(init=False)  # rounds done at the last checkpoint
    whole: bool = field(init=False, default=True)  # whether state and history are of the same round

    def __post_init__(self) -> None:
        self.saved = self.state.rounds_done
        known = self.store.summary() if self.store else None
        if known is not None and known["status"] == "diverged":
            self.diverged = known["why"]  # the same numbers would come again

    def notice(self, message: str) -> None:
        self.observer.on_notice(self.label, message)

    def client_trained(self, done: int, clients: int) -> None:
        self.observer.on_client(self.label, done, clients)

    @property
    def over(self) -> bool:
        return self.diverged is not None or self.state.rounds_done >= self.federation.last_round

    def next_job(self) -> RoundJob:
        return next_job(self.federation, self.state)

    def close_round(self, job: RoundJob, ends: Ends, seconds: float, score: Scorer = score_here) -> None:
        """Aggregate, look at the new model in this process, write down."""
        looks = self.aggregate(job, ends, seconds)
        if looks is not None:
            self.write_down(score(looks), score=score)

    def aggregate(self, job: RoundJob, ends: Ends, seconds: float) -> tuple[Look, ...] | None:
        """The looks to be taken at the new model; None if the run has left the finite numbers and is over."""
        try:
            self.closed = close_before_looking(self.federation, self.state, job, ends, seconds)
        except Diverged as end:
            self._end(end)
            return None
        return self.closed.looks

    def write_down(self, scores: list[Score], seconds: float | None = None, score: Scorer = score_here) -> None:
        """The round is done: what it was goes into the history, and its state into a checkpoint."""
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
        self.whole = False
        if self.store:
            self.store.check_lock()  # the clients' state may go to a new file
        cohort, clients = closed.job.cohort, len(self.federation.examples)
        folder = self.store.checkpoint_folder if self.store else None
        self.state = moved(closed.state, cohort, clients, self.experiment.server, folder)
        self.rounds.append(record)
        for sentence in self.lost.sentences(record["round"], record["lost"]):
            self.notice(sentence)
        for note in record.get("notes", ()):
            self.notice(f"round {record['round']}: client {client_name(note)}: {note['what']}")
        if self.store:
            self.store.append(record)
        self.whole = True
        if self.state.rounds_done % self.experiment.server.checkpoint_every == 0 or self.over:
            self._save()
        self.observer.on_round(self.label, record)

    def _save(self) -> None:
        if self.store is not None and self.state.rounds_done > self.saved:
            self.store.save(self.state, self.experiment)
            self.saved = self.state.rounds_done

    def keep(self) -> None:
        """Stopped between two checkpoints: what is in the history already need not be played again."""
        if self.whole:
            with suppress(Exception):  # why it was stopped is what people should hear of
                self._save()

    def _end(self, end: Diverged) -> None:
        lost = [{**self.federation.named(gone.client), "why": gone.why} for gone in end.lost]
        names = "; ".join(f"client {', '.join(who)}: {why}" for why, who in by_reason(lost).items())
        self.diverged = f"{end}" + (f" ({names})" if names else "")
        self._save()  # the history up to here stands, and so does its model

    def close_files(self) -> None:
        for rows in (self.state.memory, self.state.kept_buffers):
            if isinstance(rows, RowsOnDisk):
                rows.shelf.file.close()

    def finish(self) -> Run:
        federation = self.federation
        weights, unsaved = final_weights(federation, self.state), unsaved_buffers(federation, self.state)
        summary = summary_of(federation, self.rounds, self.diverged)
        known = self.store.summary() if self.store else None
        if known is not None and self._is_written(summary, unsaved):
            summary = known  # what was recorded stands, epsilon by an older accountant included
        elif self.store:
            self.store.finish(weights, unsaved, summary)
        inputs = Inputs.of(federation.origin, self.experiment.data.normalise, federation.feed.scaling)
        trained = partial(trained_module, federation.net.module, weights, unsaved)
        folder = self.store.folder if self.store else None
        self.observer.on_end(self.label, summary)
        return Run(self.experiment, folder, self.rounds, summary, weights, inputs, trained)

    def _is_written(self, summary: dict[str, Any], unsaved: Rows) -> bool:
        """Whether the folder has the end of the run; a summary of fewer rounds is older than the wish for more."""
        assert self.store is not None
        known = self.store.summary()
        if known is None or known["rounds_done"] != summary["rounds_done"]:
            return False
        names = ["model.safetensors", *(["buffers.safetensors"] if unsaved else [])]
        damaged = [damage for name in names if (damage := self.store.damage_of_final(name)) is not None]
        for damage in damaged:
            self.notice(f"{damage}, and is written again")
        return not damaged


def _open(
    store: Store | None, federation: Federation, notice: Callable[[str], None]
) -> tuple[State, list[dict[str, Any]]]:
    if store is None:
        return begin(federation), []
    if not store.holds_a_run():
        store.create(federation)
        return begin(federation), []
    changed = store.check_same(federation)
    state, refused = store.latest(federation.experiment, federation.net.start.device)
    state = state or begin(federation)
    _refuse_a_broken_limit(federation, state.rounds_done, store.summary())  # before the folder claims it
    changed += store.update(federation.experiment, federation.last_round)
    if federation.origin.keeper == "nodes" and (why := store.forget_divergence()) is not None:
        changed.append(f"the run had diverged ({why}): it is resumed after round {state.rounds_done}")
    rounds = store.cut_history(state.rounds_done)
    notices = [*changed, *refused, *_another_accountant(federation, rounds)]
    for sentence in notices:
        notice(sentence)
    if store.summary() is None:
        store.note_resume(state.rounds_done, notices, described_engine(federation))
    return state, rounds


def _another_accountant(federation: Federation, rounds: list[dict[str, Any]]) -> list[str]:
    """That epsilon is bounded in another way from now on, where the history has it by an older accountant."""
    budget, done = federation.aggregation.budget, len(rounds)
    if budget is None or not rounds or rounds[-1].get("epsilon") is None or done >= federation.last_round:
        return []
    before, now = rounds[-1].get("accountant", OLD_ACCOUNTANT), budget.accountant(done)
    if before == now:
        return []
    return [
        f"epsilon of rounds 1 to {done} was recorded by the accountant {before!r}, {rounds[-1]['epsilon']:.2f} so far; "
        f"from round {done + 1} on it is that of all rounds by {now!r}, by which those {done} spent "
        f"{budget.epsilon(done):.2f}"
    ]


def _refuse_a_broken_limit(federation: Federation, rounds_done: int, summary: dict[str, Any] | None) -> None:
    budget = federation.aggregation.budget
    if budget is None or budget.limit is None:
        return
    recorded = (summary or {}).get("epsilon")
    if recorded is not None and recorded <= budget.limit and rounds_done >= federation.last_round:
        return  # it has ended within its limit, by the accountant of its time
    if budget.epsilon(rounds_done) > budget.limit:
        raise UserError(
            f"this run has spent epsilon {budget.epsilon(rounds_done):.2f} in {rounds_done} rounds, more than "
            f"privacy.epsilon_limit = {budget.limit:g}: what is spent cannot be taken back; give a larger limit"
        )
