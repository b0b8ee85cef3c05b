"""`fedgg run` and `fedgg resume`: one experiment."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgg.cli import options
from fedgg.cli.options import folder_name, refuse_a_study
from fedgg.cli.progress import RunProgress, show_summary, tracked
from fedgg.cli.terminal import described, note, progress, say
from fedgg.errors import UserError

if TYPE_CHECKING:
    from fedgg.cluster.runners import ActorsRunner
    from fedgg.lab.config import Experiment


def run(
    experiment: Annotated[Path | None, typer.Argument(help="A TOML file; without one, the defaults.")] = None,
    algorithm: Annotated[
        list[str] | None, typer.Option(help="NAME[:KEY=VALUE,...], for instance fedgg:mu=0.1; one.")
    ] = None,
    data: options.DataOption = None,
    model: options.ModelOption = None,
    clients: options.ClientsOption = None,
    beta: options.BetaOption = None,
    rounds: options.RoundsOption = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed: split, initial weights, client sampling, batch order.")
    ] = None,
    device: options.SpreadOption = None,
    on: options.OnOption = None,
    actors: options.ActorsOption = None,
    resources: options.ResourcesOption = None,
    settings: options.SetOption = None,
    data_folder: options.DataFolderOption = None,
    out: options.OutOption = None,
    trust: options.TrustOption = None,
    track: options.TrackOption = None,
) -> None:
    """Run one experiment, or resume it if the folder holds an unfinished run of it.

    Examples:

    - `fedgg run --rounds 20`
    - `fedgg run --algorithm scaffold:correction=exact --beta 0.1 --seed 3`
    - `fedgg run --data cifar10 --model cnn --set data.augment=crop_flip --out runs/cifar`
    - `fedgg run my.toml --set local.lr=0.05 --track wandb`
    - `fedgg run --data cifar100 --model vgg16 --device cuda:0,1`
    - `fedgg run --data cifar100 --model vgg16 --device cuda --on ray:auto --actors 4`
    """
    from fedgg.cluster.runners import actors_runner_of
    from fedgg.lab.config import Experiment, load_experiment
    from fedgg.lab.federated_data import with_given_clients

    options.trust_all(trust)
    on_actors = actors_runner_of(on, actors, resources)
    base = load_experiment(experiment) if experiment else Experiment()
    if algorithm and len(algorithm) > 1:
        raise UserError(f"a run has one algorithm, not {len(algorithm)}: `fedgg compare` takes several")
    changed = options.changes(
        data=data,
        model=model,
        clients=clients,
        beta=beta,
        rounds=rounds,
        device=device,
        settings=settings,
        also={"seed": seed, **(options.algorithm_settings(algorithm[0]) if algorithm else {})},
    )
    chosen = with_given_clients(base.changed(changed), data_folder=data_folder)
    _run(chosen, out or Path("runs") / folder_name(chosen), data_folder, track, on_actors)


def resume(
    folder: Annotated[Path, typer.Argument(help="A run folder. To resume a comparison, run its command again.")],
    rounds: Annotated[int | None, typer.Option(help="Train until this round instead of the configured one.")] = None,
    epsilon_limit: Annotated[
        float | None, typer.Option(help="A larger privacy.epsilon_limit than at the start.")
    ] = None,
    without_stop: Annotated[bool, typer.Option("--without-stop", help="Leave out [stop], early stopping.")] = False,
    data_folder: options.DataFolderOption = None,
    trust: options.TrustOption = None,
    track: options.TrackOption = None,
) -> None:
    """Resume a run that was stopped or killed; the result has the same bits as without the interruption.

    Examples:

    - `fedgg resume runs/cifar`
    - `fedgg resume runs/cifar --rounds 200`
    - `fedgg resume runs/private --epsilon-limit 8`
    - `fedgg resume runs/stopped --without-stop`
    """
    from fedgg.lab.store import Store

    refuse_a_study(folder)
    options.trust_all(trust)
    if (folder / "federation").is_dir() and not Store(folder).holds_a_run():
        raise UserError(
            f"{folder} holds a federation that was not started: call `fedgg flower up` again with the experiment and "
            f"--out {shlex.quote(str(folder))}"
        )
    experiment = Store(folder).experiment()
    if rounds is not None:
        experiment = experiment.changed({"rounds": rounds})
    if epsilon_limit is not None:
        if experiment.privacy is None:
            raise UserError(f"{folder} is not a private run: omit --epsilon-limit")
        experiment = experiment.changed({"privacy.epsilon_limit": epsilon_limit})
    if without_stop:
        if experiment.stop is None:
            raise UserError(f"{folder} has no early stopping: omit --without-stop")
        experiment = experiment.changed({"stop": None})
    parts = (experiment.model.name, experiment.data.source, experiment.algorithm.name)
    if any(part.startswith("python:") for part in parts):
        raise UserError(
            f"{folder} was run with objects from Python: call fedgg.run(..., out={str(folder)!r}) with them again"
        )
    _check_code_is_the_same(experiment, folder)
    if (folder / "federation").is_dir():
        from fedgg.cli.flower import resume_up

        resume_up(experiment, folder, data_folder, track)
        return
    _run(experiment, folder, data_folder, track)


def _check_code_is_the_same(experiment: Experiment, folder: Path) -> None:
    """A folder may be from others: its code runs only if the user allows it, and if it has changed, by name."""
    from fedgg.lab.name_resolution import code_of_parts
    from fedgg.lab.store import Store
    from fedgg.lab.trusted_code import check_trusted, doubt_about

    for part, code in code_of_parts(experiment).items():
        check_trusted(code, doubt_about(code, Store(folder).code_files().get(part)))


def _run(
    experiment: Experiment,
    folder: Path,
    data_folder: Path | None,
    track: list[str] | None,
    on_actors: ActorsRunner | None = None,
) -> None:
    from fedgg.lab.name_resolution import check_code
    from fedgg.lab.run_processes import Job
    from fedgg.lab.runner import run as run_experiment

    check_code(experiment)
    say(f"{experiment.algorithm.name}, {described(experiment)}, seed {experiment.seed}")
    with progress() as bar:
        observer = RunProgress(bar, experiment.rounds)
        try:
            with tracked(observer, track, folder) as watched:
                if on_actors is None:
                    finished = run_experiment(experiment, out=folder, data_folder=data_folder, observer=watched)
                else:
                    finished = on_actors(Job(experiment.name, experiment, folder, data_folder), watched)
        except KeyboardInterrupt:
            bar.stop()
            where = "" if data_folder is None else f" --data-folder {shlex.quote(str(data_folder))}"
            note(f"stopped; resume with: fedgg resume {shlex.quote(str(folder))}{where}")
            raise typer.Exit(130) from None
    for sentence in observer.dropped.totals():
        note(sentence)
    show_summary(finished.summary, folder)
