"""`fedgg data fetch | check | show`: the data sets on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from fedgg.cli import choices
from fedgg.cli.screen import Words, errors, say

app = typer.Typer(
    help="Fetch, check and look at data sets.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
NameArgument = Annotated[str, typer.Argument(help="digits, cifar10, cifar100, svhn or npz:FILE.")]


@app.command()
def fetch(
    name: NameArgument,
    data_folder: choices.DataFolderOption = None,
    mirror: Annotated[str | None, typer.Option(help="An address that holds the publisher's files.")] = None,
) -> None:
    """Download a data set from its publisher; checked by checksum, and resumed if it was interrupted.

    Examples:

    - `fedgg data fetch cifar10`
    - `fedgg data fetch svhn --data-folder /big/disk`
    """
    from fedgg.data.cache import data_folder as folder_of
    from fedgg.data.fetch import fetch as fetch_files

    folder = folder_of(data_folder)
    columns = (
        Words("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, disable=not errors.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def progress(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done, total=total)

        try:
            files = fetch_files(name, folder, progress, mirror)
        except KeyboardInterrupt:
            bar.stop()
            say("stopped; call again to resume")
            raise typer.Exit(130) from None
    for file in files:
        say(f"{file}: there, checksum right")


@app.command()
def check(
    name: NameArgument,
    data_folder: choices.DataFolderOption = None,
    strict: Annotated[bool, typer.Option(help="Accept the publisher's own bytes only.")] = False,
) -> None:
    """Verify what is on this machine: checksums, and the content read to the end.

    Example: `fedgg data check cifar10`
    """
    from fedgg.data.cache import data_folder as folder_of
    from fedgg.data.verify import check as check_files
    from fedgg.errors import UserError

    findings = check_files(name, folder_of(data_folder), strict)
    for finding in findings:
        if finding.ok:
            say(f"{finding.file}: {finding.what}")
    if bad := [finding for finding in findings if not finding.ok]:
        raise UserError("; ".join(f"{finding.file}: {finding.what}" for finding in bad))


@app.command()
def show(
    name: NameArgument,
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 10,
    scheme: Annotated[
        str, typer.Option(help="dirichlet, dirichlet_unbalanced, dirichlet_client, iid, shards, given.")
    ] = "dirichlet",
    beta: Annotated[float, typer.Option(help="Dirichlet concentration.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    min_examples: Annotated[int, typer.Option(help="The smallest client holds at least this many.")] = 10,
    data_folder: choices.DataFolderOption = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("runs/data"),
) -> None:
    """Draw samples of a data set and how it splits over clients (the paper's Fig. 1).

    Examples:

    - `fedgg data show digits --beta 0.1`
    - `fedgg data show cifar10 --clients 20 --scheme dirichlet_client`
    """
    from fedgg.data.sources import load
    from fedgg.lab.build import split_of
    from fedgg.lab.config import Experiment
    from fedgg.lab.files import writing_to
    from fedgg.report.figures import samples_figure, save, split_figure

    dataset = load(name, data_folder)
    labels = dataset.y_train.numpy()
    if scheme == "given" and dataset.owners is not None:
        clients = int(dataset.owners.max()) + 1
    drawn = {"scheme": scheme, "clients": clients, "beta": beta, "min_examples": min_examples}
    split = split_of(Experiment(seed=seed, split=drawn), dataset)
    counts = split.counts(labels, len(dataset.classes))
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        picture = out / f"{dataset.name}-split.png"
        how = f", beta {beta}, seed {seed}" if scheme.startswith("dirichlet") else f", seed {seed}"
        how = "" if scheme == "given" else how
        save(split_figure(counts, dataset.classes, f"{dataset.name}: {scheme}{how}"), picture)
        say(f"split over {clients} clients, {min(split.sizes)} to {max(split.sizes)} examples each: {picture}")
        if len(dataset.shape) == 3:
            picture = out / f"{dataset.name}-samples.png"
            save(
                samples_figure(dataset.x_train.numpy(), labels, dataset.classes, f"{dataset.name}, training set"),
                picture,
            )
            say(f"samples: {picture}")
