"""`run()`: an experiment from its start, or from its last checkpoint, to its end."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from fedgg.algorithms import ALGORITHMS
from fedgg.core.algorithm import Algorithm
from fedgg.engines import Engine, Workers
from fedgg.engines.workers.engine import TooManyDeaths
from fedgg.engines.workers.requests import Request, RequestStream, Scored, Trained
from fedgg.errors import UserError
from fedgg.lab.build import Federation, ModelGiven, build
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import EngineConfig
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.federated_data import DataGiven, with_given_clients
from fedgg.lab.name_resolution import build_engine, given_algorithm
from fedgg.lab.observer import Observer
from fedgg.lab.run_result import Run
from fedgg.lab.run_session import Session, opened
from fedgg.lab.run_state import train

FEWER_WORKERS = "set a smaller engine.workers, or engine.lost_clients = 'leave_out' to drop such clients"


def run(
    experiment: Experiment | dict[str, Any] | None = None,
    *,
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    algorithm: Algorithm | type[Algorithm] | str | None = None,
    out: str | os.PathLike[str] | None = None,
    data_folder: Path | None = None,
    observer: Observer | None = None,
) -> Run:
    """Run an experiment, or resume it if `out` already holds a part of it.

    `model` (a module, or a callable that returns one), `data` (x_train, y_train, x_test, y_test) and `algorithm`
    replace those that the experiment names. A fifth array in `data` gives the client of each training example, and is
    the split then. Without `out` nothing is written. `observer` is called as the run proceeds.
    """
    return run_under(
        None,
        experiment,
        model=model,
        data=data,
        algorithm=algorithm,
        out=out,
        data_folder=data_folder,
        observer=observer,
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
    observer: Observer | None,
    label: str | None = None,
) -> Run:
    """As `run`, where a study has chosen the engine (`engine_reason` says why) and the label of the run."""
    if isinstance(experiment, dict):
        experiment = Experiment(**experiment)
    algorithm = given_algorithm(algorithm) if algorithm is not None else None
    experiment = with_names(experiment or Experiment(), model, data, algorithm)
    if experiment.split.scheme == "given":
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
    folder, label = Path(out) if out is not None else None, experiment.name if label is None else label
    with arithmetic(experiment), opened(build_it, experiment, folder, observer or Observer(), label) as session:
        run_rounds(session)
        return session.finish()


def run_rounds(session: Session) -> None:
    """The remaining rounds of a run, with the engine chosen for it."""
    if session.federation.engine == "workers":
        _run_rounds_with_workers(session)
    else:
        run_rounds_with(session, make_engine(session.federation))


def run_rounds_with(session: Session, engine: Engine) -> None:
    """The remaining rounds of a run, with this engine."""
    while not session.over:
        job, started = session.next_job(), time.perf_counter()
        ends = train(job, engine, session.client_trained)
        session.close_round(job, ends, time.perf_counter() - started, engine.score)


def _run_rounds_with_workers(session: Session) -> None:
    if session.over:
        return
    try:
        with make_workers(session.experiment.engine) as workers:
            workers.interleave([requests_of(session, alone=True)])
    except TooManyDeaths as end:
        folder = session.store.folder if session.store else None
        remains = f"finished rounds are kept, resume with: fedgg resume {folder}" if folder else "nothing was saved"
        raise UserError(f"{end}: {FEWER_WORKERS}; {remains}") from end


def requests_of(session: Session, *, alone: bool = False) -> RequestStream:
    """The requests of a run to a pool of workers. Runs with most rounds left go first, so that all end together.

    Alone, a round's seconds are wall-clock time; beside other runs they are the run's share of the pool's time.
    """
    while not session.over:
        job, started = session.next_job(), time.perf_counter()
        turn = session.state.rounds_done - session.experiment.rounds
        trained: Trained = yield Request(job, turn, session.label, session.client_trained, session.notice)
        looks = session.aggregate(job, trained.ends, time.perf_counter() - started if alone else trained.seconds)
        if looks is None:
            return
        scored: Scored = (
            (yield Request(looks, turn, session.label, notice=session.notice)) if looks else Scored([], 0.0)
        )
        session.write_down(scored.scores, None if alone else scored.seconds)


def make_engine(federation: Federation) -> Engine:
    """The engine chosen for this federation; `Workers` ends its processes when it is closed."""
    return build_engine(federation.engine, federation.experiment.engine)


def make_workers(engine: EngineConfig, processes: int | None = None) -> Workers:
    """The pool an experiment asks for; `processes` where it does not set a number."""
    return Workers(engine.workers or processes, lost_clients=engine.lost_clients)


def with_names(
    experiment: Experiment, model: ModelGiven | None, data: DataGiven | None, algorithm: Algorithm | None
) -> Experiment:
    """Objects passed from Python, named in the experiment: by their settings where possible, else as `python:...`."""
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
    return experiment.changed(changes) if changes else experiment


def _scheme_given(experiment: Experiment, data: DataGiven) -> dict[str, Any]:
    """Clients that come with the data are the split, unless the experiment names another one."""
    if not isinstance(data, tuple | list) or len(data) != 5 or data[4] is None:
        return {}
    if "scheme" in experiment.split.model_fields_set and experiment.split.scheme != "given":
        raise UserError(
            f"data names the clients, and split.scheme = {experiment.split.scheme!r}: leave one of them out"
        )
    is_set = "clients" in experiment.split.model_fields_set
    return {"split.scheme": "given"} | ({"split.clients": experiment.split.clients} if is_set else {})
