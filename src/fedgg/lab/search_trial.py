"""One trial of a search: the settings that Optuna proposes, run and scored on the examples that clients hold out.

What trial k of an algorithm tries depends on the seed, the algorithm, k and its earlier trials only, so that it is the
same wherever it is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedgg.core.evaluation import Score
from fedgg.core.random_choices import torch_seed
from fedgg.core.tasks import Targets
from fedgg.data.dataset import Dataset
from fedgg.engines import Engine, Fused, Workers
from fedgg.errors import UserError, missing_extra
from fedgg.lab.build import Federation, build
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import DataConfig
from fedgg.lab.engine_setup import arithmetic, build_engine, chosen_device
from fedgg.lab.federated_data import load_data, targets_of, with_given_clients
from fedgg.lab.observer import Observer
from fedgg.lab.one_round import Diverged, begin, close_before_looking, next_job, train
from fedgg.lab.run_processes import Given
from fedgg.lab.runner import make_workers, with_names
from fedgg.lab.search_space import Search
from fedgg.lab.task_and_metrics import metrics_of, task_of
from fedgg.runfolder.measure import Measure

if TYPE_CHECKING:
    import optuna

STARTUP = 5  # trials of an algorithm that are drawn at random, and not pruned by the median


@dataclass(frozen=True)
class SearchTrial:
    """One setting of an algorithm that was tried."""

    algorithm: str  # the label
    number: int  # from 1
    settings: dict[str, Any]
    scores: dict[int, float]  # by round, of the hold-out examples: the mean over the seeds and the last evaluations
    state: Literal["finished", "pruned", "diverged"]
    why: str = ""
    pruner_state: dict[str, Any] = field(default_factory=dict)  # what Hyperband has noted of it

    @property
    def last_score(self) -> float:
        """After the last round that was evaluated."""
        return self.scores[max(self.scores)]

    @property
    def score(self) -> float | None:
        """After the last round; None where the trial did not finish."""
        return self.last_score if self.state == "finished" else None

    @property
    def shown_settings(self) -> str:
        values = {key: f"{one:.4g}" if isinstance(one, float) else str(one) for key, one in self.settings.items()}
        return ", ".join(f"{key} = {value}" for key, value in values.items())

    def sentence(self, measure: Measure) -> str:
        if self.score is not None:
            return f"{measure.title} {measure.number(self.score, 2)}{measure.unit} ({self.shown_settings})"
        last = f" after round {max(self.scores)}" if self.state == "pruned" else ""
        return f"{self.state}{last}{f': {self.why}' if self.why else ''} ({self.shown_settings})"


def measure_of(search: Search) -> Measure:
    """What trials are compared by: the experiment's first metric on clients' hold-out examples.

    Of the global model, or of personal models where the experiment has them.
    """
    base, objective = with_names(search.study.base, None, None, None, search.objective), search.objective
    metric = metrics_of(base, task_of(base, objective.loss), objective.metrics)[0]
    where = "holdout" if base.personal is None else "personal"
    return Measure(metric.name, where, metric.higher_is_better, metric.percent)


@dataclass(frozen=True)
class TrialRequest:
    """The next trial of an algorithm."""

    search: Search
    label: str
    earlier: tuple[SearchTrial, ...]

    @property
    def number(self) -> int:
        return len(self.earlier) + 1

    @property
    def name(self) -> str:
        return trial_name(self.search, self.label, self.number)


class TrialRunner:
    """Runs trials in this process; all have one copy of their data and one pool of workers."""

    def __init__(self, given: Given, data_folder: Path | None, processes: int, pools: ExitStack):
        check_optuna()
        self._engine_of, self._federation_of = _engines(pools, processes), _builder(given, data_folder)

    def run(self, request: TrialRequest, observer: Observer) -> SearchTrial:
        proposed = _proposed(request.search, request.label, request.earlier)
        trial = _run_trial(
            request.search, request.label, request.number, proposed, self._engine_of, self._federation_of, observer
        )
        return replace(trial, pruner_state=dict(proposed.study.trials[-1].system_attrs))


def check_optuna() -> None:
    """UserError where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise missing_extra(error) or error from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def _run_trial(
    search: Search,
    label: str,
    number: int,
    proposed: optuna.trial.Trial,
    engine_of: Callable[[Federation], Engine],
    federation_of: Callable[[Experiment], Federation],
    observer: Observer,
) -> SearchTrial:
    """One trial: all its seeds in step, so that it can be pruned by the mean of their scores."""
    settings = proposed.params
    experiments = [search.experiment(label, seed, settings) for seed in search.study.seeds]
    name, scores, measure = trial_name(search, label, number), dict[int, float](), measure_of(search)
    evaluations: list[float] = []
    model = "personal" if measure.where == "personal" else "global"
    with arithmetic(experiments[0]):
        try:
            federations = [federation_of(experiment) for experiment in experiments]
            if not all(federation.tested for federation in federations):
                raise UserError(f"no client has an example to hold out at data.holdout = {search.holdout:g}: take more")
        except UserError as error:
            raise UserError(f"{name}, {settings}: {error}") from error
        states, engine = [begin(federation) for federation in federations], engine_of(federations[0])
        rounds = min(federation.last_round for federation in federations)
        observer.on_start(name, 0, rounds)
        for round_ in range(1, rounds + 1):
            values, losses = list[float](), list[float]()
            try:
                for place, federation in enumerate(federations):
                    job = next_job(federation, states[place])
                    ends = train(job, engine, partial(observer.on_client, name))
                    closed = close_before_looking(federation, states[place], job, ends, 0.0)
                    states[place] = closed.state
                    losses += [float(end.loss) for end in closed.played.included.values()]
                    if looks := [look for look in closed.looks if look.client is not None and look.model == model]:
                        values.append(_mean(engine.score(looks), measure.metric, round_))
            except Diverged as end:
                return SearchTrial(label, number, settings, scores, "diverged", str(end))
            record: dict[str, Any] = {"round": round_, "train_loss": math.fsum(losses) / len(losses), "lost": []}
            if values:
                evaluations.append(math.fsum(values) / len(values))
                recent = evaluations[-search.window :]
                scores[round_] = math.fsum(recent) / len(recent)
                record[measure.key] = scores[round_]
                proposed.report(scores[round_], round_)
            observer.on_round(name, record)
            if values and round_ < rounds and proposed.should_prune():
                return SearchTrial(label, number, settings, scores, "pruned")
    return SearchTrial(label, number, settings, scores, "finished")


