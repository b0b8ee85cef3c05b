"""`compare` and `sweep` from Python: what the commands of these names do, also with objects of your own."""

from __future__ import annotations

import operator
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedgg.analysis.compare import Comparison
from fedgg.analysis.compare import compare as compare_runs
from fedgg.analysis.verdict import conclude
from fedgg.cluster.runners import device_named, runner_of
from fedgg.core.algorithm import Algorithm
from fedgg.core.tasks import Criterion
from fedgg.errors import UserError, missing_extra
from fedgg.files import PAGE
from fedgg.lab.build import ModelGiven
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import chosen_device
from fedgg.lab.federated_data import DataGiven, dataset_of, targets_of, with_given_clients
from fedgg.lab.name_resolution import build_algorithm, check_needs, given_algorithm
from fedgg.lab.observer import Observer, Observers
from fedgg.lab.parallel_runs import run_here
from fedgg.lab.run_processes import Given, Job
from fedgg.lab.run_result import Run
from fedgg.lab.runner import experiment_given, with_names
from fedgg.lab.study import check_labels, noting_waits
from fedgg.lab.study import grid as combinations
from fedgg.lab.study_folder import Index, listed, place_of
from fedgg.lab.task_and_metrics import NAMED_OBJECTIVE, MetricGiven, objective_of
from fedgg.report.tables import Table, as_markdown, comparison_tables, write_study_tables
from fedgg.runfolder.locks import writing_pages
from fedgg.runfolder.read import read_study
from fedgg.runfolder.record_types import StudyRecord, flat

Variant = Algorithm | type[Algorithm] | str | Mapping[str, Any]  # an algorithm, or settings under dotted keys


@dataclass(frozen=True)
class StudyResult:
    """The finished runs of a comparison or sweep, and their statistics; `print` shows the verdict and its table."""

    folder: Path | None
    record: StudyRecord = field(repr=False)  # every run, round by round
    comparison: Comparison = field(repr=False)
    model: ModelGiven | None = field(default=None, repr=False, kw_only=True)  # that of the call

    @property
    def answer(self) -> str:
        """The verdict in a sentence or two: which differences the seeds support."""
        return conclude(self.record, self.comparison).text

    @property
    def tables(self) -> tuple[Table, Table]:
        """Scores, and rounds and traffic to the reference's; `fedgg.report.tables` writes them in other forms."""
        return comparison_tables(self.comparison)

    @property
    def final(self) -> dict[str, dict[int, float]]:
        """The measure (test accuracy, or the primary metric) after the last round, by label and seed."""
        measure = self.comparison.measure
        curves = {
            label: {seed: run.scores(measure)[1] for seed, run in by_seed.items()}
            for label, by_seed in self.record.runs.items()
        }
        return {
            label: {seed: float(curve[-1]) for seed, curve in by_seed.items() if len(curve)}
            for label, by_seed in curves.items()
        }

    def by(self, metric: str) -> StudyResult:
        """The same runs compared by another measure that they recorded, as "test_loss" or "holdout_accuracy"."""
        return replace(self, comparison=compare_runs(self.record, self.record.measure(metric)))

    def run(self, label: str, seed: int, model: ModelGiven | None = None) -> Run:
        """One of the runs, with its model; for a result with a folder (`out=`).

        `model` is as in `Run.load`; the one that `compare` or `sweep` was called with is known.
        """
        if self.folder is None:
            raise UserError("the runs of this result were not kept: call compare or sweep with out=FOLDER")
        record = self.record.runs.get(label, {}).get(seed)
        if record is None:
            finished = ", ".join(f"{name!r} {sorted(by_seed)}" for name, by_seed in self.record.runs.items())
            raise UserError(f"no finished run {label!r} with seed {seed!r}: labels and their seeds are {finished}")
        if model is None and str(record.config["model"]["name"]).startswith("python:"):
            model = self.model
        return Run.load(record.path, model)

    def __str__(self) -> str:
        return f"{self.answer}\n\n{as_markdown(self.tables[0])}"

    def _repr_markdown_(self) -> str:
        """For notebooks."""
        return str(self)


