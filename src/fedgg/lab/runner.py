"""`run()`: an experiment from its start, or from its last checkpoint, to its end."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fedgg.engines import Stacked
from fedgg.engines.errands import Ask, Player, Scored, Trained
from fedgg.engines.workers import GaveUp, Workers
from fedgg.lab.build import Federation, build
from fedgg.lab.run_result import Run
from fedgg.lab.session import Session, Watcher, opened
from fedgg.lab.torch_settings import arithmetic

if TYPE_CHECKING:
    from fedgg.lab.session import Session


import os
import time
from pathlib import Path
from typing import Any

from fedgg.algorithms import ALGORITHMS
from fedgg.core.algorithm import Algorithm
from fedgg.engines import Engine, Loop, Streams
from fedgg.errors import UserError
from fedgg.lab.build import DataGiven, ModelGiven, with_given_clients
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import EngineConfig
from fedgg.lab.registry import given_algorithm
from fedgg.lab.state import (
    train,
)


def run(
    experiment: Experiment | dict[str, Any] | None = None,
    *,
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    algorithm: Algorithm | type[Algorithm] | str | None = None,
    out: str | os.PathLike[str] | None = None,
    data_folder: Path | None = None,
    watcher: Watcher | None = None,
) -> Run:
    """Run an experiment, or go on with it if `out` already holds a part of it.

    `model` (a module, or anything that makes one), `data` (x_train, y_train, x_test, y_test) and `algorithm` take the
    place of those the experiment names. A fifth array in `data` names the client that holds each training example, and
    is the split then. Without `out` nothing is written.
    """
    return run_under(
        None,
        experiment,
        model=model,
        data=data,
        algorithm=algorithm,
        out=out,
        data_folder=data_folder,
        watcher=watcher,
    )


def run_under(
    engine_reason: str | None,
    experiment: Experiment | dict[str, Any] | None,
    *,
    model: ModelGiven | None,
    data: DataGiven | None,
    algorithm: Algorithm | type[Algorithm] | str | None,
    out: str | os.PathLike[str] | None,
    data_folder: Path | None,
    watcher: Watcher | None,
) -> Run:
    """The same where a study has chosen the engine that the experiment names, for this reason."""
    if isinstance(experiment, dict):
        experiment = Experiment(**experiment)
    algorithm = given_algorithm(algorithm) if algorithm is not None else None
    experiment = with_names(experiment or Experiment(), model, data, algorithm)
    experiment = with_given_clients(experiment, data, data_folder)
    build_it = partial(
        build,
        experiment,
        model=model,
        data=data,
        algorithm=algorithm,
        data_folder=data_folder,
        engine_reason=engine_reason,
    )
    folder, watcher = Path(out) if out is not None else None, watcher or Watcher()
    with arithmetic(experiment), opened(build_it, experiment, folder, watcher) as session:
        play(session)
        return session.finish()


def play(session: Session) -> None:
    """One run to its end."""
    if session.federation.engine == "workers":
        play_alone(session)
        return
    play_with(session, make_engine(session.federation))


def play_with(session: Session, engine: Engine) -> None:
    """The same under an engine of the caller's."""
    while not session.over:
        job, started = session.next_job(), time.perf_counter()
        ends = train(job, engine, session.watcher.client)
        session.close_round(job, ends, time.perf_counter() - started, engine.score)


def make_engine(federation: Federation) -> Engine:
    """The engine that trains it; `Workers` ends its processes when it is closed."""
    engine = federation.experiment.engine
    match federation.engine:
        case "stacked":
            return Stacked(engine.precision)
        case "streams":
            return Streams()
        case "workers":
            return hired(engine)
        case _:
            return Loop()


def with_names(
    experiment: Experiment, model: ModelGiven | None, data: DataGiven | None, algorithm: Algorithm | None
) -> Experiment:
    """Say in the experiment what was handed in: by its settings where that is possible, else as `python:...`."""
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model.name"] = f"python:{getattr(model, '__qualname__', type(model).__qualname__)}"
    if data is not None:
        changes["data.source"] = "python:arrays"
        changes |= _scheme_given(experiment, data)
    if algorithm is not None:
        names = [name for name, kind in ALGORITHMS.items() if kind is type(algorithm)]
        changes["algorithm.name"] = names[0] if names else f"python:{type(algorithm).__qualname__}"
        changes |= {f"algorithm.{key}": value for key, value in vars(algorithm).items()}
    return experiment.changed(changes)


def _scheme_given(experiment: Experiment, data: DataGiven) -> dict[str, Any]:
    """Clients that were handed in are the split, unless another one is asked for."""
    if not isinstance(data, tuple | list) or len(data) != 5 or data[4] is None:
        return {}
    if "scheme" in experiment.split.model_fields_set and experiment.split.scheme != "given":
        raise UserError(
            f"data names the clients, and split.scheme = {experiment.split.scheme!r}: leave one of them out"
        )
    is_set = "clients" in experiment.split.model_fields_set
    return {"split.scheme": "given"} | ({"split.clients": experiment.split.clients} if is_set else {})


def hired(engine: EngineConfig, processes: int | None = None) -> Workers:
    """The workers an experiment asks for; `processes` where it names no number."""
    return Workers(engine.workers or processes, lost_clients=engine.lost_clients)


def requests_of(session: Session, *, name: str = "", alone: bool = False) -> Player:
    """A run to its end. Runs with most rounds left go first, so that all end together and no core is idle before.

    Alone, seconds are those on the clock; among others they are the run's share of the pool's time.
    """
    watcher = session.watcher
    while not session.over:
        job, started = session.next_job(), time.perf_counter()
        turn = session.state.rounds_done - session.experiment.rounds
        trained: Trained = yield Ask(job, turn, name, watcher.client, watcher.notice)
        looks = session.aggregate(job, trained.ends, time.perf_counter() - started if alone else trained.seconds)
        if looks is None:
            return
        scored: Scored = (yield Ask(looks, turn, name, notice=watcher.notice)) if looks else Scored([], 0.0)
        session.write_down(scored.scores, None if alone else scored.seconds)


def play_alone(session: Session) -> None:
    """One run, its clients in parallel."""
    if session.over:
        return
    try:
        with hired(session.experiment.engine) as workers:
            workers.interleave([requests_of(session, alone=True)])
    except GaveUp as end:
        folder = session.store.folder if session.store else None
        kept = f"finished rounds are kept, go on with: fedgg resume {folder}" if folder else "nothing was kept"
        raise UserError(f"{end}: {REMEDY}; {kept}") from end


REMEDY = "take fewer engine.workers, or engine.lost_clients = 'leave_out' to go on without such clients"
