"""Before a study begins: what only building a run can find wrong with it, for every kind of run it has."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from fedgg.core.algorithm import Algorithm
from fedgg.data.sources import load
from fedgg.errors import UserError
from fedgg.lab.arithmetic import DTYPES
from fedgg.lab.build import DataGiven, ModelGiven, dataset_for, examined, split_of
from fedgg.lab.config import Experiment, flat
from fedgg.lab.holdings import holdings
from fedgg.lab.jobs import Job
from fedgg.lab.parts import build_algorithm
from fedgg.lab.store import Store

_BUILT = ("data", "split", "model", "privacy", "robust", "attack")  # sections that decide whether a run can be built
_HERE = {"engine.device": "cpu", "engine.name": "auto", "engine.precision": "fp32"}


def build_on_trial(jobs: Sequence[Job]) -> None:
    """One run of each kind is built, but for its data on a device; with one kind only, the first run does it.

    Splits are drawn with the first seed: one that fails with a later seed alone is found when its turn comes.
    """
    kinds: dict[Hashable, Job] = {}
    for job in jobs:
        kinds.setdefault(_kind(job), job)
    if len(kinds) < 2:
        return
    for source in dict.fromkeys(job.experiment.data.source for job in kinds.values()):
        own = [job for job in kinds.values() if job.experiment.data.source == source]
        given = own[0].given.data
        dataset = load(source, own[0].data_folder) if given is None else given
        for job in own:
            if Store(job.folder).rounds():
                continue  # it was built before
            try:
                try_to_build(job.experiment, dataset, job.given.model, job.given.algorithm)
            except UserError as error:
                raise UserError(f"{job.name}: {error}") from error


def try_to_build(
    experiment: Experiment, data: DataGiven, model: ModelGiven | None = None, given: Algorithm | None = None
) -> None:
    """UserError where the experiment cannot be run on these data, found out on the CPU and without copying them."""
    here = experiment.changed(_HERE)
    algorithm = given or build_algorithm(here.algorithm.name, here.algorithm.settings)
    dataset = dataset_for(here, data, None)
    held = holdings(here, split_of(here, dataset))
    sample = torch.zeros(2, *dataset.shape, dtype=DTYPES[here.engine.precision])
    sizes = [len(client) for client in held.clients]
    examined(here, algorithm, sizes, dataset.shape, len(dataset.classes), sample, model)


def _kind(job: Job) -> Hashable:
    """Jobs that are alike in this can be built, or not, alike."""
    settings = flat(job.experiment.model_dump(include={*_BUILT}))
    algorithm = job.given.algorithm or build_algorithm(job.experiment.algorithm.name, job.experiment.algorithm.settings)
    local = job.experiment.local
    return (
        tuple(sorted((key, repr(value)) for key, value in settings.items())),
        (local.batch, local.small_clients, algorithm.needs_representation),
        repr(algorithm) if job.experiment.privacy is not None else "",  # whether its clients keep state decides epsilon
    )
