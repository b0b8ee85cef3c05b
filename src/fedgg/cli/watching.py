"""Several runs at work, as a person sees them: a bar for all, a bar for each, and what is worth a note."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import typer

from fedgg.cli.losses import LostClients
from fedgg.cli.screen import Heartbeat, counted, ending, news, note, progress


def processes_for(device: str) -> int:
    """One for each core; a GPU is driven from one."""
    return 1 if device.startswith("cuda") else os.cpu_count() or 1


def watched(runs: int, rounds: int, work: Callable[[Callable[[Any, str, Any], None]], None]) -> None:
    """Do the work, which tells what happens to its jobs, and show it; Ctrl-C ends it with a word and code 130.

    `rounds` are those of all runs together.
    """
    said: set[str] = set()
    with progress() as bar:
        overall = bar.add_task(counted(runs, "run"), total=rounds, news="", within="")
        done: dict[str, int] = {}
        whole: dict[str, int] = {}
        beat = Heartbeat()
        tasks: dict[str, Any] = {}
        lost: dict[str, LostClients] = {}

        def tell(job: Any, kind: str, what: Any) -> None:
            if kind == "started":
                done[job.name], whole[job.name] = what
                lost.setdefault(job.name, LostClients())
                tasks[job.name] = bar.add_task(job.name, total=what[1], completed=what[0], news="", within="")
            elif kind == "client":
                bar.update(tasks[job.name], within=f"{what[0]}/{what[1]} clients")
            elif kind == "round":
                done[job.name] = what["round"]
                told = news(what, lost[job.name].heard(what))
                beat(f"{sum(done.values())} of {rounds} rounds; {job.name}: {told}")
                bar.update(tasks[job.name], completed=what["round"], news=told, within="")
            elif kind == "notice" and what not in said:
                said.add(what)
                note(f"{job.name}: {what}")
            elif kind == "ended":
                done[job.name] = whole[job.name]  # a run that diverged or stopped needs no more
                bar.remove_task(tasks.pop(job.name))
                for sentence in lost[job.name].ended():
                    note(f"{job.name}: {sentence}")
                if (why := ending(what)) is not None:
                    note(f"{job.name} {why}")
            bar.update(overall, completed=sum(done.values()))

        try:
            work(tell)
        except KeyboardInterrupt:
            bar.stop()
            note("stopped; run the same command again to continue: finished rounds are kept")
            raise typer.Exit(130) from None
