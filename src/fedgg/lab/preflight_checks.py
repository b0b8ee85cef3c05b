"""Checks before anything is trained: what a client would send, and whether an experiment can be built."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedgg.core.algorithm import Algorithm
from fedgg.core.local import LocalEnd, end_round, open_round
from fedgg.core.model import NeedsFloatingPoint
from fedgg.data.batch_preparation import scaling
from fedgg.data.dataset import Dataset
from fedgg.data.feature_skew import check_feature_skew
from fedgg.engines.loop import open_client
from fedgg.errors import UserError
from fedgg.lab.aggregation import aggregation_of
from fedgg.lab.build import Examined, Federation, ModelGiven, check_batches, check_single_examples, examine
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import DTYPES
from fedgg.lab.federated_data import DataGiven, WholeData, data_of, holdings, split_of
from fedgg.lab.name_resolution import build_algorithm
from fedgg.lab.one_round import begin, next_job
from fedgg.lab.personal_parts import unseen_clients
from fedgg.lab.task_and_metrics import NAMED_OBJECTIVE, Objective

FEW = 32


def rehearse(federation: Federation) -> None:
    """Refuse an algorithm whose messages privacy or a robust rule cannot treat, before anything is written."""
    collector, name = federation.aggregation.collector, type(federation.algorithm).__name__
    end = rehearsed(federation)
    try:
        collector.check(end.up, federation.net.layout.total)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    budget = federation.aggregation.budget
    if budget is not None and end.memory and not budget.client_state:
        raise UserError(
            f"{name}.finish() returns client state ({', '.join(end.memory)}) that client_memory() does not have: give "
            f"it there too; what privacy is spent depends on whether clients keep state"
        )


def rehearsed(federation: Federation) -> LocalEnd:
    """The first client of the first round, after no step at all: the names and shapes of what everybody will send.

    Of its examples a few are enough: how many there are may be no more than a claim.
    """
    job = next_job(federation, begin(federation))
    first, clients = job.cohort[0], list(federation.feed.clients)
    clients[first] = clients[first][:FEW].copy()
    job = replace(job, data=replace(federation.feed, clients=tuple(clients)))
    start, sgd = open_client(job, first)
    running, client = open_round(job.algorithm, job.net, sgd, start)
    return end_round(job.algorithm, start, running, client)


HERE = {"engine.device": "cpu", "engine.name": "auto", "engine.precision": "fp32"}


def try_to_build(
    experiment: Experiment,
    data: DataGiven,
    model: ModelGiven | None = None,
    algorithm: Algorithm | None = None,
    objective: Objective = NAMED_OBJECTIVE,
) -> Examined:
    """UserError where the experiment cannot be run on these data, found out on the CPU and without copying them."""
    here = experiment.changed(HERE)
    algorithm = algorithm or build_algorithm(here.algorithm.name, here.algorithm.settings)
    dataset = data_of(here, data)
    split = split_of(here, dataset)
    held = holdings(here, split)
    check_feature_skew(dataset, here.split.feature_noise, here.split.feature_rotation)
    dtype, x, y = DTYPES[here.engine.precision], dataset.x_test[:2].cpu(), dataset.y_test[:2].cpu()
    sizes, origin = [len(client) for client in held.clients], WholeData(dataset, split, held.proxy)
    unseen = unseen_clients(here, held)
    sample = scaling(here.data.normalise, dataset, dtype)(x) if x.dtype == torch.int64 else x.to(dtype)
    targets = y.to(dtype if y.is_floating_point() else y.dtype)
    try:
        return examine(here, algorithm, sizes, origin, (sample, targets), model, objective, unseen)
    except NeedsFloatingPoint:
        return examine(here, algorithm, sizes, origin, (x.to(dtype), targets), model, objective, unseen)


def check_split(experiment: Experiment, algorithm: Algorithm, dataset: Dataset, examined: Examined) -> None:
    """UserError where the split with this seed fails, or its clients do not suit batches or the sections of settings.

    `examined`: the same experiment with another seed.
    """
    split = split_of(experiment, dataset)
    held, names = holdings(experiment, split), WholeData(dataset, split).client_names
    sizes, unseen = [len(client) for client in held.clients], unseen_clients(experiment, held)
    check_batches(experiment, examined.work, sizes, names)
    if examined.net.needs_two_examples:
        check_single_examples(examined.work, sizes, names)
    if experiment.privacy is not None or experiment.robust is not None or experiment.attack is not None:
        aggregation_of(experiment, algorithm, examined.net, np.setdiff1d(np.flatnonzero(sizes), unseen))
