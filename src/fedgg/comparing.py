"""Algorithms side by side from Python: what `fedgg compare` does, with one's own objects."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedgg.core.algorithm import Algorithm
from fedgg.errors import UserError
from fedgg.lab.build import DataGiven, ModelGiven, chosen_device, dataset_of
from fedgg.lab.config import Experiment
from fedgg.lab.jobs import Given, Job
from fedgg.lab.parts import build_algorithm, check_needs, given_algorithm
from fedgg.lab.run_all import run_here
from fedgg.lab.runner import with_names
from fedgg.lab.study import Index, check_labels, open_index, place
from fedgg.report.answer import answer
from fedgg.report.compare import Comparison
from fedgg.report.compare import compare as compare_runs
from fedgg.report.folders import StudyRecord, read_study
from fedgg.report.tables import Table, as_markdown, comparison_tables

Row = Algorithm | type[Algorithm] | str | Mapping[str, Any]  # an algorithm, or settings under dotted keys


@dataclass(frozen=True)
class Compared:
    """Finished runs, and what they tell of each other; `print` shows the answer and its table."""

    folder: Path | None
    record: StudyRecord = field(repr=False)  # every run, round by round
    comparison: Comparison = field(repr=False)

    @property
    def answer(self) -> str:
        """What the seeds can tell, in a sentence or two."""
        return answer(self.record, self.comparison).said

    @property
    def tables(self) -> tuple[Table, Table]:
        """Accuracy, and rounds and traffic to the reference's; `fedgg.report.tables` writes them in other forms."""
        return comparison_tables(self.comparison)

    @property
    def final(self) -> dict[str, dict[int, float]]:
        """Test accuracy after the last round, by label and seed, of runs that were ever looked at."""
        found = {
            label: {seed: run.accuracy()[1] for seed, run in by_seed.items()}
            for label, by_seed in self.record.runs.items()
        }
        return {
            label: {seed: float(curve[-1]) for seed, curve in curves.items() if len(curve)}
            for label, curves in found.items()
        }

    def __str__(self) -> str:
        return f"{self.answer}\n\n{as_markdown(self.tables[0])}"


def compare(
    rows: Mapping[str, Row] | Iterable[Row],
    experiment: Experiment | dict[str, Any] | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    reference: str | None = None,
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    out: str | os.PathLike[str] | None = None,
    data_folder: Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> Compared:
    """Every row with every seed, on the same splits; what is finished in `out` is kept, the rest goes on.

    A row is an algorithm, or settings under dotted keys (`{"algorithm.name": "fedgg", "local.lr": 0.1}`), by its label;
    without labels algorithms are called as their classes are. The first is the reference, unless another is named.
    `model` and `data` are as in `run`, and shared. With `out` every run is kept, and `fedgg report OUT` makes a page of
    them. `tell` hears of each run that begins or ends: `print`, for instance. On a GPU runs train together where they
    can.
    """
    base = Experiment(**experiment) if isinstance(experiment, dict) else experiment or Experiment()
    labelled = _labelled(rows)
    labels, chosen = tuple(labelled), reference or next(iter(labelled), "")
    check_labels(labels, tuple(seeds), chosen)
    shared = None if data is None else dataset_of(data).to(chosen_device(base))
    parts = {label: _parts(base, label, row, model, data) for label, row in labelled.items()}
    home: AbstractContextManager[str | os.PathLike[str]] = (
        tempfile.TemporaryDirectory() if out is None else nullcontext(out)
    )
    with home as folder_name:
        folder = Path(folder_name)
        jobs = [
            Job(
                f"{label}, seed {seed}",
                own.changed({"name": label, "seed": seed}),
                folder / place(label, seed),
                data_folder,
                Given(model, shared, algorithm),
            )
            for seed in seeds
            for label, (own, algorithm) in parts.items()
        ]
        open_index(Index(labels, tuple(seeds), chosen), folder, jobs)
        run_here(jobs, _teller(tell))
        record = read_study(folder)
    return Compared(None if out is None else folder, record, compare_runs(record))


def _labelled(rows: Mapping[str, Row] | Iterable[Row]) -> dict[str, Row]:
    if isinstance(rows, Mapping):
        return dict(rows)
    labelled: dict[str, Row] = {}
    for row in rows:
        if isinstance(row, Mapping):
            raise UserError("settings need a label: compare({'label': {...}, ...})")
        label = type(given_algorithm(row)).__name__
        if label in labelled:
            raise UserError(f"two rows are called {label}: give them labels, compare({{'one': ..., 'other': ...}})")
        labelled[label] = row
    return labelled


def _parts(
    base: Experiment, label: str, row: Row, model: ModelGiven | None, data: DataGiven | None
) -> tuple[Experiment, Algorithm | None]:
    """A row's experiment and, if it is one of Python's, its algorithm; all mistakes before the first run."""
    algorithm = None if isinstance(row, Mapping) else given_algorithm(row)
    own = base.changed(dict(row)) if isinstance(row, Mapping) else base
    if isinstance(row, Mapping) and (theirs := [key for key in ("seed", "name") if key in row]):
        raise UserError(f"{label}: a row cannot set {theirs[0]}; seeds and labels are said beside the rows")
    own = with_names(own, model, data, algorithm)
    check_needs(algorithm or build_algorithm(own.algorithm.name, own.algorithm.settings), own)
    return own, algorithm


def _teller(tell: Callable[[str], None] | None) -> Callable[[Job, str, Any], None]:
    def hear(job: Job, kind: str, what: Any) -> None:
        if tell is None:
            return
        if kind == "started":
            done, of = what
            tell(f"{job.name}: {f'from round {done + 1} of {of}' if done else f'{of} rounds'}")
        elif kind == "notice":
            tell(f"{job.name}: {what}")
        elif kind == "ended":
            accuracy = what["final_test_accuracy"]
            tell(
                f"{job.name}: {what['status']}" + ("" if accuracy is None else f", test accuracy {100 * accuracy:.1f}%")
            )

    return hear
