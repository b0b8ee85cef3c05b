"""`fedgg report` and `fedgg watch`: runs as a page, figures, tables and TensorBoard events."""

from __future__ import annotations

import threading
import webbrowser
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from fedgg.cli import options
from fedgg.cli.terminal import Heartbeat, counted, note, progress, say
from fedgg.errors import UserError
from fedgg.files import PAGE
from fedgg.runfolder.locks import writing_pages

PAPER = "paper.html"
BESIDE_PAPER = "The paper's tables and figures next to ours"
Folders = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Folders of runs, comparisons, sweeps or reproductions, or archives of runs.", metavar="RUN..."
    ),
]


def report(
    runs: Folders = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The page to write; by default report.html in the folder, if only one is given."
        ),
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder to also write figures to, as PNG and SVG.")] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Folder to also write tables to, as Markdown, LaTeX and CSV.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder to also write TensorBoard event files to.")] = None,
    metric: options.MetricOption = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write one HTML page about runs: the result, curves, tables, clients, diagnostics, and how to reproduce them.

    The page is a single file that works without a network. Folders that cannot be read are listed on it; the rest is
    shown.

    Examples:

    - `fedgg report runs/demo`
    - `fedgg report runs/a runs/b -o both.html --open`
    - `fedgg report runs/paper --figures figures --tables tables`
    - `fedgg report runs/demo --tensorboard events`
    - `fedgg report runs/demo --metric holdout_accuracy_worst_client`
    """
    folders = _at_least_one(runs, "fedgg report runs/demo")
    for path in folders:
        if not path.exists():
            raise UserError(f"{path} does not exist: name a folder that `fedgg run`, compare, sweep or reproduce wrote")
    for option, folder in (("figures", figures), ("tables", tables), ("tensorboard", tensorboard)):
        if folder is not None and str(folder).startswith("-"):
            raise UserError(f"--{option} needs a folder to write to, got {str(folder)!r}: --{option} {option}")
    file = out or (folders[0] / PAGE if len(folders) == 1 and folders[0].is_dir() else Path(PAGE))
    if tensorboard is not None:
        from fedgg.report.export import check_tensorboard

        check_tensorboard(tensorboard)
    with writing_pages(file.parent, note) if out is None else nullcontext():
        page = write_report(folders, file, figures, tables, tensorboard, metric=metric)
    if open_it:
        open_in_browser(page.resolve().as_uri())


def watch(
    runs: Folders = None,
    metric: options.MetricOption = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 chooses a free one.", min=0, max=65535)] = 0,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve the same page live while runs are in progress; Ctrl-C stops it without affecting the runs.

    It is reachable from this machine only. Folders may appear, grow and vanish. To see it from another machine, use a
    tunnel: `ssh -L 8800:127.0.0.1:8800 MACHINE` and `--port 8800`.

    Examples:

    - `fedgg watch runs/demo --open`
    - `fedgg watch runs --port 8800`
    """
    from fedgg.report.live import LiveData, LivePage

    with LivePage(LiveData(_at_least_one(runs, "fedgg watch runs/demo"), metric=metric), port) as server:
        say(f"watching {', '.join(map(str, runs or []))} at {server.address} (Ctrl-C stops it)")
        for folder in runs or []:
            if not folder.exists():
                note(f"{folder} does not exist yet: its runs are shown when it does")
        if open_it:  # in a thread: some browsers do not return before they are closed
            threading.Thread(target=open_in_browser, args=(server.address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped watching; the runs are not affected")


def write_report(
    folders: list[Path],
    file: Path,
    figures: Path | None = None,
    tables: Path | None = None,
    tensorboard: Path | None = None,
    beside: dict[str, str] | None = None,
    metric: str | None = None,
) -> Path:
    """Write the page and the requested files, and print their paths; also the last step of compare and sweep."""
    from fedgg.report.page import write_page

    with progress() as bar:
        beat = Heartbeat(seconds=2.0)
        task = bar.add_task("reading", total=None, news="", within="")

        def show_step(step: str) -> None:
            bar.update(task, description=step)
            beat(step)

        if beside is None and (file.parent / PAPER).exists():
            beside = {PAPER: BESIDE_PAPER}
        collection = write_page(folders, file, beside, show_step, metric)
        written = [f"page: {file}"]
        if figures is not None:
            from fedgg.report.export import write_figures

            written.append(
                f"figures: {len(write_figures(collection.groups, figures, show_step, metric))} files in {figures}"
            )
        if tables is not None:
            from fedgg.report.export import write_tables

            written.append(f"tables: {len(write_tables(collection.groups, tables, metric))} files in {tables}")
        if tensorboard is not None:
            from fedgg.report.export import write_events

            count = write_events(collection.groups, tensorboard, show_step)
            written.append(f"events of {counted(count, 'run')}: tensorboard --logdir {tensorboard}")
    for problem in collection.problems:
        note(f"{problem.path} {problem.what}: {problem.why}")
    for sentence in written:
        say(sentence)
    return file


def open_in_browser(address: str) -> None:
    """Open the address; if no browser can be started, print how to open it."""
    try:
        shown = webbrowser.open(address)
    except webbrowser.Error:
        shown = False
    if not shown:
        note(f"no browser could be started: open {address} yourself, or name one in the variable BROWSER")


def _at_least_one(runs: list[Path] | None, example: str) -> list[Path]:
    if not runs:
        raise UserError(f"name at least one folder of runs, for instance: {example}")
    return runs
