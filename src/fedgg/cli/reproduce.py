"""`fedgg reproduce`: the paper's tables and figures, reproduced and shown beside the printed values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgg.cli import options
from fedgg.cli.progress import processes_for, show_progress
from fedgg.cli.report import BESIDE_PAPER, write_report
from fedgg.cli.terminal import note, print_table, say
from fedgg.errors import UserError
from fedgg.files import PAGE
from fedgg.runfolder.locks import writing_pages

if TYPE_CHECKING:
    from fedgg.cluster.runners import Runner
    from fedgg.lab.run_places import Shard
    from fedgg.paper.find_or_run import Results
    from fedgg.paper.output import ItemOutput
    from fedgg.paper.plan import ReproductionPlan


def reproduce(
    items: Annotated[
        list[str] | None,
        typer.Argument(
            help="table1 to table4, fig1 to fig3, or all; readings, inner, scaffold, scaffold-small, comparison, "
            "push, push-svhn, push-cifar100, pushes, or ours for these; literature-cifar10, literature-cifar100, "
            "literature-cpu, literature-cpu-cifar100, niid-bench, or literature for these."
        ),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the items, their runs, and how long missing runs take here.")
    ] = False,
    datasets: Annotated[str | None, typer.Option(help="svhn, cifar10, cifar100; several with commas.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Run these algorithms only: FedAvg,FedGG. Of one with several rows all are run."),
    ] = None,
    splits: Annotated[
        str | None, typer.Option(help="Run on these splits only: 0.6 (beta), iid, 2 labels; several with commas.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="How many (3 is 0, 1, 2), or which: 0,1 or 0-4.")] = None,
    reading: Annotated[
        list[str] | None,
        typer.Option(help="A reading of FedGG by name (default: text); repeat it for a row each. See `--list`."),
    ] = None,
    accuracy: Annotated[
        str, typer.Option(help="highest (over all rounds, as in the paper) or final.", metavar="highest|final")
    ] = "highest",
    rounds: Annotated[int | None, typer.Option(help="Rounds instead of the paper's 100.", min=1)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version on the embedded digits: no download, no GPU.")
    ] = False,
    device: options.DevicesOption = None,
    settings: options.SetOption = None,
    jobs: options.JobsOption = None,
    on: options.OnOption = None,
    resources: options.ResourcesOption = None,
    shard: options.ShardOption = None,
    data_folder: options.DataFolderOption = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Run nothing: show the runs in archives that --fold wrote.")
    ] = None,
    fold: Annotated[
        Path | None, typer.Option(help="Also write all runs shown to an archive (JSON).", metavar="FILE.json")
    ] = None,
    out: options.OutOption = None,
) -> None:
    """Reproduce the paper's tables and figures, and show them beside the printed values.

    Finished runs are kept, interrupted ones are resumed, and runs that several items need are run once. Tables, figures
    and one page, `paper.html` (or `table1.html` and so on for a part), are written to the output folder.

    Examples:

    - `fedgg reproduce --list`
    - `fedgg reproduce all --quick`
    - `fedgg reproduce table2 --datasets cifar10 --seeds 3 --device cuda --set engine.precision=bf16`
    - `fedgg reproduce table1 table3 fig2 --reading text --reading epsilon --out runs/paper`
    - `fedgg reproduce table2 --device cuda --on ray:auto --out runs/paper`
    - `fedgg reproduce all --from results/paper --out runs/shown`
    - `fedgg reproduce literature-cifar10 --device cuda --out runs/literature`
    - `fedgg reproduce literature-cifar10 --methods FedAvg,FedGG --splits 0.6 --seeds 1 --device cuda`
    - `fedgg reproduce literature-cpu --set engine.name=fused`
    """
    from fedgg.cluster.connect import is_ray
    from fedgg.cluster.runners import runner_of
    from fedgg.paper.find_or_run import items_table, readings_table
    from fedgg.paper.items import QUICK, chosen_datasets, chosen_items
    from fedgg.paper.plan import ReproductionPlan

    if accuracy not in ("highest", "final"):
        raise UserError(f"--accuracy {accuracy!r}: choose highest or final")
    if quick and datasets:
        raise UserError("--quick is on the embedded digits: omit --datasets")
    if not items and not show_list:
        if not quick:
            raise UserError(
                "name what to reproduce: table1 to table4, fig1 to fig3, all, ours or literature; --list describes each"
            )
        items = ["all"]
    device, on = options.device_and_on(device, on)
    plan = ReproductionPlan(
        items=chosen_items(items or ["all", "ours", "literature"]),
        datasets=(QUICK,) if quick else chosen_datasets(datasets),
        seeds=options.seeds_or_count(seeds) if seeds else ((0, 1) if quick else (0, 1, 2)),
        readings=tuple(dict.fromkeys(reading or ["text"])),
        quick=quick,
        changes=options.changes(rounds=rounds, device=device, settings=settings),
        methods=tuple(name.strip() for name in methods.split(",")) if methods else (),
        splits=tuple(name.strip() for name in splits.split(",")) if splits else (),
    )
    folder = out or Path("runs") / ("paper-shown" if source else "paper-quick" if quick else "paper")
    processes = jobs or processes_for(plan.base(plan.datasets[0]).engine.device)
    if show_list:
        print_table(items_table(plan, folder, processes), numbers=False)
        print_table(readings_table(), numbers=False)
        return
    runner = runner_of(on, folder, processes=jobs, default_processes=processes, resources=resources)
    on_ray = on is not None and is_ray(on)
    _reproduce(plan, folder, runner, on_ray, options.shard_of_call(shard, on), accuracy, data_folder, source, fold)


def _reproduce(
    plan: ReproductionPlan,
    folder: Path,
    runner: Runner,
    on_ray: bool,
    shard: Shard | None,
    accuracy: str,
    data_folder: Path | None,
    source: Path | None,
    fold: Path | None,
) -> None:
    from fedgg.paper.find_or_run import ArchivedRuns, RunFolders, all_records
    from fedgg.paper.output import make_items, page_name, write_items
    from fedgg.runfolder.archive_file import write_archive

    for item in plan.items:
        if not plan.datasets_of(item):
            note(f"{item.name} is skipped: in the paper it is on {', '.join(item.datasets)}")
    plan = _without_empty(plan)
    results: Results
    if source is None:
        _run(plan, folder, runner, on_ray, shard, data_folder)
        results = RunFolders(folder)
    else:
        results = ArchivedRuns(source, plan.changes.get("engine.precision"))
        if plan.runs() and not any(results.record(method, seed) for method, seed in plan.runs()):
            note(f"{source} has none of the requested runs; it has {results.content()}")
    with writing_pages(folder, note):
        outputs = make_items(
            plan, results, "final" if accuracy == "final" else "highest", data_folder, run=source is None
        )
        files = write_items(plan, outputs, folder)
        _show(outputs)
        page = folder / page_name(plan)
        what = "page" if all(item.literature for item in plan.items) else "beside the paper"
        say(f"{what}: {page}.html; tables: {page}.md; {len(files)} files in {folder}")
        _report(plan, source or folder, folder, page.name)
    if fold is not None:
        records = all_records(plan, results)
        for record in records:
            if record.damaged:
                note(f"{record.path} is damaged and not archived: {record.faults[0].why}")
        count = write_archive(records, fold)
        say(f"{count} runs archived in {fold}")


def _report(plan: ReproductionPlan, runs: Path, folder: Path, page: str) -> None:
    """The report of all runs there, grouped by data set and split, with a link to the page beside the paper."""
    if plan.runs():
        places = sorted(runs.glob("*.json")) if runs.is_dir() and runs != folder else [runs]
        write_report(places, folder / PAGE, beside={f"{page}.html": BESIDE_PAPER})


def _without_empty(plan: ReproductionPlan) -> ReproductionPlan:
    items = tuple(item for item in plan.items if plan.datasets_of(item))
    if not items:
        raise UserError("none of the items is on these data sets: name one that an item has, or omit --datasets")
    return replace(plan, items=items)


def _run(
    plan: ReproductionPlan, folder: Path, runner: Runner, on_ray: bool, shard: Shard | None, data_folder: Path | None
) -> None:
    from fedgg.paper.find_or_run import missing_jobs, run_missing

    missing = missing_jobs(plan, folder, data_folder, shard)
    runs = len(plan.runs_to_make(shard=shard))
    names = ", ".join(item.name for item in plan.items)
    part = f"shard {shard} of " if shard else ""
    if runs:
        say(f"{part}{names}: {runs} runs of {plan.rounds()} rounds, {runs - len(missing)} of them finished in {folder}")
    if missing:
        rounds = sum(job.experiment.rounds for job in missing)
        show_progress(len(missing), rounds, lambda observer: run_missing(missing, runner, observer, on_ray=on_ray))


def _show(outputs: list[ItemOutput]) -> None:
    for output in outputs:
        if output.table is not None and not output.runs and len(outputs) > 1:
            note(f"{output.item.name}: none of its runs is there; its table is on the page")
        elif output.table is not None:
            print_table(output.table, names=2)
        elif output.figure is None:
            note(f"{output.item.name} is not drawn: it has no finished runs")
        else:
            if output.figure.summary is not None:
                print_table(replace(output.figure.summary, notes=output.figure.notes))
            say(f"{output.item.title}: {output.item.name}.png")
