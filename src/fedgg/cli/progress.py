"""Progress of runs on a terminal: bars, notices, dropped clients, and how a run ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.progress import Progress, TaskID

from fedgg.cli.terminal import Heartbeat, counted, ending, news, note, progress, say, shown_epsilon, shown_score
from fedgg.errors import missing_extra
from fedgg.lab.observer import Observer
from fedgg.registry import names_code
from fedgg.runfolder.measure import Measure

MAX_LINES = 5  # on dropped clients, at the end of a run


class DroppedClients:
    """Counts the rounds in which a client was dropped, of the rounds run by this process."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, str], int] = {}
        self._rounds_with_drops = 0

    def add(self, record: dict[str, Any]) -> str:
        """The round's part of the progress line; empty if no client was dropped."""
        from fedgg.lab.round_record import client_name

        dropped = [(client_name(entry), entry["why"]) for entry in record["lost"]]
        for entry in dropped:
            self._rounds[entry] = self._rounds.get(entry, 0) + 1
        self._rounds_with_drops += bool(dropped)
        if len(dropped) == 1:
            client, reason = dropped[0]
            return f"{_named([client], reason)}, {counted(self._rounds[dropped[0]], 'round')} so far"
        rounds = counted(self._rounds_with_drops, "round")
        return f"{len(dropped)} clients dropped, {rounds} with dropped clients so far" if dropped else ""

    def totals(self) -> list[str]:
        """Sentences for the end of a run on clients that were dropped more than once, most often first."""
        groups: dict[tuple[int, str], list[str]] = {}
        for (client, why), count in self._rounds.items():
            if count > 1:
                groups.setdefault((count, why), []).append(client)
        sentences = [
            f"{_named(clients, why)}, {counted(count, 'round')} in all"
            for (count, why), clients in sorted(groups.items(), reverse=True)
        ]
        if len(sentences) > MAX_LINES:
            sentences[MAX_LINES:] = ["more clients were dropped, less often: rounds.jsonl lists all"]
        return sentences


def _named(clients: list[str], why: str) -> str:
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(clients)} dropped ({why})"


def processes_for(device: str) -> int:
    """One process per core; one in all for a GPU."""
    return 1 if device.startswith("cuda") else os.cpu_count() or 1


class RunProgress(Observer):
    """The progress bar of one run."""

    def __init__(self, bar: Progress, rounds: int):
        self.bar, self.rounds = bar, rounds
        self.heartbeat, self.dropped = Heartbeat(), DroppedClients()
        self.task = bar.add_task("starting", total=rounds, news="", within="")

    def on_phase(self, run: str, phase: str) -> None:
        self.heartbeat(phase)
        self.bar.update(self.task, description=phase)

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        news = f"resumed after round {rounds_done}" if rounds_done else ""
        self.bar.update(self.task, completed=rounds_done, description="rounds", news=news)

    def on_client(self, run: str, clients_done: int, clients: int) -> None:
        self.bar.update(self.task, within=f"{clients_done}/{clients} clients")

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        line = news(record, self.dropped.add(record))
        self.heartbeat(f"round {record['round']} of {self.rounds}: {line}")
        self.bar.update(self.task, completed=record["round"], news=line, within="")

    def on_notice(self, run: str, message: str) -> None:
        note(message)


class StudyProgress(Observer):
    """A progress bar for all runs together and one for each run that is being trained."""

    def __init__(self, bar: Progress, runs: int, rounds: int):
        self.bar, self.rounds = bar, rounds
        self.overall = bar.add_task(counted(runs, "run"), total=rounds, news="", within="")
        self.heartbeat = Heartbeat()
        self.rounds_done: dict[str, int] = {}
        self.rounds_of: dict[str, int] = {}
        self.tasks: dict[str, TaskID] = {}
        self.dropped: dict[str, DroppedClients] = {}
        self.notices: set[str] = set()

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        self.rounds_done[run], self.rounds_of[run] = rounds_done, rounds
        self.dropped.setdefault(run, DroppedClients())
        if run in self.tasks:  # its process has died, and another one continues
            self.bar.remove_task(self.tasks[run])
        self.tasks[run] = self.bar.add_task(run, total=rounds, completed=rounds_done, news="", within="")
        self._update()

    def on_client(self, run: str, clients_done: int, clients: int) -> None:
        self.bar.update(self.tasks[run], within=f"{clients_done}/{clients} clients")

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        self.rounds_done[run] = record["round"]
        line = news(record, self.dropped[run].add(record))
        self.heartbeat(f"{sum(self.rounds_done.values())} of {self.rounds} rounds; {run}: {line}")
        self.bar.update(self.tasks[run], completed=record["round"], news=line, within="")
        self._update()

    def on_notice(self, run: str, message: str) -> None:
        if message not in self.notices:
            self.notices.add(message)
            is_of_all = message.startswith("engine: ")
            note(message if is_of_all or not run else f"{run}: {message}")

    def on_end(self, run: str, summary: dict[str, Any]) -> None:
        self.rounds_done[run] = self.rounds_of[run]  # also for a run that diverged or stopped early
        self.bar.remove_task(self.tasks.pop(run))
        for sentence in self.dropped[run].totals():
            note(f"{run}: {sentence}")
        if (reason := ending(summary)) is not None:
            note(f"{run} {reason}")
        self._update()

    def _update(self) -> None:
        self.bar.update(self.overall, completed=sum(self.rounds_done.values()))


