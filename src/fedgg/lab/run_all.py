"""Several runs of one study, in the way that is fastest where they run; every way has the same bits.

Other processes may work on the same runs. A run that one of them has locked is left until all others are done, and then
waited for: it is found finished, or, if that process ended before, resumed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fedgg.lab.interleaved import run_interleaved
from fedgg.lab.jobs import Job, Tell, run_jobs
from fedgg.lab.locks import LockFile
from fedgg.lab.store import Store
from fedgg.lab.together import run_together

LOOK_EVERY = 0.5  # seconds between two looks at runs of other processes


def run_here(jobs: list[Job], tell: Tell) -> None:
    """The same for jobs that cannot be sent to another process; a run's own engine may still use several."""
    _run_until_ended(
        jobs, tell, lambda some: run_together(some, tell) if _go_together(some) else run_jobs(some, 1, tell)
    )


def run_all(jobs: list[Job], processes: int, tell: Tell) -> None:
    """Run what is missing in the jobs' folders; all ask for the same engine. `processes` counts on a CPU."""

    def run_some(some: list[Job]) -> list[Job]:
        engine = some[0].experiment.engine
        if _go_together(some):
            return run_together(some, tell)
        shared = engine.name == "auto" and 1 < len(some) < processes and _one_thread_each(some)
        if engine.name == "workers" or shared:
            reason = f"{len(some)} runs of a study share {processes} processes"
            return run_interleaved([job.under("workers", reason) for job in some], processes, tell)
        at_once = min(processes, len(some))
        reason = f"{len(some)} runs of a study, {'one after another' if at_once <= 1 else f'{at_once} at a time'}"
        return run_jobs([job.under("fused", reason) for job in some] if len(some) > 1 else some, processes, tell)

    _run_until_ended(jobs, tell, run_some)


def _one_thread_each(jobs: list[Job]) -> bool:
    """As workers have."""
    return all(job.experiment.engine.threads == 1 for job in jobs)


def _run_until_ended(jobs: list[Job], tell: Tell, run_some: Callable[[list[Job]], list[Job]]) -> None:
    """`run_some` returns those of its jobs that another process is working on."""
    by_folder = {job.folder: job for job in jobs}  # as they were given, not as an engine has changed them
    ready, waiting = list(by_folder), list[Path]()
    while ready or waiting:
        if ready:
            in_use = [job.folder for job in run_some([by_folder[folder] for folder in ready])]
            for folder in in_use:
                tell(by_folder[folder], "notice", "another process is working on this run; waiting for it")
            waiting += in_use
        else:
            time.sleep(LOOK_EVERY)
        ready = [folder for folder in waiting if not LockFile(Store(folder).lock_file).is_held_elsewhere()]
        waiting = [folder for folder in waiting if folder not in ready]


def _go_together(jobs: list[Job]) -> bool:
    engine = jobs[0].experiment.engine
    return engine.device != "cpu" or engine.name == "stacked"
