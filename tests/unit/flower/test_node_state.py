"""Client state on a node: which round starts from which state; files are complete and private."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import pytest
import torch

from fedgg.errors import UserError
from fedgg.flower.messages import MessageHeader
from fedgg.flower.node_state import NodeStateFolder, SavedClientState, StaleMessage

CPU = torch.device("cpu")


def header(round_: int, met: int = 0, settled: int = 0, attempt: int = 1) -> MessageHeader:
    return MessageHeader("run", "experiment", round_, attempt, 0, settled, met)


def state(value: float) -> SavedClientState:
    return SavedClientState({"c": torch.full((1, 3), value)}, {"n": torch.full((1,), int(value))})


def run_round(folder: NodeStateFolder, request: MessageHeader, value: float | None = None) -> float | None:
    """One round: returns the value it started from; it ends with `value`, or with its number."""
    message_id = f"{request.round}.{request.attempt}.{value}"
    start, _ = folder.begin(request, message_id, CPU)
    folder.save(request, message_id, state(request.round if value is None else value))
    return None if start is None else float(start.memory["c"][0, 0])


@pytest.fixture
def folder(tmp_path: Path) -> NodeStateFolder:
    return NodeStateFolder(tmp_path / "memory", "run")


def test_a_round_starts_from_the_one_the_server_used_last(folder: NodeStateFolder) -> None:
    assert run_round(folder, header(1)) is None
    assert run_round(folder, header(2, met=1)) == 1
    assert run_round(folder, header(3, met=2)) == 2
    assert run_round(folder, header(4, met=2)) == 2  # the reply of round 3 was lost
    assert run_round(folder, header(5, met=4)) == 4


def test_a_round_that_is_played_again_starts_from_the_same(folder: NodeStateFolder) -> None:
    run_round(folder, header(1))
    assert run_round(folder, header(2, met=1), 20.0) == 1
    assert run_round(folder, header(2, met=1, attempt=2), 21.0) == 1
    assert run_round(folder, header(3, met=2)) == 21


def test_a_server_resumed_from_an_earlier_checkpoint(folder: NodeStateFolder) -> None:
    """Its newest checkpoint was damaged, so it resumes from the one before; older state has been deleted."""
    for number in range(1, 7):
        run_round(folder, header(number, met=number - 1, settled=max(number - 3, 0)))
    assert run_round(folder, header(5, met=4, settled=3), 50.0) == 4
    assert run_round(folder, header(6, met=5, settled=3)) == 50
    start, why = folder.begin(header(3, met=2, settled=0), "t", CPU)
    assert start is None
    assert why == "its client state of round 2 is missing; it started from the initial state"


def test_a_client_that_is_rarely_sampled_keeps_its_state(folder: NodeStateFolder) -> None:
    run_round(folder, header(2))
    assert run_round(folder, header(50, met=2, settled=48)) == 2
    assert run_round(folder, header(50, met=2, settled=48, attempt=2)) == 2
    assert run_round(folder, header(90, met=50, settled=88)) == 50
    assert len(list(folder.folder.glob("*.safetensors"))) == 2


def test_a_run_from_the_start_has_no_state(folder: NodeStateFolder) -> None:
    run_round(folder, header(1))
    run_round(folder, header(2, met=1))
    assert run_round(folder, header(1)) is None
    assert [path.stem for path in folder.folder.glob("*.safetensors")] == ["000001"]


def test_runs_do_not_see_each_other(folder: NodeStateFolder, tmp_path: Path) -> None:
    run_round(folder, header(1))
    assert NodeStateFolder(tmp_path / "memory", "other").begin(header(2, met=1), "t", CPU)[0] is None
    for name in ("../other", "", "a/b", "A B", "x" * 65):
        with pytest.raises(UserError, match="not a fedgg run id"):
            NodeStateFolder(tmp_path, name)


def test_only_its_owner_may_read_it(folder: NodeStateFolder) -> None:
    before = os.umask(0)
    try:
        run_round(folder, header(1))
    finally:
        os.umask(before)
    for path in (folder.folder, folder.folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in folder.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_damaged_file_counts_as_missing(folder: NodeStateFolder, damage: object) -> None:
    assert callable(damage)
    run_round(folder, header(1))
    path = folder.folder / "000001.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    start, why = folder.begin(header(2, met=1), "t", CPU)
    assert start is None
    assert why.startswith("its client state of round 1 cannot be read")


def test_a_stale_message_writes_nothing(folder: NodeStateFolder) -> None:
    """A process hangs, its round is repeated, and then it continues."""
    folder.begin(header(1), "slow", CPU)
    run_round(folder, header(1, attempt=2), 7.0)
    with pytest.raises(StaleMessage):
        folder.save(header(1), "slow", state(1.0))
    assert run_round(folder, header(2, met=1)) == 7


def _save_forever(path: Path) -> None:
    folder, number = NodeStateFolder(path, "run"), 1
    while True:
        folder.begin(header(number, met=number - 1, settled=number - 1), "t", CPU)
        folder.save(header(number), "t", SavedClientState({"c": torch.full((1, 300_000), float(number))}, {}))
        number += 1


def test_a_kill_leaves_no_incomplete_file(tmp_path: Path) -> None:
    """Killed as soon as the first file is seen, and later: in the middle of a write, if it were not in one move."""
    for milliseconds in (0, 0, 0, 0, 0, 0, 3, 10, 30):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        process = multiprocessing.get_context("fork").Process(target=_save_forever, args=(path,))
        process.start()
        end = time.monotonic() + 60
        while not list((path / "run").glob("[0-9]*.safetensors")):
            assert time.monotonic() < end, "nothing was saved"
        time.sleep(milliseconds / 1000)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        rounds = sorted(int(file.stem) for file in (path / "run").glob("[0-9]*.safetensors"))
        assert rounds
        start, why = NodeStateFolder(path, "run").begin(header(rounds[-1] + 1, met=rounds[-1]), "t", CPU)
        assert start is not None, why
        assert torch.equal(start.memory["c"], torch.full((1, 300_000), float(rounds[-1])))
