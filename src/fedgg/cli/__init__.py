"""The command line. Only this package uses rich and typer; torch is imported by the commands that need it."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import NoReturn

import click
import typer

from fedgg import __version__, check_numpy
from fedgg.cli import bench, check, compare_and_sweep, data, flower, listing, report, reproduce, run, tune
from fedgg.cli.terminal import OutputLost, close_output, complain, confirm, prepare_output, say
from fedgg.errors import UserError, missing_extra
from fedgg.lab.trusted_code import ask_with

app = typer.Typer(
    name="fedgg",
    help="Federated learning on non-IID data: FedGG and the algorithms around it.",
    epilog="To start: `fedgg compare` compares the algorithms on a small data set in under a minute.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("resume")(run.resume)
app.command("compare")(compare_and_sweep.compare)
app.command("sweep")(compare_and_sweep.sweep)
app.command("tune")(tune.tune)
app.command("reproduce")(reproduce.reproduce)
app.command("report")(report.report)
app.command("watch")(report.watch)
app.command("list")(listing.list_parts)
app.command("check")(check.check)
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")
app.add_typer(flower.app, name="flower")


def _version(requested: bool) -> None:
    if requested:
        say(f"fedgg {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Federated learning on non-IID data: FedGG and the algorithms around it."""
    ask_with(confirm if sys.stdin.isatty() and sys.stderr.isatty() else None)


def main() -> None:
    """Exit codes: 0 success, 1 a check failed or a run diverged, 2 a user error, 130 stopped by Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` and `timeout` have the effect of Ctrl-C
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # child processes do not import from the current folder
    try:
        prepare_output()
        check_numpy()
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except OutputLost as lost:
        _leave_without_output(lost)
    except UserError as error:
        complain(str(error))
        sys.exit(2)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        complain(error.format_message())
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC):
            _leave_without_output(OutputLost(error))  # of text that typer prints itself
        without_extra = missing_extra(error) if isinstance(error, ImportError) else None
        reason = _shortage(error) if without_extra is None else str(without_extra)
        if reason is None:
            raise
        complain(reason)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def _leave_without_output(lost: OutputLost) -> NoReturn:
    close_output()
    if not lost.quiet:
        complain(str(lost))
    sys.exit(1 if lost.quiet else 2)


def _shortage(error: Exception) -> str | None:
    """One line for a lack of memory, disk space or files, or an unusable path; None for other errors (bugs)."""
    reason = " ".join(str(error).split())
    of_a_port = isinstance(error, OSError) and error.errno == errno.EACCES and error.filename is None
    if isinstance(error, OSError) and error.errno in _SHORTAGES and not of_a_port:
        where = f"{os.fsdecode(error.filename)[:80]}: " if isinstance(error.filename, str | bytes) else ""
        return f"{where}{os.strerror(error.errno)}; {_SHORTAGES[error.errno]}"
    if isinstance(error, MemoryError) or any(words in reason for words in _NO_MEMORY):
        details = f" ({reason[:200]})" if reason else ""
        return f"not enough memory{details}: close other programs, raise the limit, or run fewer processes at once"
    return None


_SHORTAGES = {
    errno.EMFILE: "allow more open files (ulimit -n), or run fewer processes at once",
    errno.ENFILE: "this machine has too many files open: close other programs",
    errno.ENOMEM: "not enough memory: close other programs, or run fewer processes at once",
    errno.EAGAIN: "no more processes are allowed (ulimit -u): run fewer at once",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EACCES: "choose another place, or change its permissions",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
}
_NO_MEMORY = (
    "can't allocate memory",  # torch on a CPU
    "std::bad_alloc",
    "not enough memory",  # torch on Windows
    "CUDA out of memory",
    "can't start new thread",
    "failed to map segment",  # when a library is loaded
    "Cannot allocate memory",
)
