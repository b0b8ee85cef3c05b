"""Algorithms side by side from Python: what `fedgg compare` does, with one's own objects."""

from __future__ import annotations

import operator
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedgg.analysis.compare import Comparison
from fedgg.analysis.compare import compare as compare_runs
from fedgg.analysis.verdict import conclude
from fedgg.core.algorithm import Algorithm
from fedgg.errors import UserError
from fedgg.lab.build import DataGiven, ModelGiven, chosen_device, dataset_of, with_given_clients
from fedgg.lab.config import Experiment
from fedgg.lab.parallel_runs import run_here
from fedgg.lab.registry import build_algorithm, check_needs, given_algorithm
from fedgg.lab.run_processes import Given, Job
from fedgg.lab.runner import with_names
from fedgg.lab.study import check_labels
from fedgg.lab.study_folder import Index, listed, place_of
from fedgg.output_files import PAGE
from fedgg.report.page import write_page
from fedgg.report.tables import Table, as_markdown, comparison_tables
from fedgg.runfolder.dotted_settings import flat
from fedgg.runfolder.locks import writing_pages
from fedgg.runfolder.read import read_study
from fedgg.runfolder.records import StudyRecord

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
        return conclude(self.record, self.comparison).text

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

    def _repr_markdown_(self) -> str:
        """For notebooks."""
        return str(self)


def compare(
    rows: Mapping[str, Row] | Iterable[Row],
    experiment: Experiment | dict[str, Any] | None = None,
    *,
    seeds: Iterable[int] = (0, 1, 2),
    reference: str | None = None,
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    out: str | os.PathLike[str] | None = None,
    data_folder: Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> Compared:
    """Every row with every seed, on the same splits; what is finished in `out` is kept, the rest goes on.

    A row is an algorithm, or settings (`{"algorithm.name": "fedgg", "local.lr": 0.1}`; what it does not set, the
    algorithm too, is the experiment's), by its label; without labels algorithms are called as their classes are. The
    first is the reference, unless another is named.
    `model` and `data` are as in `run`, and shared. With `out` every run is kept, and `report.html` there is a page of
    them. `tell` hears of each run that begins or ends: `print`, for instance. On a GPU runs train together where they
    can.
    """
    base = Experiment(**experiment) if isinstance(experiment, dict) else experiment or Experiment()
    if not isinstance(base, Experiment):
        raise UserError(f"experiment must be a fedgg.Experiment, or a dict of its sections, got {experiment!r}")
    labelled, chosen_seeds = _labelled(rows), _whole(seeds)
    labels, chosen = tuple(labelled), reference or next(iter(labelled), "")
    check_labels(labels, chosen_seeds, chosen)
    shared = None if data is None else dataset_of(data).to(chosen_device(base))
    parts = {label: _parts(base, label, row, model, data, data_folder) for label, row in labelled.items()}
    home: AbstractContextManager[str | os.PathLike[str]] = (
        tempfile.TemporaryDirectory() if out is None else nullcontext(out)
    )
    with home as folder_name:
        folder = Path(folder_name)
        jobs = [
            Job(
                f"{label}, seed {seed}",
                own.changed({"name": label, "seed": seed}),
                folder / place_of(label, seed),
                data_folder,
                Given(model, shared, algorithm),
            )
            for seed in chosen_seeds
            for label, (own, algorithm) in parts.items()
        ]
        again = f"fedgg.compare(..., out={os.fspath(folder_name)!r}), from Python, with the same rows"
        with listed(Index(labels, chosen_seeds, chosen), folder, jobs, again):
            run_here(jobs, _teller(tell))
        with writing_pages(folder, tell or (lambda sentence: None)):
            record = read_study(folder)
            if out is not None:
                page = folder / PAGE
                write_page([folder], page)
                if tell is not None:
                    tell(f"page: {page}")
    return Compared(None if out is None else folder, record, compare_runs(record))


def _whole(seeds: Any) -> tuple[int, ...]:
    """Whole numbers of any kind, NumPy's too."""
    try:
        found = list(seeds)
        if any(isinstance(seed, bool) for seed in found):
            raise TypeError
        return tuple(operator.index(seed) for seed in found)
    except TypeError:
        raise UserError(f"seeds must be whole numbers, as (0, 1, 2) or range(5), got {seeds!r}") from None


def _labelled(rows: Mapping[str, Row] | Iterable[Row]) -> dict[str, Row]:
    if isinstance(rows, Mapping):
        if empty := [label for label in rows if not str(label).strip()]:
            raise UserError(f"a row needs a label that can be read, got {empty[0]!r}")
        return {" ".join(str(label).split()): row for label, row in rows.items()}
    if isinstance(rows, str | type | Algorithm) or not isinstance(rows, Iterable):
        raise UserError(f"rows must be several, as compare([fedgg.FedAvg(), fedgg.FedGG()]), got {rows!r}")
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
    base: Experiment,
    label: str,
    row: Row,
    model: ModelGiven | None,
    data: DataGiven | None,
    data_folder: Path | None,
) -> tuple[Experiment, Algorithm | None]:
    """A row's experiment and, if it is one of Python's, its algorithm; mistakes that settings show are told here."""
    settings = flat(dict(row)) if isinstance(row, Mapping) else {}
    algorithm = None if isinstance(row, Mapping) else given_algorithm(row)
    if theirs := [key for key in ("seed", "name") if key in settings]:
        raise UserError(f"{label}: a row cannot set {theirs[0]}; seeds and labels are said beside the rows")
    for key, given in (("model.name", model), ("data.source", data)):
        if key in settings and given is not None:
            raise UserError(f"{label}: a row cannot set {key} where {key.partition('.')[0]}=... is handed in for all")
    own = base.changed(settings)
    own = with_given_clients(with_names(own, model, data, algorithm), data, data_folder)
    check_needs(algorithm or build_algorithm(own.algorithm.name, own.algorithm.settings), own)
    return own, algorithm


def _teller(tell: Callable[[str], None] | None) -> Callable[[Job, str, Any], None]:
    def hear(job: Job, kind: str, what: Any) -> None:
        if tell is None:
            return
        if kind == "started":
            done, of = what
            begins = f"from round {done + 1} of {of}" if done else f"{of} rounds"
            tell(f"{job.name}: {'all rounds are there' if done >= of else begins}")
        elif kind == "notice":
            tell(f"{job.name}: {what}")
        elif kind == "ended":
            accuracy = what["final_test_accuracy"]
            tell(
                f"{job.name}: {what['status']}" + ("" if accuracy is None else f", test accuracy {100 * accuracy:.1f}%")
            )

    return hear
