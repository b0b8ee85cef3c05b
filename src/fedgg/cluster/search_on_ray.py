"""The trials of `fedgg tune` on Ray: one of each algorithm at a time, since a trial depends on the earlier ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedgg.cluster.connect import RayAddress, Resources, amounts, check_can_run, check_own_node, connected, what_waits
from fedgg.cluster.event_queue import EventQueue
from fedgg.cluster.memory_estimate import MemoryEstimates, with_memory
from fedgg.cluster.study_on_ray import ANSWER, WAITING, driver_info_of, in_one_line, task_options
from fedgg.cluster.task import DriverInfo, EventSender, Outcome, SharedParts, on_node
from fedgg.errors import UserError
from fedgg.lab.engine_setup import chosen_device
from fedgg.lab.observer import Observer
from fedgg.lab.run_processes import ATTEMPTS, Given, Job
from fedgg.lab.search_trial import SearchTrial, TrialRequest, TrialRunner

POLL = 0.2  # seconds


@dataclass(frozen=True)
class TrialOutcome(Outcome):
    trial: SearchTrial | None = None


def run_trial(
    driver_info: DriverInfo,
    task_number: int,
    request: TrialRequest,
    event_queue: Any,
    shared: SharedParts,
    data_folder: Path | None,
) -> Outcome:
    """The function of the Ray task; errors are returned, as by `run_request`."""
    event_sender = EventSender(event_queue, task_number)

    def run() -> Outcome:
        experiment = request.search.experiment(request.label, request.search.study.seeds[0], {})
        data = None if shared.data is None else shared.dataset(chosen_device(experiment))
        given = Given(shared.model, data, None, shared.objective)
        with ExitStack() as pools:
            trial = TrialRunner(given, data_folder, 1, pools).run(request, event_sender.observer())
        return TrialOutcome(event_sender.flush(), trial=trial)

    return on_node(driver_info, event_sender, run)


def run_trials_on_ray(
    next_request: Callable[[str], TrialRequest | None],
    add: Callable[[SearchTrial], None],
    observer: Observer,
    *,
    labels: tuple[str, ...],
    given: Given,
    data_folder: Path | None,
    address: RayAddress,
    at_once: int | None = None,
    resources: Resources | None = None,
) -> None:
    """Run all trials; a task whose worker or node has died is submitted again."""
    requests = [request for label in labels if (request := next_request(label)) is not None]
    if not requests:
        return
    study = requests[0].search.study
    experiments = [study.experiment(label, seed) for label in labels for seed in study.seeds]
    options = task_options(experiments[0], resources or Resources())
    with connected(address, at_once) as ray:
        check_can_run(ray, amounts(options), address.text)
        if "memory" not in options:
            jobs = [Job("", experiment, Path(), data_folder, given) for experiment in experiments[:: len(study.seeds)]]
            estimates = [*map(MemoryEstimates().of, jobs)]
            largest = None if None in estimates else max(filter(None, estimates))
            options = with_memory(ray, options, largest, partial(observer.on_notice, ""))
        event_queue = ray.remote(num_cpus=0)(EventQueue).remote()
        driver_info = ray.put(driver_info_of(Path(), "", experiments))
        task, shared = ray.remote(run_trial).options(**options), ray.put(SharedParts.of(given))
        at_work: dict[Any, tuple[TrialRequest, int, int]] = {}  # by reference: with attempt and number of the task
        task_numbers = 0
        silent_since = time.monotonic()  # infinite once a task has begun, or the user was told what it waits for

        def submit(request: TrialRequest, attempt: int = 1) -> None:
            nonlocal task_numbers
            task_numbers += 1
            reference = task.remote(driver_info, task_numbers, request, event_queue, shared, data_folder)
            at_work[reference] = (request, attempt, task_numbers)

        try:
            for request in requests:
                submit(request)
            while at_work:
                done, _ = ray.wait(list(at_work), num_returns=len(at_work), timeout=POLL)
                known = {task_number for _, _, task_number in at_work.values()}
                try:
                    messages = ray.get(event_queue.take.remote(), timeout=ANSWER)
                except ray.exceptions.RayError:  # without the actor there is no progress to show
                    check_own_node(ray, address.text)
                    messages = []
                if messages or done:
                    silent_since = math.inf
                elif time.monotonic() - silent_since > WAITING:
                    silent_since = math.inf
                    observer.on_notice("", what_waits(ray, amounts(options)))
                for task_number, events in messages:
                    for method, arguments in events:
                        if task_number in known and method.startswith("on_"):
                            getattr(observer, method)(*arguments)
                for reference in done:
                    request, attempt, _ = at_work.pop(reference)
                    try:
                        outcome = ray.get(reference)
                    except (ray.exceptions.RayTaskError, ray.exceptions.TaskUnschedulableError) as error:
                        raise UserError(f"--on {address.text}: {in_one_line(error)}") from error
                    except ray.exceptions.RayError as error:
                        if attempt >= ATTEMPTS:
                            raise UserError(
                                f"the process of {request.name} has died {ATTEMPTS} times ({in_one_line(error)}): "
                                f"finished trials are kept"
                            ) from error
                        submit(request, attempt + 1)
                        continue
                    if outcome.error is not None:
                        raise outcome.error
                    add(outcome.trial)
                    following = next_request(request.label)
                    if following is not None:
                        submit(following)
        finally:
            with suppress(Exception):
                for reference in at_work:
                    ray.cancel(reference, force=True)
                ray.kill(event_queue)
