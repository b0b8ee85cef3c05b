"""Progress of several runs on a terminal: one bar for all, one for each, notices, and dropped clients."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import typer

from fedgg.cli.screen import Heartbeat, counted, ending, news, note, progress

NAMED = 5  # lines at the end of a run


class LostClients:
    """Counts the rounds that a run went on without a client, as far as this process has played them."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, str], int] = {}
        self._with_losses = 0

    def heard(self, record: dict[str, Any]) -> str:
        """The round's part of the line that goes on; nothing where nobody was lost."""
        from fedgg.lab.round_record import client_name

        lost = [(client_name(gone), gone["why"]) for gone in record["lost"]]
        for gone in lost:
            self._rounds[gone] = self._rounds.get(gone, 0) + 1
        self._with_losses += bool(lost)
        if len(lost) == 1:
            return f"{_named([lost[0][0]], lost[0][1])}, {counted(self._rounds[lost[0]], 'round')} so far"
        rounds = counted(self._with_losses, "round")
        return f"{len(lost)} clients dropped, {rounds} with dropped clients so far" if lost else ""

    def ended(self) -> list[str]:
        """What stays to be said at the end of a run, for those that were lost more than once: most often first."""
        alike: dict[tuple[int, str], list[str]] = {}
        for (client, why), count in self._rounds.items():
            if count > 1:
                alike.setdefault((count, why), []).append(client)
        often_first = sorted(alike.items(), reverse=True)
        told = [f"{_named(who, why)}, {counted(count, 'round')} in all" for (count, why), who in often_first]
        more = ["more clients were dropped, less often: rounds.jsonl has them all"] if len(told) > NAMED else []
        return told[:NAMED] + more


def _named(clients: list[str], why: str) -> str:
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(clients)} dropped ({why})"


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
