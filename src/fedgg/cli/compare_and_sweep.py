"""`fedgg compare` and `fedgg sweep`: several experiments side by side."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgg.analysis.labels import short_names
from fedgg.cli import options
from fedgg.cli.options import called_as
from fedgg.cli.progress import processes_for, show_progress
from fedgg.cli.report import write_report
from fedgg.cli.terminal import counted, described, note, print_table, say
from fedgg.errors import UserError, missing_extra
from fedgg.files import PAGE
from fedgg.lab.trusted_code import trust_named
from fedgg.runfolder.locks import writing_pages

if TYPE_CHECKING:
    from fedgg.lab.run_places import Shard
    from fedgg.lab.study import Study


def compare(
    study: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, a small comparison on digits.")
    ] = None,
    algorithm: Annotated[
        list[str] | None, typer.Option(help="[LABEL@]NAME[:KEY=VALUE,...]; repeat it. The first is the reference.")
    ] = None,
    seeds: options.SeedsOption = None,
    data: options.DataOption = None,
    model: options.ModelOption = None,
    clients: options.ClientsOption = None,
    beta: options.BetaOption = None,
    rounds: options.RoundsOption = None,
    device: options.DevicesOption = None,
    settings: options.SetOption = None,
    jobs: options.JobsOption = None,
    on: options.OnOption = None,
    resources: options.ResourcesOption = None,
    shard: options.ShardOption = None,
    data_folder: options.DataFolderOption = None,
    out: options.OutOption = None,
    metric: options.MetricOption = None,
    trust: options.TrustOption = None,
    track: options.TrackOption = None,
) -> None:
    """Compare algorithms on the same splits, with a verdict on each difference over the seeds.

    Without a study file it is a small demonstration: digits, 10 clients, Dirichlet 0.1, an MLP of 64 units, batches of
    32, 25 rounds; each can be changed. Called again, it keeps finished runs and continues the others. Calls with the
    same `--out`, also at the same time, add their rows and seeds to one comparison. An algorithm from a file
    (FILE.py:CLASS) is labelled by its class.

    Examples:

    - `fedgg compare`
    - `fedgg compare --algorithm fedavg --algorithm fedgg:mu=0.1 --algorithm scaffold --seeds 0-4 --beta 0.1`
    - `fedgg compare my-study.toml --out runs/mine`
    - `fedgg compare my-study.toml --out runs/mine --device cuda:all`
    - `fedgg compare my-study.toml --out runs/mine --on ray:auto --device cuda`
    - `fedgg compare my-study.toml --out runs/mine --shard 3/8`
    """
    from fedgg.lab.study import Study, demo_study, load_study

    options.trust_all(trust)
    device, on = options.device_and_on(device, on)
    chosen = load_study(study) if study else demo_study()
    variants = options.variants(algorithm, _labels_in(out)) if algorithm else chosen.variants
    changed = options.changes(
        data=data, model=model, clients=clients, beta=beta, rounds=rounds, device=device, settings=settings
    )
    if "seed" in changed:
        raise UserError("--set seed: the seeds of a comparison are given by --seeds")
    chosen = Study(
        chosen.base.changed(changed),
        variants,
        options.seeds(seeds) if seeds else chosen.seeds,
        next(iter(variants)) if algorithm else chosen.reference,
    )
    where = Where(jobs, on, resources, options.shard_of_call(shard, on))
    _run(chosen, out or _folder(study.stem if study else "compare", chosen), where, data_folder, metric, track)


def sweep(
    experiment: Annotated[Path | None, typer.Argument(help="A TOML file; without one, the defaults.")] = None,
    grid: Annotated[list[str] | None, typer.Option(help="KEY=VALUE,VALUE,...; repeat it for more axes.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="NAME[:KEY=VALUE,...] under every combination.")] = None,
    seeds: options.SeedsOption = None,
    data: options.DataOption = None,
    model: options.ModelOption = None,
    clients: options.ClientsOption = None,
    beta: options.BetaOption = None,
    rounds: options.RoundsOption = None,
    device: options.DevicesOption = None,
    settings: options.SetOption = None,
    jobs: options.JobsOption = None,
    on: options.OnOption = None,
    resources: options.ResourcesOption = None,
    shard: options.ShardOption = None,
    data_folder: options.DataFolderOption = None,
    out: options.OutOption = None,
    metric: options.MetricOption = None,
    trust: options.TrustOption = None,
    track: options.TrackOption = None,
) -> None:
    """Run every combination of some settings; the first combination is the reference of the table.

    Examples:

    - `fedgg sweep --grid algorithm.mu=0.001,0.01,0.1,1 --seeds 0-2`
    - `fedgg sweep --algorithm fedprox --grid algorithm.mu=0,0.01 --grid local.lr=0.01,0.1 --rounds 30`
    - `fedgg sweep --grid local.lr=0.01,0.1,1 --seeds 0-9 --on ray --out runs/rates`
    """
    from fedgg.lab import study
    from fedgg.lab.config import Experiment, load_experiment

    if not grid:
        raise UserError("nothing to sweep over: name at least one axis, for instance --grid algorithm.mu=0.01,0.1")
    axes: dict[str, list[Any]] = {}
    for text in grid:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise UserError(f"--grid {text!r} is not of the form KEY=VALUE,VALUE, for instance algorithm.mu=0.01,0.1")
        if key in axes:
            raise UserError(f"--grid {key} is named twice: put all its values into one, {key}=VALUE,VALUE")
        axes[key] = [options.parsed(value.strip()) for value in options.split_values(values)]
        for value in axes[key]:
            trust_named({key: value})
    options.trust_all(trust)
    device, on = options.device_and_on(device, on)
    changed = options.changes(
        data=data,
        model=model,
        clients=clients,
        beta=beta,
        rounds=rounds,
        device=device,
        settings=settings,
        also=options.algorithm_settings(algorithm) if algorithm else None,
    )
    if twice := sorted(changed.keys() & axes.keys()):
        raise UserError(f"{twice[0]} is set and is in --grid: leave out one of the two")
    if seeds and "seed" in changed:
        raise UserError("--set seed and --seeds: leave out one of the two")
    base = (load_experiment(experiment) if experiment else Experiment()).changed(changed)
    classes = [str(name) for key in ("algorithm.name", "model.name") for name in axes.get(key, [])]
    variants = study.grid(axes, short_names(classes))
    chosen = study.Study(base, variants, options.seeds(seeds) if seeds else (base.seed,), next(iter(variants)))
    where = Where(jobs, on, resources, options.shard_of_call(shard, on))
    _run(chosen, out or _folder("sweep", chosen), where, data_folder, metric, track)


def _folder(name: str, study: Study) -> Path:
    """A default folder that depends on the study's settings, so that different studies do not share one."""
    return Path("runs") / f"{name}-{study.hash()[:6]}"


