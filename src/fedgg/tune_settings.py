"""`tune` from Python: what the command of this name does, also with objects of your own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fedgg.cluster.runners import trials_runner_of
from fedgg.compare_and_sweep import Variant, labelled_variants, whole_numbers
from fedgg.core.tasks import Criterion
from fedgg.errors import UserError, missing_extra
from fedgg.lab.build import ModelGiven
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import chosen_device
from fedgg.lab.federated_data import DataGiven, dataset_of, targets_of, with_given_clients
from fedgg.lab.name_resolution import given_algorithm
from fedgg.lab.observer import Observer
from fedgg.lab.run_processes import Given
from fedgg.lab.runner import experiment_given, with_names
from fedgg.lab.search_space import Pruner, Range, Sampler, Search, spaces
from fedgg.lab.search_trial import SearchTrial, measure_of
from fedgg.lab.study import Study
from fedgg.lab.task_and_metrics import MetricGiven, objective_of
from fedgg.lab.tuning import best_of, final_study, run_search
from fedgg.report.tables import Table, as_markdown
from fedgg.runfolder.record_types import flat


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
        numbers = self.search.study.seeds
        seeds = f"seed{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        note = (
            f"Chosen by the {measure.title}{self.search.shown_window} on the {100 * self.search.holdout:g}% of their "
            f"examples that clients held out ({seeds}), of {self.search.trials} trials for each algorithm; the test "
            f"set was not evaluated."
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


def tune(
    variants: Mapping[str, Variant] | Iterable[Variant],
    experiment: Experiment | dict[str, Any] | None = None,
    *,
    space: Mapping[str, Any] | None = None,
    trials: int = 20,
    sampler: Sampler = "tpe",
    pruner: Pruner = "median",
    window: int = 1,
    seeds: Iterable[int] = (0,),
    fresh_seeds: Iterable[int] = (),
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    loss: Criterion | None = None,
    metrics: Sequence[MetricGiven] | None = None,
    out: str | os.PathLike[str] | None = None,
    data_folder: Path | None = None,
    processes: int = 1,
    on: str | None = None,
    observer: Observer | None = None,
) -> TuningResult:
    """Search for the settings of every variant with which clients' hold-out examples are predicted best.

    Variants, `model`, `data`, `loss` and `metrics` are as in `compare`, and trials go by the first metric; an algorithm
    that is not the library's is named as FILE.py:CLASS. Every variant has the same number of `trials`. `space` has
    dotted keys, with {"low": 0.001, "high": 1.0, "log": True} or a list of values, and tables of such keys by label; by
    default the learning rate and what algorithms declare. A score is the mean of the last `window` evaluations. `seeds`
    are those of every trial, `fresh_seeds` those of `result.study`, which no trial may have. With `out` finished trials
    are kept, and the search continues where it was stopped. Of the observer `on_start`, `on_client`, `on_round` and,
    after every trial, `on_notice` are called. `on` is as in `compare`, for Ray: algorithms are searched at the same
    time, the trials of one after each other.
    """
    base = experiment_given(experiment)
    labelled = {label: _settings_of(label, variant) for label, variant in labelled_variants(variants).items()}
    objective = objective_of(loss, metrics)
    targets = targets_of(with_names(base, None, None, None, objective))
    shared = None if data is None else dataset_of(data, targets=targets)
    if shared is not None and on is None:
        shared = shared.to(chosen_device(base))
    if data is not None:  # clients that come with the data are the split
        split = with_given_clients(with_names(base, None, data, None, objective), data, data_folder).split
        base = base.changed({"split.scheme": split.scheme, "split.clients": split.clients})
    study = Study(base, labelled, whole_numbers(seeds), next(iter(labelled), ""))
    search = Search(
        study, spaces(space or {}, labelled), trials, sampler, pruner, window, whole_numbers(fresh_seeds), objective
    )
    folder = None if out is None else Path(out)
    given = Given(model, shared, None, objective)
    trials_run = run_search(
        search,
        folder,
        observer=observer or Observer(),
        processes=processes,
        given=given,
        data_folder=data_folder,
        trials_runner=trials_runner_of(on, tuple(search.space), given, data_folder),
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
        raise UserError(f"{label}: trials name their algorithm, and this one has no name: give it as 'FILE.py:CLASS'")
    values = {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if getattr(algorithm, f.name) != f.default}
    return {"algorithm.name": name, **{f"algorithm.{key}": value for key, value in values.items()}}