def compare(
    variants: Mapping[str, Variant] | Iterable[Variant],
    experiment: Experiment | dict[str, Any] | None = None,
    *,
    seeds: Iterable[int] = (0, 1, 2),
    reference: str | None = None,
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    loss: Criterion | None = None,
    metrics: Sequence[MetricGiven] | None = None,
    out: str | os.PathLike[str] | None = None,
    data_folder: Path | None = None,
    on: str | None = None,
    observer: Observer | Sequence[Observer] | None = None,
) -> StudyResult:
    """Run every variant with every seed on the same splits; finished runs in `out` are kept, interrupted ones resumed.

    A variant is an algorithm, or a dict of settings that replace those of `experiment`: `{"algorithm.name": "fedgg",
    "local.lr": 0.1}`, or `{"algorithm": MyAlgorithm(), "local.lr": 0.1}`. In a mapping the keys are the labels; in a
    list an algorithm's label is the name of its class. The first variant is the reference, unless `reference` names
    another.
    `model`, `data`, `loss` and `metrics` are as in `run`, the same for all. With `out` every run is kept, and tables,
    figures and `report.html` are written next to them, as by `fedgg compare`. `observer`, or each of several, is called
    as the runs proceed; `fedgg.PrintObserver()` prints when one starts or ends. On a GPU runs are trained as one stack
    where they can be.
    `on` runs them elsewhere than in this process: "ray", "ray:auto", "ray:HOST:PORT" or "ray://HOST:PORT" as Ray tasks,
    "cuda:all" or "cuda:0,1" with one process for each GPU.
    """
    observer = Observers(observer) if isinstance(observer, Sequence) else observer or Observer()
    base = experiment_given(experiment)
    if (device := device_named(on)) is not None:
        base = base.changed({"engine.device": device})
    labelled, chosen_seeds = labelled_variants(variants), whole_numbers(seeds)
    labels, chosen = tuple(labelled), reference or next(iter(labelled), "")
    check_labels(labels, chosen_seeds, chosen)
    objective = objective_of(loss, metrics)
    if objective != NAMED_OBJECTIVE:
        base = with_names(base, None, None, None, objective)
    shared = None if data is None else dataset_of(data, targets=targets_of(base))
    if shared is not None and on is None:
        shared = shared.to(chosen_device(base))
    parts = {label: _parts(base, label, variant, model, data, data_folder) for label, variant in labelled.items()}
    home: AbstractContextManager[str | os.PathLike[str]] = (
        tempfile.TemporaryDirectory() if out is None else nullcontext(out)
    )
    with home as folder_name:
        folder = Path(folder_name)
        jobs = [
            Job(
                f"{label}, seed {seed}",
                varied.changed({"name": label, "seed": seed}),
                folder / place_of(label, seed),
                data_folder,
                Given(model, shared, algorithm, objective),
            )
            for seed in chosen_seeds
            for label, (varied, algorithm) in parts.items()
        ]
        again = f"fedgg.compare(..., out={os.fspath(folder_name)!r}), from Python, with the same variants"
        with (
            listed(Index(labels, chosen_seeds, chosen), folder, jobs, again),
            noting_waits(observer, folder, jobs) as noted,
        ):
            if on is None:
                run_here(jobs, noted)
            else:
                runner_of(on, folder, processes=None)(jobs, noted)
        with writing_pages(folder, partial(observer.on_notice, "")):
            record = read_study(folder)
            if out is not None:
                write_study_tables(record, folder)
                observer.on_notice("", _write_figures_and_page(record, folder))
    return StudyResult(None if out is None else folder, record, compare_runs(record), model=model)


def _write_figures_and_page(record: StudyRecord, folder: Path) -> str:
    """Where the page is, or why figures and page were not written."""
    try:
        from fedgg.report.export import write_study_figures
        from fedgg.report.page import write_page

        write_study_figures(record, folder)
        write_page([folder], folder / PAGE)
    except ImportError as error:
        if (without_extra := missing_extra(error)) is None:
            raise
        return f"no figures and no page: {without_extra}"
    return f"page: {folder / PAGE}"


