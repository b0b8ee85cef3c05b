"""One torch thread for each test process: two threads on a busy machine are many times slower.

And Ctrl-C is heard, also where the tests were started in the background by a shell that has it ignored.
"""

import importlib.util
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from fedgg.data import readers
from fedgg.lab import trusted_code as trust

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer uses names that click is about to drop
    import typer.testing  # noqa: F401
    from typer.main import get_command

pytest_plugins = ["browsing", "checkpoint_timing"]
collect_ignore_glob = (
    [] if importlib.util.find_spec("flwr") else ["unit/flower/*", "unit/flower/local/*"]
)  # an extra, part of `test`

torch.set_num_threads(1)
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither what the user of this machine trusts nor what a test does is seen by the other; processes inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("FEDGG_CACHE", "off")
        patch.delenv(trust.VARIABLE, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def digits_are_parsed_once() -> Iterator[None]:
    """Thousands of runs take them; what they get is a copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_digits_of_sklearn", cache(readers._digits_of_sklearn))
        yield


@pytest.fixture(scope="session", autouse=True)
def the_command_line_is_built_once() -> Iterator[None]:
    """Typer reads the signatures of all commands in every call of a runner, which takes longer than most commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(get_command))
        yield


@pytest.fixture(autouse=True)
def nothing_is_trusted(monkeypatch: pytest.MonkeyPatch, own_state_folder: None) -> None:
    """Every test begins as a new user's first call."""
    monkeypatch.setattr(trust, "_trusted", set())
    monkeypatch.setattr(trust, "_ask", None)
    record = trust.record_file()
    assert record is not None
    assert str(record).startswith(os.environ["XDG_STATE_HOME"])
    record.unlink(missing_ok=True)
