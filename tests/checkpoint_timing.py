"""Checkpoints as if writing one took no time: every one that is due is on the disk when its round ends.

By default one is due after every round then. For tests that need the checkpoint of a certain round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedgg.lab.one_round import State
from fedgg.lab.run_session import CheckpointWriter


@contextmanager
def written_at_once() -> Iterator[None]:
    begin = CheckpointWriter.round_done

    def at_once(writer: CheckpointWriter, state: State) -> None:
        begin(writer, state)
        writer.wait()
        writer._seconds = 0.0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CheckpointWriter, "round_done", at_once)
        yield


@pytest.fixture(scope="module")
def checkpoints_at_once() -> Iterator[None]:
    with written_at_once():
        yield
