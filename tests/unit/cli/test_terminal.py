"""Texts from elsewhere on a terminal: shown as they are, obeyed never; every output and encoding ends in one line."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from fedgg.cli import terminal
from fedgg.cli.terminal import Screen, printable
from fedgg.report.tables import Table

COMMAND = str(Path(sys.executable).with_name("fedgg"))
ODD = ("[/x]", "[bold]a[/bold]", "[link=http://evil]x", "\\[", "{task}", ":smile:", "%s")
OBEYED = ("\x1b[31mRED\x1b[2J", "a\x1b]0;title\x07b", "\x9b31m", "a\rb", "\u202e evil", "\ud800", "\x00")


@pytest.fixture
def terminal_output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Both outputs as one terminal of 80 columns without colours, so that every escape sequence in it is foreign."""
    shown = io.StringIO()
    for name, stderr in (("console", False), ("errors", True)):
        monkeypatch.setattr(
            terminal, name, Screen(stderr=stderr, file=shown, force_terminal=True, color_system=None, width=80)
        )
    return shown


@pytest.mark.parametrize("text", ODD)
def test_markup_is_text(text: str, terminal_output: io.StringIO) -> None:
    terminal.say(text)
    terminal.note(text)
    terminal.complain(text)
    terminal.print_table(Table(text, (text, "b"), ((text, text),), (text,)))
    assert terminal_output.getvalue().count(text) == 8


@pytest.mark.parametrize("text", OBEYED)
def test_nothing_is_obeyed(text: str, terminal_output: io.StringIO) -> None:
    terminal.say(text)
    terminal.note(text)
    terminal.complain(text)
    terminal.print_table(Table(text, (text, "b"), ((text, text),), (text,)))
    assert not set(terminal_output.getvalue()) & set("\x00\x07\x1b\x9b\r\u202e\ud800")
    terminal_output.getvalue().encode()


@pytest.mark.parametrize("text", [*ODD, *OBEYED])
def test_progress_bars_show_them_too(text: str, terminal_output: io.StringIO) -> None:
    with terminal.progress() as bar:
        task = bar.add_task(text, total=3, news=text, within=text)
        bar.update(task, completed=1, news=f"client 1 left out ({text})", within=text)
        bar.refresh()
    assert not set(terminal_output.getvalue()) & set("\x00\x07\x9b\u202e\ud800")
    assert "\x1b[31m" not in terminal_output.getvalue()
    assert "\x1b]0" not in terminal_output.getvalue()


def test_a_line_of_a_whole_file_is_cut(terminal_output: io.StringIO) -> None:
    terminal.complain("x" * 100_000)
    assert len(terminal_output.getvalue()) < 2100


def test_what_is_left_as_it_is() -> None:
    text = "Grüße, 日本語, ±, tab\tand\nline, 🦄"
    assert printable(text) == text


def outcome(shell: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        ["bash", "-c", shell.replace("fedgg", COMMAND)],
        capture_output=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("shell", "code", "says"),
    [
        ("fedgg --version >&-", 2, "standard output cannot be written: it is closed"),
        ("fedgg --version >/dev/full", 2, "standard output cannot be written: No space left"),
        ("fedgg run --help >/dev/full", 2, "standard output cannot be written: No space left"),
        ("fedgg --version 2>&-", 0, ""),
        ("fedgg --version 2>/dev/full", 0, ""),
        ("fedgg --version <&-", 0, ""),
        ("fedgg run --help | true; exit ${PIPESTATUS[0]}", 1, ""),
    ],
)
def test_outputs_that_take_nothing(shell: str, code: int, says: str) -> None:
    found, _, errors = outcome(shell)
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert (found, len(errors.splitlines())) == (code, bool(says)), errors
    assert says in errors


def test_closed_outputs_become_no_file(tmp_path: Path) -> None:
    """The first file that is opened after standard output was closed would get its number, and what is printed."""
    code = """
import os
from fedgg.cli.terminal import prepare_output
prepare_output()
print(os.open("/", os.O_RDONLY))
"""
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "$CODE" <&- 2>&- | cat'],
        env={**os.environ, "CODE": code},
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) > 2


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=str,
)
def test_encodings_without_our_signs(environment: dict[str, str]) -> None:
    code = r"""
from fedgg.cli.terminal import *
prepare_output()
say("\u00b11.0 \u2191 \u03b2 \u65e5 \udcff")
print_table(Table("a \u00b1 b", ("\u00b1", "c"), (("\u00b1", "d"),)))
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    first = done.stdout.decode("latin-1").splitlines()[0]
    assert first == ("±" if "latin" in str(environment) else "+-") + "1.0 ^ beta ? ?"


@pytest.mark.slow
@pytest.mark.parametrize("label", [*ODD, *OBEYED[:2], "日本語" * 10, "a\nb", "-rf", ".", "x" * 300])
def test_labels_on_a_real_terminal(label: str, tmp_path: Path) -> None:
    words = ["--rounds", "2", "--set", "local.epochs=1", "--clients", "3", "--model", "linear", "--seeds", "0"]
    code, shown = on_a_terminal([COMMAND, "compare", "--algorithm", f"{label}@fedavg", *words, "--out", str(tmp_path)])
    assert "Traceback" not in shown
    assert code == 0, shown
    assert "\x1b[31mRED" not in shown
    assert "\x1b]0" not in shown


def on_a_terminal(command: list[str], patience: float = 120.0) -> tuple[int, str]:
    child, terminal = pty.fork()
    if child == 0:
        try:
            os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color"})
        finally:
            os._exit(127)  # where there is no such command, this copy of the tests must not go on
    shown, end = b"", time.monotonic() + patience
    while time.monotonic() < end:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                more = os.read(terminal, 65536)
            except OSError:  # it has ended
                break
            if not more:
                break
            shown += more
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode("utf-8", "replace")


def test_columns_without_room_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = ("algorithm", *(f"measure-{number}" for number in range(8)))
    table = Table("title", columns, (("FedAvg", *("123456789.25" for _ in columns[1:])),))
    for is_terminal, width in ((True, 60), (True, 200), (False, 60)):
        output = io.StringIO()
        narrow = Console(file=output, width=width, force_terminal=is_terminal, color_system=None)
        monkeypatch.setattr(terminal, "console", narrow)
        terminal.print_table(table)
        lines = output.getvalue()
        shown = [name for name in columns if name in lines.partition("Not shown")[0]]
        assert lines.count("123456789.25") == len(shown) - 1
        assert shown == list(columns[: 4 if (is_terminal, width) == (True, 60) else None])
        left_out = "Not shown in a terminal of 60 columns: measure-3, measure-4" in " ".join(lines.split())
        assert left_out == (len(shown) < len(columns))
