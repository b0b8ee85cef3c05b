"""Running what is missing: finished runs are kept, interrupted ones go on, shared ones are run once."""

from __future__ import annotations

from pathlib import Path

from fedgg.files import check_folder
from fedgg.lab.build import check_data
from fedgg.lab.files import writing_to
from fedgg.lab.jobs import Job, Tell
from fedgg.lab.run_all import run_all
from fedgg.paper.items import shown_dataset
from fedgg.paper.plan import Plan
from fedgg.paper.results import RunFolders


def missing_jobs(plan: Plan, out: Path, data_folder: Path | None) -> list[Job]:
    """The runs that have not ended yet, in the order they are to be run."""
    folders = RunFolders(out)
    jobs = [
        Job(
            f"{shown_dataset(line.dataset)}, {line.base.name}, seed {seed}",
            line.experiment(seed),
            out / line.place(seed),
            data_folder,
        )
        for line, seed in plan.runs()
        if not folders.ended(line, seed)
    ]
    with writing_to(out):
        for job in jobs:
            check_folder(job.folder, out)
    return jobs


def run_missing(jobs: list[Job], processes: int, tell: Tell) -> None:
    """One data set after another, so that a GPU holds one of them and trains all its runs together."""
    sources = dict.fromkeys(job.experiment.data.source for job in jobs)
    for source in list(sources)[1:]:
        check_data(source, jobs[0].data_folder)
    for source in sources:
        run_all([job for job in jobs if job.experiment.data.source == source], processes, tell)
