"""The command line. Nobody imports it; rich and typer live here only, and torch is loaded when a command needs it."""

from __future__ import annotations

import os
import signal
import sys

import click
import typer

from fedgg import check_numpy
from fedgg.cli import bench, data, flower, listing, report, reproduce, run, study
from fedgg.cli.screen import complain, confirm
from fedgg.errors import UserError
from fedgg.lab.trust import ask_with
from fedgg.version import VERSION

app = typer.Typer(
    name="fedgg",
    help="Federated learning on non-IID data: FedGG and the algorithms around it.",
    epilog="New here? `fedgg compare` shows the algorithms side by side in under a minute.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("resume")(run.resume)
app.command("compare")(study.compare)
app.command("sweep")(study.sweep)
app.command("reproduce")(reproduce.reproduce)
app.command("report")(report.report)
app.command("watch")(report.watch)
app.command("list")(listing.list_parts)
app.command("check")(listing.check)
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")
app.add_typer(flower.app, name="flower")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedgg {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Federated learning on non-IID data: FedGG and the algorithms around it."""
    ask_with(confirm if sys.stdin.isatty() and sys.stderr.isatty() else None)


def main() -> None:
    """Exit codes: 0 done, 1 a check failed or a run diverged, 2 a mistake of the user's, 130 stopped by Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` and `timeout` stop as orderly as Ctrl-C does
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # processes we start import nothing from the folder we were called in
    try:
        check_numpy()
        code = app(standalone_mode=False)
    except UserError as error:
        complain(str(error))
        sys.exit(2)
    except click.exceptions.NoArgsIsHelpError as help_wanted:
        help_wanted.show()
        sys.exit(2)
    except click.ClickException as error:
        complain(error.format_message())
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
