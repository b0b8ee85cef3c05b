"""The command line, called within this process (starting one costs seconds, because of torch) or as a process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer uses names that click is about to drop
    import fedgg.cli
    from fedgg.cli import terminal

COMMAND = str(Path(sys.executable).with_name("fedgg"))


def call(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """`fedgg WORDS` in this process."""
    out, errors = StringIO(), StringIO()
    monkeypatch.setattr(sys, "argv", ["fedgg", *words])
    monkeypatch.setattr(terminal.console, "_file", out)  # `file` would leave it bound to today's standard output
    monkeypatch.setattr(terminal.errors, "_file", errors)
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            fedgg.cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), errors.getvalue()


def process(words: list[str], limit: int | None = None, **environment: str) -> tuple[int, str, str]:
    def small_files() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        [COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=small_files,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr
