"""`compare`, `sweep` and `tune` from Python: what the commands of these names do, also with objects of your own."""

from __future__ import annotations

import operator
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedgg.analysis.compare import Comparison
from fedgg.analysis.compare import compare as compare_runs
from fedgg.analysis.verdict import conclude
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
from fedgg.lab.runner import with_names
from fedgg.lab.search_space import Pruner, Range, Sampler, Search, spaces
from fedgg.lab.study import Study, check_labels
from fedgg.lab.study import grid as combinations
from fedgg.lab.study_folder import Index, listed, place_of
from fedgg.lab.task_and_metrics import NAMED_OBJECTIVE, MetricGiven, objective_of
from fedgg.lab.tuning import SearchTrial, best_of, final_study, measure_of, run_search
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
        """One of the runs, with its model; for a result with a folder (`out=`). `model` is as in `Run.load`."""
        if self.folder is None:
            raise UserError("the runs of this result were not kept: call compare or sweep with out=FOLDER")
        record = self.record.runs.get(label, {}).get(seed)
        if record is None:
            finished = ", ".join(f"{name!r} {sorted(by_seed)}" for name, by_seed in self.record.runs.items())
            raise UserError(f"no finished run {label!r} with seed {seed!r}: labels and their seeds are {finished}")
        return Run.load(record.path, model)

    def __str__(self) -> str:
        return f"{self.answer}\n\n{as_markdown(self.tables[0])}"

    def _repr_markdown_(self) -> str:
        """For notebooks."""
        return str(self)


@dataclass(frozen=True)
class TuningResult:
    """The trials of a search, and the settings it chose; `print` shows the table."""

    folder: Path | None
    search: Search = field(repr=False)
    trials: list[SearchTrial] = field(repr=False)

    @property
    def best(self) -> dict[str, SearchTrial]:
        """By label, the finished trial with the best score on hold-out examples; `.settings` are what was chosen."""
        return best_of(self.search, self.trials)

    @property
    def study(self) -> Study:
        """The chosen settings with seeds that no trial had; its variants, base and seeds are arguments of compare."""
        return final_study(self.search, self.trials)

    @property
    def table(self) -> Table:
        """One row for each algorithm."""
        rows, best, measure = [], self.best, measure_of(self.search)
        for label in self.search.space:
            states = [trial.state for trial in self.trials if trial.algorithm == label]
            count = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
            score = measure.number(best[label].last_score, 2) if label in best else "none finished"
            rows.append((label, score, best[label].shown_settings if label in best else "", count))
        seeds = ", ".join(map(str, self.search.study.seeds))
        note = (
            f"Chosen by the {measure.title} on the {100 * self.search.holdout:g}% of their examples that clients held "
            f"out (seeds {seeds}), of {self.search.trials} trials for each algorithm; the test set was not evaluated."
        )
        return Table(
            "tuned settings",
            ("algorithm", f"{measure.title}{measure.unit}", "settings", "trials"),
            tuple(rows),
            (note,),
        )

    def write_figure(self) -> str:
        """Draw the scores over each setting into the folder; where the figure is, or why there is none."""
        if self.folder is None:
            return "no figure: the trials were not kept"
        try:
            from fedgg.report.figure_style import save
            from fedgg.report.run_figures import TrialPanel, trials_figure
        except ImportError as error:
            if (without_extra := missing_extra(error)) is None:
                raise
            return f"no figure: {without_extra}"
        panels = []
        for label, space in self.search.space.items():
            scored = [trial for trial in self.trials if trial.algorithm == label and trial.scores]
            for key, one in space.items():
                values = [(trial.settings[key], trial.last_score, trial.state == "finished") for trial in scored]
                log, choices = (one.log, ()) if isinstance(one, Range) else (False, one.values)
                panels.append(TrialPanel(label, key, log, choices, values))
        return f"figure: {save(trials_figure(panels, measure_of(self.search)), self.folder / 'trials.png')}"

    def __str__(self) -> str:
        return as_markdown(self.table)

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
    observer: Observer | Sequence[Observer] | None = None,
) -> StudyResult:
    """Run every variant with every seed on the same splits; finished runs in `out` are kept, interrupted ones resumed.

    A variant is an algorithm, or a dict of settings (`{"algorithm.name": "fedgg", "local.lr": 0.1}`) that replace those
    of `experiment`. In a mapping the keys are the labels; in a list an algorithm's label is the name of its class. The
    first variant is the reference, unless `reference` names another.
    `model`, `data`, `loss` and `metrics` are as in `run`, the same for all. With `out` every run is kept, and tables,
    figures and `report.html` are written next to them, as by `fedgg compare`. `observer`, or each of several, is called
    as the runs proceed; `fedgg.PrintObserver()` prints when one starts or ends. On a GPU runs are trained as one stack
    where they can be.
    """
    observer = Observers(observer) if isinstance(observer, Sequence) else observer or Observer()
    base = Experiment(**experiment) if isinstance(experiment, dict) else experiment or Experiment()
    if not isinstance(base, Experiment):
        raise UserError(f"experiment must be a fedgg.Experiment, or a dict of its sections, got {experiment!r}")
    labelled, chosen_seeds = _labelled(variants), _whole(seeds)
    labels, chosen = tuple(labelled), reference or next(iter(labelled), "")
    check_labels(labels, chosen_seeds, chosen)
    objective = objective_of(loss, metrics)
    if objective != NAMED_OBJECTIVE:
        base = with_names(base, None, None, None, objective)
    shared = None if data is None else dataset_of(data, targets=targets_of(base)).to(chosen_device(base))
    parts = {label: _parts(base, label, variant, model, data, data_folder) for label, variant in labelled.items()}
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
                Given(model, shared, algorithm, objective),
            )
            for seed in chosen_seeds
            for label, (own, algorithm) in parts.items()
        ]
        again = f"fedgg.compare(..., out={os.fspath(folder_name)!r}), from Python, with the same variants"
        with listed(Index(labels, chosen_seeds, chosen), folder, jobs, again):
            run_here(jobs, observer)
        with writing_pages(folder, partial(observer.on_notice, "")):
            record = read_study(folder)
            if out is not None:
                write_study_tables(record, folder)
                observer.on_notice("", _write_figures_and_page(record, folder))
    return StudyResult(None if out is None else folder, record, compare_runs(record))


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
        observer=observer,
    )


