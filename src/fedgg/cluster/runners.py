"""`--on` and `on=`: which machines and devices the runs of a study are computed on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from fedgg.cluster.connect import FORMS, Resources, connected, is_ray, ray_address, resources_from
from fedgg.errors import UserError
from fedgg.lab.observer import Observer
from fedgg.lab.parallel_runs import run_all, run_until_ended
from fedgg.lab.run_places import devices_from, kind_of
from fedgg.lab.run_processes import Given, Job
from fedgg.lab.run_result import Run
from fedgg.lab.tuning import TrialsRunner
from fedgg.runfolder.locks import InUse

Runner = Callable[[list[Job], Observer], None]
ActorsRunner = Callable[[Job, Observer], Run]


def device_named(on: str | None) -> str | None:
    """What `engine.device` has to be for this `on`; None where the experiment decides. UserError where it is wrong."""
    if on is None:
        return None
    if is_ray(on):
        ray_address(on)
        return None
    devices = devices_from(on)
    if devices is None:
        raise UserError(f"on {on!r}: write {FORMS}; or devices, as cuda:all or cuda:0,1")
    return kind_of(devices)


def runner_of(
    on: str | None, root: Path, *, processes: int | None, default_processes: int = 1, resources: str | None = None
) -> Runner:
    """What runs the jobs of a study, whose folders are below `root`. `processes`: runs at a time, where it was set."""
    if resources is not None and (on is None or not is_ray(on)):
        raise UserError("--resources are those of a Ray task: add --on ray")
    if on is None:
        return lambda jobs, observer: run_all(jobs, processes or default_processes, observer)
    if not is_ray(on):
        devices = devices_from(on) or ()
        return lambda jobs, observer: run_all(jobs, len(devices), observer, devices)
    from fedgg.cluster.actors import run_on_actors
    from fedgg.cluster.study_on_ray import run_on_ray

    needs = Resources() if resources is None else resources_from(resources)
    whole = partial(run_on_ray, address=ray_address(on), root=root, at_once=processes, resources=needs)

    def spread(jobs: list[Job], observer: Observer) -> list[Job]:
        """One run after another; those that another process is working on are returned."""
        in_use = []
        with connected(ray_address(on)):
            for job in jobs:
                try:
                    run_on_actors(job, observer, address=ray_address(on), resources=needs)
                except InUse:
                    in_use.append(job)
        return in_use

    def run(jobs: list[Job], observer: Observer) -> None:
        """Runs whose experiments name several devices are spread over actors."""
        several = [job for job in jobs if len(job.experiment.engine.devices) > 1]
        whole([job for job in jobs if len(job.experiment.engine.devices) == 1], observer)
        run_until_ended(several, observer, lambda some: spread(some, observer))

    return run


def trials_runner_of(
    on: str | None,
    labels: tuple[str, ...],
    given: Given,
    data_folder: Path | None,
    *,
    processes: int | None = None,
    resources: str | None = None,
) -> TrialsRunner | None:
    """What runs the trials of a search; None: this process."""
    if on is None:
        if resources is not None:
            raise UserError("--resources are those of a Ray task: add --on ray")
        return None
    if not is_ray(on):
        raise UserError(f"on {on!r}: the trials of an algorithm depend on each other; write {FORMS}")
    from fedgg.cluster.search_on_ray import run_trials_on_ray

    needs = Resources() if resources is None else resources_from(resources)
    return partial(
        run_trials_on_ray,
        labels=labels,
        given=given,
        data_folder=data_folder,
        address=ray_address(on),
        at_once=processes,
        resources=needs,
    )


def actors_runner_of(on: str | None, actors: int | None, resources: str | None) -> ActorsRunner | None:
    """What spreads the clients of one run over Ray actors; None: this machine."""
    if on is None:
        if actors is not None or resources is not None:
            what = "actors" if actors is not None else "resources"
            raise UserError(f"--{what} needs a Ray cluster: add --on ray (in Python {what}= needs on='ray')")
        return None
    if not is_ray(on):
        raise UserError(
            f"--on {on!r} names no Ray cluster: write --on ray, or --device {on} for devices of this machine (in "
            f"Python on='ray', or the device in engine.device)"
        )
    address, needs = ray_address(on), resources_from(resources) if resources is not None else None

    def run(job: Job, observer: Observer) -> Run:
        from fedgg.cluster.actors import run_on_actors

        return run_on_actors(job, observer, address=address, actors=actors, resources=needs)

    return run
