"""`fedgg report` and `fedgg watch`: runs as a page, as pictures, as tables, as TensorBoard's events."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgg.cli.screen import Heartbeat, counted, note, progress, say
from fedgg.errors import UserError

if TYPE_CHECKING:
    from fedgg.report.gathering import Gathering

PAGE = "report.html"
PAPER = "paper.html"
PATIENCE = 600.0  # seconds; the page of a large study takes one minute
BESIDE_PAPER = "The paper's tables and figures beside ours"
Folders = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Folders of runs, comparisons, sweeps or reproductions, or files of folded runs.", metavar="RUN..."
    ),
]


def report(
    runs: Folders = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The page to write; by default report.html in the folder, if there is one only."
        ),
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write the figures there, as PNG and SVG.")] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Also write the tables there, as Markdown, LaTeX and CSV.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write the scalars there as TensorBoard's event files.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Make one page of runs: the answer, curves, tables, clients, and how to do it again.

    The page is one file that needs no network: send it to somebody, and it opens. What cannot be read is named on it;
    the rest stands.

    Examples:

    - `fedgg report runs/demo`
    - `fedgg report runs/a runs/b -o both.html --open`
    - `fedgg report runs/paper --figures figures --tables tables`
    - `fedgg report runs/demo --tensorboard events`
    """
    folders = _named(runs, "fedgg report runs/demo")
    for path in folders:
        if not path.exists():
            raise UserError(f"there is no {path}: name a folder that `fedgg run`, compare, sweep or reproduce wrote")
    for option, folder in (("figures", figures), ("tables", tables), ("tensorboard", tensorboard)):
        if folder is not None and str(folder).startswith("-"):
            raise UserError(f"--{option} needs a folder to write to, got {str(folder)!r}: --{option} {option}")
    file = out or (folders[0] / PAGE if len(folders) == 1 and folders[0].is_dir() else Path(PAGE))
    if tensorboard is not None:
        from fedgg.report.tensorboard import check_tensorboard

        check_tensorboard(tensorboard)
    with writing_pages(file.parent) if out is None else nullcontext():
        page = write_report(folders, file, figures, tables, tensorboard)
    if open_it:
        open_in_browser(page.resolve().as_uri())


def watch(
    runs: Folders = None,
    port: Annotated[
        int, typer.Option(help="Where to listen, on this machine only; 0 takes a free one.", min=0, max=65535)
    ] = 0,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show the same page live while runs go on; Ctrl-C ends it, and the runs do not notice.

    Only this machine can see it. Folders may appear later, grow and vanish. From another machine, a tunnel brings it
    over: `ssh -L 8800:127.0.0.1:8800 MACHINE` and `--port 8800`.

    Examples:

    - `fedgg watch runs/demo --open`
    - `fedgg watch runs --port 8800`
    """
    from fedgg.report.news import News
    from fedgg.report.server import LivePage

    with LivePage(News(_named(runs, "fedgg watch runs/demo")), port) as server:
        say(f"watching {', '.join(map(str, runs or []))} at {server.address} (Ctrl-C ends it)")
        if open_it:  # beside the server: some browsers do not come back before they are closed
            threading.Thread(target=open_in_browser, args=(server.address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped watching; the runs go on by themselves")


@contextmanager
def writing_pages(folder: Path) -> Iterator[None]:
    """One process at a time reads the runs of a folder and writes its tables and page: the last one has seen all."""
    from fedgg.lab.locks import SHORT, InUse, LockFile

    lock = LockFile(folder / "report.lock")
    with suppress(OSError):  # where nothing can be written, the page says so
        if folder.is_dir() and not lock.acquire(SHORT):
            note(f"another process is writing the tables and the page of {folder}; waiting for it")
            if not lock.acquire(PATIENCE):
                raise InUse(f"another process has held {lock.path} for {PATIENCE:.0f} s: stop it, then call this again")
    try:
        yield
    finally:
        lock.release()


def write_report(
    folders: list[Path],
    file: Path,
    figures: Path | None = None,
    tables: Path | None = None,
    tensorboard: Path | None = None,
    beside: dict[str, str] | None = None,
) -> Path:
    """Write the page and what else was asked for, and say where it lies; also the last step of compare and sweep."""
    from fedgg.report.gathering import Gathering
    from fedgg.report.report_page import report_html
    from fedgg.report.writing import write_text

    with progress() as bar:
        beat = Heartbeat(seconds=2.0)
        task = bar.add_task("reading", total=None, news="", within="")

        def doing(what: str) -> None:
            bar.update(task, description=what)
            beat(what)

        gathering = Gathering(folders)
        gathering.look()
        _complain_of_nothing(gathering)
        doing("writing the page")
        if beside is None and (file.parent / PAPER).exists():
            beside = {PAPER: BESIDE_PAPER}
        write_text(file, report_html(gathering, beside))
        written = [f"page: {file}"]
        if figures is not None:
            from fedgg.report.exported import write_figures

            written.append(f"figures: {len(write_figures(gathering.groups, figures, doing))} files in {figures}")
        if tables is not None:
            from fedgg.report.exported import write_tables

            written.append(f"tables: {len(write_tables(gathering.groups, tables))} files in {tables}")
        if tensorboard is not None:
            from fedgg.report.tensorboard import write_events

            count = write_events(gathering.groups, tensorboard, doing)
            written.append(f"events of {counted(count, 'run')}: tensorboard --logdir {tensorboard}")
    for problem in gathering.problems:
        note(f"{problem.path} {problem.what}: {problem.why}")
    for sentence in written:
        say(sentence)
    return file


def open_in_browser(address: str) -> None:
    """Show it; where no browser can be started the page is there all the same, and a line says how to get to it."""
    try:
        shown = webbrowser.open(address)
    except webbrowser.Error:
        shown = False
    if not shown:
        note(f"no browser could be started: open {address} yourself, or name one in the variable BROWSER")


def _complain_of_nothing(gathering: Gathering) -> None:
    if not any(any(group.study.runs.values()) for group in gathering.groups):
        why = "; ".join(f"{problem.path}: {problem.why}" for problem in gathering.problems)
        named = ", ".join(map(str, gathering.paths))
        raise UserError(f"there is nothing to report: {why or f'none of the runs of {named} has begun'}")


def _named(runs: list[Path] | None, example: str) -> list[Path]:
    if not runs:
        raise UserError(f"name at least one folder of runs, for instance: {example}")
    return runs