def _labels_in(folder: Path | None) -> tuple[str, ...]:
    """The labels of the study in the folder; none if there is no readable study."""
    from fedgg.runfolder.read import read_study_plan

    try:
        return read_study_plan(folder).labels if folder is not None else ()
    except UserError:
        return ()


def _describe(study: Study) -> str:
    """The settings that all runs share."""
    swept = {key for changes in study.variants.values() for key in changes}
    seeds = f"seed{'s' if len(study.seeds) > 1 else ''} {', '.join(map(str, study.seeds))}"
    return f"{described(study.base, swept)}, {seeds}"


@dataclass(frozen=True)
class Where:
    """The options that say where, and how many at a time, runs are computed."""

    jobs: int | None
    on: str | None
    resources: str | None
    shard: Shard | None


def _run(
    study: Study,
    folder: Path,
    where: Where,
    data_folder: Path | None,
    metric: str | None,
    track: list[str] | None,
) -> None:
    from fedgg.cluster.runners import runner_of
    from fedgg.lab.run_places import shards_of
    from fedgg.lab.study import run_study

    if metric is not None:
        _check_metric(study, metric, folder)
    say(_describe(study))
    say(f"to watch it: fedgg watch {folder}")
    cores = processes_for(study.base.engine.device)
    runner = runner_of(where.on, folder, processes=where.jobs, default_processes=cores, resources=where.resources)
    runs = [(seed, label) for seed in study.seeds for label in study.variants]
    if where.shard is not None:
        shards = shards_of(runs, where.shard.count, lambda run: run[1])
        runs = [run for run, shard in zip(runs, shards, strict=True) if shard == where.shard]
        say(f"shard {where.shard}: {counted(len(runs), 'run')} of {len(shards)}")
        if not runs:
            return
    rounds = [study.experiment(label, seed).rounds for seed, label in runs]
    show_progress(
        len(rounds),
        sum(rounds),
        lambda observer: run_study(
            study,
            folder,
            observer=observer,
            data_folder=data_folder,
            command=called_as(),
            shard=where.shard,
            runner=runner,
        ),
        track,
        folder,
    )
    with writing_pages(folder, note):
        _show(folder, metric)


def _check_metric(study: Study, metric: str, folder: Path) -> None:
    """UserError before anything trains, if no run is going to record the measure, and none in the folder has it."""
    from fedgg.lab.task_and_metrics import task_of
    from fedgg.registry import names_code
    from fedgg.runfolder.measure import planned_measures
    from fedgg.runfolder.read import read_study
    from fedgg.runfolder.record_types import unknown_measure

    known: dict[str, None] = {}
    if (folder / "study.json").exists():  # runs of other calls may record other measures
        with suppress(UserError):  # none of its runs has begun
            known = dict.fromkeys(read_study(folder).measures)
    for label in study.variants:
        experiment = study.experiment(label, study.seeds[0])
        if any(map(names_code, (*experiment.metrics, experiment.task.name))):
            return  # the user's own code names its metrics
        metrics = experiment.metrics or task_of(experiment).metrics
        known |= dict.fromkeys(planned_measures(metrics, holdout=experiment.data.holdout > 0))
    if metric not in known and not metric.startswith(("personal_", "unseen_")):
        raise UserError(f"--metric: {unknown_measure(metric, known)}")


def _show(folder: Path, metric: str | None) -> None:
    """Write and print tables, figures and page of all finished runs in the folder, also of other calls."""
    from fedgg.report.tables import TABLES, write_study_tables
    from fedgg.runfolder.read import read_study

    record = read_study(folder)
    for table in write_study_tables(record, folder, metric):
        print_table(table)
    try:
        from fedgg.report.export import write_study_figures

        curves = write_study_figures(record, folder, metric)
        write_report([folder], folder / PAGE, metric=metric)
        say(f"curves: {curves}")
        say(f"splits: {folder / 'split-seed-*.png'}")
    except ImportError as error:
        if (without_extra := missing_extra(error)) is None:
            raise
        note(f"no figures and no page: {without_extra}")
    say(f"tables: {folder / TABLES}; each run has its own folder next to it")
