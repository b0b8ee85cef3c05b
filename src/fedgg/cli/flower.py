"""`fedgg flower new | up`: the same experiments on Flower, as an app or as a federation of processes."""

from __future__ import annotations

import importlib.util
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from fedgg.cli import options
from fedgg.cli.options import folder_name
from fedgg.cli.progress import RunProgress, show_summary, tracked
from fedgg.cli.terminal import note, progress, say
from fedgg.errors import UserError, without_flower

if TYPE_CHECKING:
    from fedgg.flower.local.setup import Listening
    from fedgg.lab.config import Experiment

app = typer.Typer(
    help="Run experiments on Flower: write an app, or try a whole federation on this machine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
ExperimentArgument = Annotated[Path, typer.Argument(help="A TOML file.")]


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist yet.")],
    experiment: ExperimentArgument,
    settings: options.SetOption = None,
    out: options.OutOption = None,
    trust: options.TrustOption = None,
) -> None:
    """Write a Flower app that runs an experiment, in Flower's simulation or on a deployment.

    Examples:

    - `fedgg flower new my-app experiment.toml`
    - `fedgg flower new my-app experiment.toml --out /srv/runs/first`
    """
    _need_flower()
    from fedgg.flower.app_project import new_app
    from fedgg.lab.config import load_experiment
    from fedgg.lab.federated_data import with_given_clients

    options.trust_all(trust)
    chosen = with_given_clients(load_experiment(experiment).changed(options.changes(settings=settings)))
    names = new_app(folder, chosen, out or Path("runs") / folder.name)
    say(f"written: {folder / 'pyproject.toml'}, {folder / names.package}, {folder / 'README.md'}")
    say(f"run it in Flower's simulation: flwr run {shlex.quote(str(folder))} --stream")


@app.command()
def up(
    experiment: ExperimentArgument,
    clients: options.ClientsOption = None,
    rounds: options.RoundsOption = None,
    settings: options.SetOption = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds within which clients must reply.", min=1)] = None,
    min_clients: Annotated[int | None, typer.Option(help="Minimum number of replies in a round.", min=1)] = None,
    data_folder: options.DataFolderOption = None,
    out: options.OutOption = None,
    host: Annotated[str, typer.Option(help="Address on which the SuperLink listens.")] = "127.0.0.1",
    no_tls: Annotated[bool, typer.Option("--no-tls", help="Do not encrypt connections.")] = False,
    no_authentication: Annotated[
        bool, typer.Option("--no-authentication", help="Let every node join that can reach the SuperLink.")
    ] = False,
    insecure_beyond_loopback: Annotated[
        bool,
        typer.Option("--insecure-beyond-loopback", help="Allow either of them on an address other machines can reach."),
    ] = False,
    shared_network: Annotated[
        bool,
        typer.Option(
            "--shared-network",
            help="Use this machine's network, in which every local account reaches the federation; by default it has "
            "its own network namespace, if the system allows it.",
        ),
    ] = False,
    trust: options.TrustOption = None,
    track: options.TrackOption = None,
) -> None:
    """Start a whole federation on this machine, run an experiment on it, and stop it.

    A SuperLink and one SuperNode per client, as separate processes, each with its own data; over TLS, with
    generated certificates and keys. Processes that exit are restarted. Called again with the same folder, or by
    `fedgg resume`, it resumes after the last finished round.

    Examples:

    - `fedgg flower up --clients 3 experiment.toml`
    - `fedgg flower up --clients 4 experiment.toml --set algorithm.name=scaffold --out runs/federation`
    - `fedgg flower up experiment.toml --track mlflow`
    """
    _need_flower()
    from fedgg.flower.local.setup import Listening
    from fedgg.lab.config import load_experiment
    from fedgg.lab.federated_data import with_given_clients

    options.trust_all(trust)
    listening = Listening(host, not no_tls, not (no_authentication or no_tls), insecure_beyond_loopback, shared_network)
    changed = options.changes(clients=clients, rounds=rounds, settings=settings)
    chosen = with_given_clients(load_experiment(experiment).changed(changed), data_folder=data_folder)
    limits = {"deadline": deadline, "min_clients": min_clients}
    run_settings = {key: value for key, value in limits.items() if value is not None}
    run_up(chosen, out or Path("runs") / f"{folder_name(chosen)}-flower", data_folder, listening, run_settings, track)


def resume_up(experiment: Experiment, folder: Path, data_folder: Path | None, track: list[str] | None) -> None:
    """Resume a run of `fedgg flower up`."""
    _need_flower()
    from fedgg.flower.local.setup import Listening

    run_up(experiment, folder, data_folder, Listening(), {}, track)


class UpProgress(RunProgress):
    """The progress bar of a federation, which names each dropped client once."""

    def __init__(self, bar: Progress, rounds: int):
        from fedgg.lab.round_record import NamedOnce

        super().__init__(bar, rounds)
        self.named = NamedOnce()

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        super().on_round(run, record)
        for sentence in self.named.sentences(record["round"], record["lost"]):
            note(sentence)


def run_up(
    experiment: Experiment,
    folder: Path,
    data_folder: Path | None,
    listening: Listening,
    settings: dict[str, int | float],
    track: list[str] | None,
) -> None:
    from fedgg.flower.local.federation import up as run_federation
    from fedgg.lab.name_resolution import check_code
    from fedgg.lab.store import Store

    check_code(experiment)
    with progress() as bar:
        observer = UpProgress(bar, experiment.rounds)
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            signal.signal(number, signal.default_int_handler)  # each stops the federation in order
        try:
            with tracked(observer, track, folder) as watched:
                summary = run_federation(
                    experiment,
                    folder,
                    listening=listening,
                    settings=settings,
                    data_folder=data_folder,
                    observer=watched,
                )
        except KeyboardInterrupt:
            bar.stop()
            started = Store(folder).holds_a_run()
            command = f"fedgg resume {shlex.quote(str(folder))}" if started else "the same command"
            note(f"stopped; all processes have ended; resume with: {command}")
            raise typer.Exit(130) from None
    for sentence in observer.dropped.totals():
        note(sentence)
    show_summary(summary, folder)


def _need_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise UserError(without_flower())