def trial_name(search: Search, label: str, number: int) -> str:
    return f"{label}, trial {number} of {search.trials}"


def _mean(scores: list[Score], metric: str, round_: int) -> float:
    """Over clients by their hold-out examples, those left out for which it is not defined; Diverged where a loss is
    not finite."""
    if not all(math.isfinite(score.loss) for score in scores):
        raise Diverged(f"the hold-out loss is not finite after round {round_}", [])
    defined = [score for score in scores if math.isfinite(score.values[metric])]
    if not defined:
        raise UserError(f"{metric} is not defined on the hold-out examples of any client: search by another metric")
    return sum(score.values[metric] * score.examples for score in defined) / sum(score.examples for score in defined)


def _builder(given: Given, data_folder: Path | None) -> Callable[[Experiment], Federation]:
    """Builds the federations of trials; all have one copy of their data."""

    @cache
    def data_set(config: DataConfig, targets: Targets, device: torch.device) -> Dataset:
        return load_data(config, data_folder, targets).to(device)

    def federation_of(experiment: Experiment) -> Federation:
        named = with_names(experiment, given.model, given.data, None, given.objective)
        experiment, data = with_given_clients(named, given.data, data_folder), given.data
        if data is None:
            data = data_set(experiment.data.data_set, targets_of(experiment), chosen_device(experiment))
        return build(experiment, model=given.model, data=data, objective=given.objective)

    return federation_of


def _engines(pools: ExitStack, processes: int) -> Callable[[Federation], Engine]:
    """The engine of a trial; one pool of workers serves all trials. On a CPU the bits are the same for any number."""
    pool: list[Workers] = []

    def engine_of(federation: Federation) -> Engine:
        if federation.engine == "devices":
            raise UserError(f"a search trains on one device: engine.device = {federation.experiment.engine.device!r}")
        if federation.engine != "workers":
            return build_engine(federation.choice, federation.experiment.engine)
        if processes == 1 and federation.experiment.engine.name == "auto":
            return Fused()
        if not pool:
            pool.append(pools.enter_context(make_workers(federation.experiment.engine, processes)))
        return pool[0]

    return engine_of


# Optuna --------------------------------------------------------------------------------------------------------------


def _proposed(search: Search, label: str, earlier: Sequence[SearchTrial]) -> optuna.trial.Trial:
    """The next trial of an algorithm, by a study and a sampler of its own: see the module's docstring."""
    import optuna
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner
    from optuna.samplers import RandomSampler, TPESampler
    from optuna.trial import TrialState, create_trial

    rounds = search.experiment(label, search.study.seeds[0], {}).rounds
    pruners: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
        "median": partial(MedianPruner, n_startup_trials=STARTUP, n_warmup_steps=max(1, rounds // 5)),
        "hyperband": partial(HyperbandPruner, min_resource=max(1, rounds // 10), max_resource=rounds),
        "none": NopPruner,
    }
    seed = torch_seed(search.study.base.seed, f"tuning {label}", len(earlier)) % 2**32
    tpe = partial(TPESampler, n_startup_trials=STARTUP, multivariate=False)
    sampler = tpe(seed=seed) if search.sampler == "tpe" else RandomSampler(seed=seed)
    study = optuna.create_study(
        study_name=label,
        direction="maximize" if measure_of(search).higher_is_better else "minimize",
        sampler=sampler,
        pruner=pruners[search.pruner](),
    )
    space = {key: one.distribution() for key, one in search.space[label].items()}
    for trial in earlier:
        state = TrialState.COMPLETE if trial.state == "finished" else TrialState.PRUNED
        study.add_trial(
            create_trial(
                state=state,
                value=trial.last_score if trial.state != "diverged" else None,
                params=trial.settings,
                distributions=space,
                # Without values, a trial that diverged ranks below all others.
                intermediate_values={} if trial.state == "diverged" else trial.scores,
                system_attrs=trial.pruner_state,
            )
        )
    return study.ask(space)
