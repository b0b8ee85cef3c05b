"""`fedgg data fetch | check | show`: the data sets on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from fedgg.cli import options
from fedgg.cli.terminal import Words, errors, say
from fedgg.data import DATASETS, NOT_CACHED, SPLITS, TEXTS, registered_name
from fedgg.errors import UserError

app = typer.Typer(
    help="Download, check and show data sets.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
MAX_NAMES = 30  # clients in a line
NameArgument = Annotated[str, typer.Argument(help=f"{', '.join(DATASETS)}.")]


@app.command()
def fetch(
    name: NameArgument,
    data_folder: options.DataFolderOption = None,
    mirror: Annotated[str | None, typer.Option(help="An address that holds the publisher's files.")] = None,
) -> None:
    """Download a data set from its publisher; verified by checksum, and resumed after an interruption.

    Examples:

    - `fedgg data fetch cifar10`
    - `fedgg data fetch svhn --data-folder /big/disk`
    """
    from fedgg.data.catalog import data_folder as folder_of
    from fedgg.data.dataset_cache import describe_cache
    from fedgg.data.download import fetch as fetch_files

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
        say(f"{file}: downloaded, checksum verified")
    say(describe_cache())


@app.command()
def check(
    name: NameArgument,
    data_folder: options.DataFolderOption = None,
    strict: Annotated[bool, typer.Option(help="Accept only the publisher's files, byte for byte.")] = False,
) -> None:
    """Verify the files on this machine: checksums, and the whole content.

    Example: `fedgg data check cifar10`
    """
    from fedgg.data.catalog import data_folder as folder_of
    from fedgg.data.dataset_cache import describe_cache
    from fedgg.data.download import check as check_files

    findings = check_files(name, folder_of(data_folder), strict)
    for finding in findings:
        if finding.ok:
            say(f"{finding.file}: {finding.what}")
    if bad := [finding for finding in findings if not finding.ok]:
        raise UserError("; ".join(f"{finding.file}: {finding.what}" for finding in bad))
    if registered_name(name) not in NOT_CACHED:
        say(describe_cache())


@app.command()
def show(
    name: Annotated[str, typer.Argument(help=f"{DATASETS.choices()}.")],
    clients: options.ClientsOption = None,
    scheme: Annotated[str | None, typer.Option(help=f"{SPLITS.choices()}.")] = None,
    beta: options.BetaOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the split.")] = None,
    min_examples: Annotated[int | None, typer.Option(help="The smallest client holds at least this many.")] = None,
    settings: options.SetOption = None,
    data_folder: options.DataFolderOption = None,
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("runs/data"),
) -> None:
    """Draw samples of a data set and its split over clients (the paper's Fig. 1), the same that `fedgg run` uses.

    Figures have the name of the data set and, of the split, of its settings that are not the defaults.

    Examples:

    - `fedgg data show digits --beta 0.1`
    - `fedgg data show cifar10 --clients 20 --scheme dirichlet_client`
    - `fedgg data show digits --set split.scheme=k_labels --set split.labels_per_client=3`
    - `fedgg data show digits --scheme iid --set split.feature_rotation=90`
    """
    import numpy as np

    from fedgg.files import file_name, writing_to
    from fedgg.lab.config import Experiment
    from fedgg.lab.federated_data import WholeData, data_of, holdings, split_of, with_given_clients
    from fedgg.lab.personal_parts import unseen_clients
    from fedgg.report.data_figures import samples_figure, split_figure
    from fedgg.report.figure_style import save
    from fedgg.runfolder.record_types import split_words

    short = {"split.scheme": scheme, "seed": seed, "split.min_examples": min_examples}
    short["task.name"] = "next_token" if name in TEXTS else None
    experiment = Experiment().changed(
        options.changes(data=name, clients=clients, beta=beta, settings=settings, also=short)
    )
    dataset = data_of(experiment, None, data_folder)
    experiment = with_given_clients(experiment, dataset)
    split, chosen = split_of(experiment, dataset), experiment.split
    labels, names = dataset.labels.numpy(), WholeData(dataset, split).client_names
    counts = split.counts(labels, len(dataset.label_names))
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        is_drawn = chosen.scheme != "given" or chosen.settings.get("choose") == "random"
        seed_text = f", seed {experiment.seed}" if is_drawn else ""
        changed = chosen.model_dump(exclude={"scheme"}, exclude_defaults=True) | {"seed": experiment.seed}
        words = [f"{key}={value}" for key, value in experiment.data.settings.items()]
        data_name = "-".join([dataset.name, *map(file_name, words)])
        split_name = "-".join(map(file_name, [chosen.scheme, *(f"{key}={value}" for key, value in changed.items())]))
        picture = out / f"{data_name}-split-{split_name}.png"
        title = f"{dataset.name}: {split_words(chosen.model_dump())}{seed_text}"
        unseen = unseen_clients(experiment, holdings(experiment, split))
        save(split_figure(counts, dataset.label_names, title, names, unseen), picture)
        say(f"split over {chosen.clients} clients, {min(split.sizes)} to {max(split.sizes)} examples each: {picture}")
        if unseen:
            say(f"clients that never train: {', '.join(names[client] if names else str(client) for client in unseen)}")
        times = np.bincount(np.concatenate(split.indices), minlength=len(labels))
        if unused := int((times == 0).sum()):
            say(f"{unused} of {len(labels)} training examples are held by no client")
        if several := int((times > 1).sum()):
            say(f"{several} of {len(labels)} training examples are held more than once, at most {times.max()} times")
        if names is not None:
            sizes = [f"{client} {size}" for client, size in zip(names, split.sizes, strict=True)]
            say(f"{', '.join(sizes[:MAX_NAMES])}{' ...' if len(sizes) > MAX_NAMES else ''}")
        if len(dataset.shape) == 3:
            picture, title_of_samples = out / f"{data_name}-samples.png", f"{dataset.name}, training set"
            save(samples_figure(dataset.x_train.numpy(), labels, dataset.label_names, title_of_samples), picture)
            say(f"samples: {picture}")
        if chosen.feature_noise or chosen.feature_rotation:
            inputs = holdings(experiment, split).skewed_inputs(experiment, dataset).x_train.numpy()
            if len(dataset.shape) == 3:
                picture, title = out / f"{data_name}-clients-{split_name}.png", f"{title}, inputs of the clients"
                client_of = np.repeat(np.arange(chosen.clients), split.sizes)
                rows = [f"client {client}" for client in names or range(chosen.clients)]
                held = inputs[np.concatenate(split.indices)]
                save(samples_figure(held, client_of, rows, title, kind="clients"), picture)
                say(f"inputs of the clients: {picture}")