@contextmanager
def tracked(observer: Observer, names: Sequence[str] | None, folder: Path) -> Iterator[Observer]:
    """The observer together with the trackers of `--track`, which write to the folder if they write files."""
    if not names:
        yield observer
        return
    from fedgg.lab.trackers import tracked_by
    from fedgg.lab.trusted_code import trust

    trust(*(name.rpartition(":")[0] for name in names if names_code(name)))  # as it was typed
    with tracked_by(names, observer, folder, note) as watched:
        yield watched


def show_progress(
    runs: int,
    rounds: int,
    work: Callable[[Observer], None],
    track: Sequence[str] | None = None,
    folder: Path = Path(),
) -> None:
    """Call `work` with an observer that shows progress; Ctrl-C ends it with a note and exit code 130.

    `rounds` are those of all runs together; `track` and `folder` as in `tracked`.
    """
    with progress() as bar:
        try:
            with tracked(StudyProgress(bar, runs, rounds), track, folder) as observer:
                work(observer)
        except KeyboardInterrupt:
            bar.stop()
            note("stopped; run the same command again to continue: finished rounds are kept")
            raise typer.Exit(130) from None


def show_summary(summary: dict[str, Any], folder: Path) -> None:
    """Print a run's result and write its figures."""
    from fedgg.analysis.run_environment import shown_megabytes

    primary = _draw(folder)
    if (why := ending(summary)) is not None:
        note(why)
    if (final := summary.get(f"final_{primary.key}")) is not None:
        word, unit = primary.best_word, "%" if primary.percent else ""
        best = primary.number(summary[f"{word}_{primary.key}"], decimals=2)
        say(
            f"{shown_score(primary, final, decimals=2)} after round {summary['rounds_done']}, "
            f"{word} {best}{unit} after round {summary[f'{word}_at_round']}"
        )
    for name, whose in (("personal", "clients' own models on their"), ("unseen", "clients in no round, on their")):
        if (score := summary.get(f"final_{name}_{primary.metric}")) is not None:
            value = f"{primary.number(score, decimals=2)}{'%' if primary.percent else ''}"
            say(f"{name} {primary.metric_title} {value} ({whose} hold-out)")
    if "epsilon" in summary:
        say(f"privacy spent: {shown_epsilon(summary)}")
    say(f"{shown_megabytes(summary['bytes'] / 1e6)} MB sent, {summary['seconds']:.1f} s; everything is in {folder}")
    if summary["status"] == "diverged":
        raise typer.Exit(1)


def _draw(folder: Path) -> Measure:
    """Figures of the split, if it is known, and of the learning curves, if a round was evaluated; the run's metric."""
    from fedgg.runfolder.read import read_run

    record = read_run(folder)
    primary = record.metrics[0]
    try:
        from fedgg.report.data_figures import figure_of_partition
        from fedgg.report.figure_style import save
        from fedgg.report.run_figures import curves_figure
    except ImportError as error:
        if (without_extra := missing_extra(error)) is None:
            raise
        note(f"no figures: {without_extra}")
        return primary

    split = record.partition or {}
    if split.get("counts") and split.get("classes"):
        save(figure_of_partition(record), folder / "split.png")
    if any(one.metric == primary.metric for one in record.measures.values()):
        save(curves_figure(record), folder / "curves.png")
    return primary