def sweep(
    grid: Mapping[str, Sequence[Any]],
    experiment: Experiment | dict[str, Any] | None = None,
    *,
    seeds: Iterable[int] = (0,),
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    loss: Criterion | None = None,
    metrics: Sequence[MetricGiven] | None = None,
    out: str | os.PathLike[str] | None = None,
    data_folder: Path | None = None,
    on: str | None = None,
    observer: Observer | Sequence[Observer] | None = None,
) -> StudyResult:
    """Run every combination of the settings in `grid`; the first combination is the reference.

    `grid` has dotted keys and lists of values: `{"algorithm.mu": [0.01, 0.1], "local.lr": [0.05, 0.1]}` is four
    variants. Everything else is as in `compare`.
    """
    if not isinstance(grid, Mapping) or not grid:
        raise UserError(f"grid must be a dict such as {{'algorithm.mu': [0.01, 0.1]}}, got {grid!r}")
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise UserError(f"grid[{key!r}] must be a list of at least one value, got {values!r}")
    return compare(
        combinations(grid),
        experiment,
        seeds=seeds,
        model=model,
        data=data,
        loss=loss,
        metrics=metrics,
        out=out,
        data_folder=data_folder,
        on=on,
        observer=observer,
    )


def whole_numbers(seeds: Any) -> tuple[int, ...]:
    """Whole numbers of any kind, NumPy's too."""
    try:
        numbers = list(seeds)
        if any(isinstance(seed, bool) for seed in numbers):
            raise TypeError
        return tuple(operator.index(seed) for seed in numbers)
    except TypeError:
        raise UserError(f"seeds must be whole numbers, as (0, 1, 2) or range(5), got {seeds!r}") from None


def labelled_variants(variants: Mapping[str, Variant] | Iterable[Variant]) -> dict[str, Variant]:
    if isinstance(variants, Mapping):
        if empty := [label for label in variants if not str(label).strip()]:
            raise UserError(f"a variant needs a label that can be read, got {empty[0]!r}")
        return {" ".join(str(label).split()): variant for label, variant in variants.items()}
    if isinstance(variants, str | type | Algorithm) or not isinstance(variants, Iterable):
        raise UserError(f"variants must be several, as compare([fedgg.FedAvg(), fedgg.FedGG()]), got {variants!r}")
    labelled: dict[str, Variant] = {}
    for variant in variants:
        if isinstance(variant, Mapping):
            raise UserError("settings need a label: compare({'label': {...}, ...})")
        label = type(given_algorithm(variant)).__name__
        if label in labelled:
            raise UserError(f"two variants have the label {label}: compare({{'one': ..., 'other': ...}}) sets labels")
        labelled[label] = variant
    return labelled


def _parts(
    base: Experiment,
    label: str,
    variant: Variant,
    model: ModelGiven | None,
    data: DataGiven | None,
    data_folder: Path | None,
) -> tuple[Experiment, Algorithm | None]:
    """A variant's experiment and its algorithm, if that is an object; UserError where its settings do not fit."""
    settings = flat(dict(variant)) if isinstance(variant, Mapping) else {}
    given = settings.get("algorithm") if isinstance(variant, Mapping) else variant
    algorithm = None if given is None else given_algorithm(given)
    settings.pop("algorithm", None)
    if twice := [key for key in settings if key.startswith("algorithm.") and algorithm is not None]:
        raise UserError(f"{label}: {twice[0]} is a setting of the object that is given as algorithm: set it there")
    if reserved := [key for key in ("seed", "name") if key in settings]:
        raise UserError(f"{label}: a variant cannot set {reserved[0]}; seeds=... and the labels do that")
    for key, part in (("model.name", model), ("data.source", data)):
        if key in settings and part is not None:
            raise UserError(f"{label}: a variant cannot set {key} where {key.partition('.')[0]}=... is passed for all")
    experiment = with_names(base.changed(settings), model, data, algorithm)
    experiment = with_given_clients(experiment, data, data_folder)
    check_needs(algorithm or build_algorithm(experiment.algorithm.name, experiment.algorithm.settings), experiment)
    return experiment, algorithm