def tune(
    variants: Mapping[str, Variant] | Iterable[Variant],
    experiment: Experiment | dict[str, Any] | None = None,
    *,
    space: Mapping[str, Any] | None = None,
    trials: int = 20,
    sampler: Sampler = "tpe",
    pruner: Pruner = "median",
    seeds: Iterable[int] = (0,),
    fresh_seeds: Iterable[int] = (),
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    loss: Criterion | None = None,
    metrics: Sequence[MetricGiven] | None = None,
    out: str | os.PathLike[str] | None = None,
    data_folder: Path | None = None,
    processes: int = 1,
    observer: Observer | None = None,
) -> TuningResult:
    """Search for the settings of every variant with which clients' hold-out examples are predicted best.

    Variants, `model`, `data`, `loss` and `metrics` are as in `compare`, and trials go by the first metric; an algorithm
    that is not the library's is named as FILE.py:CLASS. Every variant has the same number of `trials`. `space` has
    dotted keys, with {"low": 0.001, "high": 1.0, "log": True} or a list of values, and tables of such keys by label; by
    default the learning rate and what algorithms declare. `seeds` are those of every trial, `fresh_seeds` those of
    `result.study`, which no trial may have. With `out` finished trials are kept, and the search continues where it was
    stopped. Of the observer `on_start`, `on_client`, `on_round` and, after every trial, `on_notice` are called.
    """
    base = Experiment(**experiment) if isinstance(experiment, dict) else experiment or Experiment()
    labelled = {label: _settings_of(label, variant) for label, variant in _labelled(variants).items()}
    objective = objective_of(loss, metrics)
    targets = targets_of(with_names(base, None, None, None, objective))
    shared = None if data is None else dataset_of(data, targets=targets).to(chosen_device(base))
    if data is not None:  # clients that come with the data are the split
        split = with_given_clients(with_names(base, None, data, None, objective), data, data_folder).split
        base = base.changed({"split.scheme": split.scheme, "split.clients": split.clients})
    study = Study(base, labelled, _whole(seeds), next(iter(labelled), ""))
    search = Search(study, spaces(space or {}, labelled), trials, sampler, pruner, _whole(fresh_seeds), objective)
    folder = None if out is None else Path(out)
    trials_run = run_search(
        search,
        folder,
        observer=observer or Observer(),
        processes=processes,
        given=Given(model, shared, None, objective),
        data_folder=data_folder,
    )
    result = TuningResult(folder, search, trials_run)
    if folder is not None and observer is not None:
        observer.on_notice("", result.write_figure())
    return result


def _settings_of(label: str, variant: Variant) -> dict[str, Any]:
    """A variant by dotted keys; of an algorithm the settings that are not its defaults, which are searched."""
    if isinstance(variant, Mapping):
        return flat(dict(variant))
    if isinstance(variant, str) and ":" in variant:  # FILE.py:CLASS
        return {"algorithm.name": variant}
    algorithm = given_algorithm(variant)
    name = with_names(Experiment(), None, None, algorithm).algorithm.name
    if name.startswith("python:"):
        raise UserError(f"{label}: trials name their algorithm, and this one has no name: give it as FILE.py:CLASS")
    values = {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if getattr(algorithm, f.name) != f.default}
    return {"algorithm.name": name, **{f"algorithm.{key}": value for key, value in values.items()}}


def _whole(seeds: Any) -> tuple[int, ...]:
    """Whole numbers of any kind, NumPy's too."""
    try:
        numbers = list(seeds)
        if any(isinstance(seed, bool) for seed in numbers):
            raise TypeError
        return tuple(operator.index(seed) for seed in numbers)
    except TypeError:
        raise UserError(f"seeds must be whole numbers, as (0, 1, 2) or range(5), got {seeds!r}") from None


def _labelled(variants: Mapping[str, Variant] | Iterable[Variant]) -> dict[str, Variant]:
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
    algorithm = None if isinstance(variant, Mapping) else given_algorithm(variant)
    if reserved := [key for key in ("seed", "name") if key in settings]:
        raise UserError(f"{label}: a variant cannot set {reserved[0]}; seeds=... and the labels do that")
    for key, given in (("model.name", model), ("data.source", data)):
        if key in settings and given is not None:
            raise UserError(f"{label}: a variant cannot set {key} where {key.partition('.')[0]}=... is passed for all")
    own = base.changed(settings)
    own = with_given_clients(with_names(own, model, data, algorithm), data, data_folder)
    check_needs(algorithm or build_algorithm(own.algorithm.name, own.algorithm.settings), own)
    return own, algorithm
