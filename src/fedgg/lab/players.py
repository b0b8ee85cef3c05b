"""Runs under the engine `workers`: each says what it wants next, and goes on when it is there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fedgg.engines.workers.engine import TooManyDeaths, Workers
from fedgg.engines.workers.requests import Request, RequestStream, Scored, Trained
from fedgg.errors import UserError
from fedgg.lab.config import Engine

if TYPE_CHECKING:
    from fedgg.lab.runner import Session


def hired(engine: Engine, processes: int | None = None) -> Workers:
    """The workers an experiment asks for; `processes` where it names no number."""
    return Workers(engine.workers or processes, lost_clients=engine.lost_clients)


def play(session: Session, *, name: str = "", alone: bool = False) -> RequestStream:
    """A run to its end. Runs with most rounds left go first, so that all end together and no core is idle before.

    Alone, seconds are those on the clock; among others they are the run's share of the pool's time.
    """
    watcher = session.watcher
    while not session.over:
        job, started = session.next_job(), time.perf_counter()
        turn = session.state.rounds_done - session.experiment.rounds
        trained: Trained = yield Request(job, turn, name, watcher.client, watcher.notice)
        looks = session.aggregate(job, trained.ends, time.perf_counter() - started if alone else trained.seconds)
        if looks is None:
            return
        scored: Scored = (yield Request(looks, turn, name, notice=watcher.notice)) if looks else Scored([], 0.0)
        session.write_down(scored.scores, None if alone else scored.seconds)


def play_alone(session: Session) -> None:
    """One run, its clients in parallel."""
    if session.over:
        return
    try:
        with hired(session.experiment.engine) as workers:
            workers.interleave([play(session, alone=True)])
    except TooManyDeaths as end:
        folder = session.store.folder if session.store else None
        kept = f"finished rounds are kept, go on with: fedgg resume {folder}" if folder else "nothing was kept"
        raise UserError(f"{end}: {REMEDY}; {kept}") from end


REMEDY = "take fewer engine.workers, or engine.lost_clients = 'leave_out' to go on without such clients"
