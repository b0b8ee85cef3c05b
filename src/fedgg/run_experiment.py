"""`run` from Python: what the command of this name does, also with objects of your own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgg.cluster.runners import actors_runner_of
from fedgg.core.algorithm import Algorithm
from fedgg.core.tasks import Criterion
from fedgg.errors import UserError
from fedgg.lab.build import ModelGiven
from fedgg.lab.config import Experiment
from fedgg.lab.federated_data import DataGiven
from fedgg.lab.observer import Observer, Observers
from fedgg.lab.run_processes import Given, Job
from fedgg.lab.run_result import Run
from fedgg.lab.runner import run as run_here
from fedgg.lab.runner import with_objects
from fedgg.lab.task_and_metrics import MetricGiven


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
    on: str | None = None,
    actors: int | None = None,
    resources: str | None = None,
    observer: Observer | Sequence[Observer] | None = None,
) -> Run:
    """Run an experiment, or resume it if `out` already holds a part of it.

    `model` (a module, or a callable that returns one), `data` (x_train, y_train, x_test, y_test) and `algorithm`
    replace those that the experiment names. A fifth array in `data` gives the client of each training example, and is
    the split then (under `split.scheme = "domains"`: the domain of each). `loss` is a function of outputs and targets
    that returns the loss of each example: that of the task where the experiment names one, otherwise in its place;
    `metrics` are names, functions that return a number for each example, or `fedgg.Metric` objects.
    Without `out` nothing is written. `on="ray"` (or `"ray://ADDRESS"`, `"ray:auto"`) spreads the clients of each round
    over `actors` of a Ray cluster, each of which asks for `resources` ("gpu=0.5,cpu=2"), and needs `out`. `observer`,
    or each of several, is called as the run proceeds.
    """
    objects: dict[str, Any] = {"model": model, "data": data, "algorithm": algorithm, "loss": loss, "metrics": metrics}
    run_on = actors_runner_of(on, actors, resources)
    if run_on is None:
        return run_here(experiment, **objects, out=out, data_folder=data_folder, observer=observer)
    if out is None:
        raise UserError(f"a run on {on} is written to a folder, from which it is resumed: give out=FOLDER")
    named, parts = with_objects(experiment, **objects, data_folder=data_folder)
    observer = Observers(observer) if isinstance(observer, Sequence) else observer or Observer()
    return run_on(Job(named.name, named, Path(out), data_folder, Given(**parts)), observer)
