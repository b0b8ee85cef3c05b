"""Several runs of one study, in the way that is fastest where they run; every way has the same bits."""

from __future__ import annotations

from fedgg.lab.interleaved import run_interleaved
from fedgg.lab.jobs import Job, Tell, run_jobs
from fedgg.lab.together import run_together


def run_here(jobs: list[Job], tell: Tell) -> None:
    """The same for jobs that cannot be sent to another process; a run's own engine may still use several."""
    if _go_together(jobs):
        run_together(jobs, tell)
    else:
        run_jobs(jobs, 1, tell)


def run_all(jobs: list[Job], processes: int, tell: Tell) -> None:
    """Run what is missing in the jobs' folders; all ask for the same engine. `processes` counts on a CPU."""
    if not jobs:
        return
    engine = jobs[0].experiment.engine
    if _go_together(jobs):
        run_together(jobs, tell)
    elif engine.name == "workers" or (engine.name == "auto" and 1 < len(jobs) < processes and _one_thread_each(jobs)):
        reason = f"{len(jobs)} runs of a study share {processes} processes"
        run_interleaved([job.under("workers", reason) for job in jobs], processes, tell)
    else:
        at_once = min(processes, len(jobs))
        reason = f"{len(jobs)} runs of a study, {'one after another' if at_once <= 1 else f'{at_once} at a time'}"
        run_jobs([job.under("loop", reason) for job in jobs] if len(jobs) > 1 else jobs, processes, tell)


def _one_thread_each(jobs: list[Job]) -> bool:
    """As workers have."""
    return all(job.experiment.engine.threads == 1 for job in jobs)


def _go_together(jobs: list[Job]) -> bool:
    engine = jobs[0].experiment.engine
    return engine.device != "cpu" or engine.name == "stacked"
