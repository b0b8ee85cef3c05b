"""`fedgg bench`: how fast the engines are, beside plain loops and other frameworks."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedgg.cli import options
from fedgg.cli.terminal import Heartbeat, note, print_table, progress, say

if TYPE_CHECKING:
    from fedgg.bench.contenders import Contender

FOR_EACH = 1_500_000_000  # bytes that a contender on the full workload may hold while it is idle

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    repeat: Annotated[int, typer.Option(help="Timed rounds of each contender, after one to warm up.", min=2)] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this contender or family, for instance pfl; may be repeated.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Without this contender or family; may be repeated.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="On cuda: fedgg and the plain loops only.")] = "cpu",
    data: Annotated[
        Literal["auto", "cifar10", "stand-in"],
        typer.Option(help="auto: CIFAR-10 if it is on this machine, else generated images of its shape."),
    ] = "auto",
    data_folder: options.DataFolderOption = None,
    model: Annotated[
        Literal["cnn", "resnet20"], typer.Option(help="The paper's CNN, or ResNet-20 on a fifth of the images.")
    ] = "cnn",
    quick: Annotated[bool, typer.Option("--quick", help="A twentieth of the images, to test the setup.")] = False,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("runs/bench"),
) -> None:
    """Measure a round of federated training: fedgg's engines, plain loops and other frameworks, in turns.

    All contenders train the same model from the same weights on the same clients; one runs at a time.
    It writes a table, bench.json, and a chart as PNG and SVG. Measure on an otherwise idle machine.

    Examples:

    - `fedgg bench --quick`
    - `fedgg bench --repeat 5 --out runs/bench`
    - `fedgg bench --only fedgg --only tight-2`
    - `fedgg bench --model resnet20 --only fedgg-workers --only pfl`
    - `fedgg bench --device cuda --skip plain-2`
    - `fedgg bench setup` installs the other frameworks, each in its own environment
    """
    if context.invoked_subcommand is not None:
        return
    from fedgg.bench.contenders import all_contenders, chosen
    from fedgg.bench.driver import BenchDriver, BenchOptions

    contenders = chosen(all_contenders(), device, only or (), skip or ())
    _warn(contenders, quick)
    names = [contender.label for contender in contenders if not contender.absent]
    with progress() as bar:
        beat = Heartbeat()
        task = bar.add_task("starting", total=len(names) * (1 + repeat), news="", within="")

        def report(event: str, contender: Contender, message: str) -> None:
            if event == "failed":
                note(f"{contender.label} failed: {message}")
            elif event == "absent":
                note(f"{contender.label} is not available: {message}")
            else:
                beat(f"{contender.label}: {message or event}")
                bar.update(task, description=message or event, news=contender.label, advance=int(event == "round"))

        driver = BenchDriver(contenders, BenchOptions(repeat, device, data, data_folder, quick, model), out, report)
        # A shell starts background jobs with SIGINT ignored, and `kill` sends SIGTERM: both stop the bench in order.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        try:
            driver.run()
        except KeyboardInterrupt:
            bar.stop()
            note("stopped; all processes have ended")
            if driver.record_file.exists():
                _show(driver.record_file)
            raise typer.Exit(130) from None
    _show(driver.record_file)


@app.command()
def setup(
    names: Annotated[list[str] | None, typer.Argument(help="Frameworks by name; by default all.")] = None,
    python: Annotated[
        str | None, typer.Option(help="Python for the environments; by default the one that runs fedgg.")
    ] = None,
) -> None:
    """Install the frameworks that are measured beside fedgg, each in its own environment under `.bench`.

    They get the torch version that fedgg uses. For torch without CUDA, set
    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu first.

    Examples:

    - `fedgg bench setup`
    - `fedgg bench setup pfl flower --python python3.12`
    """
    from fedgg.bench.contenders import chosen_peers, install

    for peer in chosen_peers(names or []):
        install(peer, say, python or sys.executable)


def _warn(contenders: list[Contender], quick: bool) -> None:
    from fedgg.bench.contenders import peers_folder
    from fedgg.bench.results import free_memory

    if peers_folder() is None:
        note("only fedgg's engines and the plain loops are measured: the other scripts are in fedgg's repository")
    present = sum(not contender.absent for contender in contenders)
    if not quick and present * FOR_EACH > free_memory():
        note(
            f"{present} contenders side by side may need {present * FOR_EACH / 1e9:.0f} GB of memory and "
            f"{free_memory() / 1e9:.0f} GB are free: if it swaps, take fewer with --only"
        )


def _show(file: Path) -> None:
    from fedgg.bench.results import bench_figure, bench_table, read_bench
    from fedgg.files import write_output
    from fedgg.report.figure_style import save
    from fedgg.report.tables import as_markdown

    record = read_bench(file)
    table = bench_table(record)
    print_table(table)
    write_output(file.with_suffix(".md"), as_markdown(table))
    if record.measured:
        for kind in (".png", ".svg"):
            save(bench_figure(record), file.with_suffix(kind))
        say(f"chart: {file.with_suffix('.png')} and .svg")
    say(f"record: {file}")
    if any(contender.flag for contender in record.measured) or any(
        e["status"] == "failed" for e in record.not_measured
    ):
        raise typer.Exit(1)
