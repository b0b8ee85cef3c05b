"""`run()`: an experiment from its start, or from its last checkpoint, to its end; and its rounds one by one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fedgg.algorithms import ALGORITHMS
from fedgg.core.algorithm import Algorithm
from fedgg.core.tasks import TASKS, Criterion
from fedgg.engines import Engine, Workers
from fedgg.engines.base import Scorer, personal_job, score_here, with_personal_models
from fedgg.engines.devices import Devices
from fedgg.engines.workers.engine import TooManyDeaths
from fedgg.engines.workers.tasks import Request, RequestStream, Scored, Trained
from fedgg.errors import UserError
from fedgg.lab.build import Federation, ModelGiven, build
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import EngineConfig
from fedgg.lab.engine_setup import arithmetic, build_engine
from fedgg.lab.federated_data import DataGiven, with_given_clients
from fedgg.lab.name_resolution import given_algorithm
from fedgg.lab.observer import Observer, Observers
from fedgg.lab.one_round import State, close_before_looking, next_job, train
from fedgg.lab.round_record import record_of
from fedgg.lab.run_result import Run
from fedgg.lab.run_session import Session, opened
from fedgg.lab.task_and_metrics import NAMED_OBJECTIVE, MetricGiven, Objective, objective_of

FEWER_DEVICES = "name fewer in engine.device, or set engine.lost_clients = 'leave_out' to drop such clients"
FEWER_WORKERS = "set a smaller engine.workers, or engine.lost_clients = 'leave_out' to drop such clients"


def run(
    experiment: Experiment | dict[str, Any] | None = None,
    *,
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    algorithm: Algorithm | type[Algorithm] | str | None = None,
    loss: Criterion | None = None,
    metrics: Sequence[MetricGiven] | None = None,
    out: str | os.PathLike[str] | None = None,
    data_folder: Path | None = None,
    observer: Observer | Sequence[Observer] | None = None,
) -> Run:
    """Run an experiment, or resume it if `out` already holds a part of it, on this machine."""
    experiment, parts = with_objects(experiment, model, data, algorithm, loss, metrics, data_folder)
    build_it = partial(build, experiment, **parts, data_folder=data_folder)
    folder = Path(out) if out is not None else None
    if isinstance(observer, Sequence):
        observer = Observers(observer)
    with (
        arithmetic(experiment),
        opened(build_it, experiment, folder, observer, experiment.name) as session,
    ):
        run_rounds(session)
        return session.finish()


def experiment_given(experiment: Experiment | dict[str, Any] | None) -> Experiment:
    """The experiment that a function of the Python interface was called with; UserError for anything else."""
    chosen = Experiment(**experiment) if isinstance(experiment, dict) else experiment or Experiment()
    if not isinstance(chosen, Experiment):
        raise UserError(f"experiment must be a fedgg.Experiment, or a dict of its sections, got {experiment!r}")
    return chosen


def with_objects(
    experiment: Experiment | dict[str, Any] | None,
    model: ModelGiven | None,
    data: DataGiven | None,
    algorithm: Algorithm | type[Algorithm] | str | None,
    loss: Criterion | None,
    metrics: Sequence[MetricGiven] | None,
    data_folder: Path | None,
) -> tuple[Experiment, dict[str, Any]]:
    """The experiment with the names of objects passed from Python, and these objects as arguments of `build`."""
    experiment = experiment_given(experiment)
    instance = given_algorithm(algorithm) if algorithm is not None else None
    objective = NAMED_OBJECTIVE if loss is None and metrics is None else objective_of(loss, metrics)
    if model is not None or data is not None or instance is not None or objective != NAMED_OBJECTIVE:
        experiment = with_names(experiment, model, data, instance, objective)
    if experiment.split.scheme == "given":
        experiment = with_given_clients(experiment, data, data_folder)
    return experiment, {"model": model, "data": data, "algorithm": instance, "objective": objective}


def run_rounds(session: Session, engine: Engine | None = None) -> None:
    """The remaining rounds of a run, with this engine or the one chosen for it."""
    federation = session.federation
    if engine is None and federation.engine == "workers":
        _run_rounds_with_workers(session)
        return
    if engine is None:
        engine = build_engine(federation.choice, session.experiment.engine)
        if isinstance(engine, Devices):
            run_rounds_on_devices(session, engine)
            return
    observer = session.observer
    client_trained = None if observer is None else partial(observer.on_client, session.label)
    while not session.over:
        job, started = next_job(federation, session.state), time.perf_counter()
        ends = train(job, engine, client_trained)
        looks = session.aggregate(job, ends, time.perf_counter() - started)
        if looks is not None:
            session.write_down(engine.score(looks), score=engine.score)


def play_round(
    federation: Federation, state: State, engine: Engine, score: Scorer = score_here
) -> tuple[State, dict[str, Any]]:
    """One round; nothing is written."""
    job, started = next_job(federation, state), time.perf_counter()
    ends = train(job, engine)
    closed = close_before_looking(federation, state, job, ends, time.perf_counter() - started)
    return closed.state, record_of(federation, closed, score(closed.looks))


def run_rounds_on_devices(session: Session, devices: Devices, remedy: str = FEWER_DEVICES) -> None:
    """The remaining rounds; the processes of the engine end with them. `remedy`: where several die on a share."""
    with _resumable(session, remedy), devices:
        devices.notice = session.notice
        run_rounds(session, devices)


def _run_rounds_with_workers(session: Session) -> None:
    if session.over:
        return
    with _resumable(session, FEWER_WORKERS), make_workers(session.experiment.engine) as workers:
        workers.interleave([requests_of(session, alone=True)])


@contextmanager
def _resumable(session: Session, remedy: str) -> Iterator[None]:
    """One line where several processes have died on the same clients."""
    try:
        yield
    except TooManyDeaths as end:
        folder = session.store.folder if session.store else None
        remains = f"finished rounds are kept, resume with: fedgg resume {folder}" if folder else "nothing was saved"
        raise UserError(f"{end}: {remedy}; {remains}") from end


def requests_of(session: Session, *, alone: bool = False) -> RequestStream:
    """The requests of a run to a pool of workers. Runs with most rounds left go first, so that all end together.

    Alone, a round's seconds are wall-clock time; beside other runs they are the run's share of the pool's time.
    """
    observer = session.observer
    client_trained = None if observer is None else partial(observer.on_client, session.label)
    while not session.over:
        job, started = next_job(session.federation, session.state), time.perf_counter()
        turn = session.state.rounds_done - session.experiment.rounds
        trained: Trained = yield Request(job, turn, session.label, client_trained, session.notice)
        if job.personal_model is not None:
            trained_models: Trained = yield Request(personal_job(job), turn, session.label, notice=session.notice)
            ends = with_personal_models(job, trained.ends, trained_models.ends)
            trained = Trained(ends, trained.seconds + trained_models.seconds)
        looks = session.aggregate(job, trained.ends, time.perf_counter() - started if alone else trained.seconds)
        if looks is None:
            return
        scored: Scored = (
            (yield Request(looks, turn, session.label, notice=session.notice)) if looks else Scored([], 0.0)
        )
        session.write_down(scored.scores, None if alone else scored.seconds)


def make_workers(engine: EngineConfig, processes: int | None = None) -> Workers:
    """The pool an experiment asks for; `processes` where it does not set a number."""
    return Workers(engine.workers or processes, lost_clients=engine.lost_clients)


def with_names(
    experiment: Experiment,
    model: ModelGiven | None,
    data: DataGiven | None,
    algorithm: Algorithm | None,
    objective: Objective = NAMED_OBJECTIVE,
) -> Experiment:
    """Objects passed from Python, named in the experiment: by their settings where possible, else as `python:...`."""
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model.name"] = f"python:{name_of_part(model)}"
    if data is not None:
        changes["data.source"] = "python:arrays"
        changes |= _scheme_given(experiment, data)
    if algorithm is not None:
        names = [name for name, kind in ALGORITHMS.items() if kind is type(algorithm)]
        changes["algorithm.name"] = names[0] if names else f"python:{type(algorithm).__qualname__}"
        changes |= {f"algorithm.{key}": value for key, value in vars(algorithm).items()}
    if objective.loss is not None:
        is_named = experiment.task.name in TASKS and "name" in experiment.task.model_fields_set
        changes["task.loss" if is_named else "task.name"] = f"python:{name_of_part(objective.loss)}"
    if objective.metrics is not None:
        changes["metrics"] = [
            one if isinstance(one, str) else f"python:{name_of_part(one)}" for one in objective.metrics
        ]
    return experiment.changed(changes) if changes else experiment


def name_of_part(part: object) -> str:
    """The name of a class or function, or of an object's class."""
    return str(getattr(part, "__qualname__", type(part).__qualname__))


def _scheme_given(experiment: Experiment, data: DataGiven) -> dict[str, Any]:
    """Clients that come with the data are the split, unless the experiment says that they are domains."""
    if not isinstance(data, tuple | list) or len(data) != 5 or data[4] is None:
        return {}
    if "scheme" in experiment.split.model_fields_set and experiment.split.scheme != "given":
        if experiment.split.scheme == "domains":
            return {}
        raise UserError(
            f"data names the clients, and split.scheme = {experiment.split.scheme!r}: leave one of them out, or write "
            f"split.scheme = 'domains' if they are the domains of the examples"
        )
    is_set = "clients" in experiment.split.model_fields_set
    return {"split.scheme": "given"} | ({"split.clients": experiment.split.clients} if is_set else {})
