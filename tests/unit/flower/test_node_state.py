"""What a node keeps: by round, for its owner only, whole or not at all; and which round starts from what."""

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
from fedgg.flower.messages import About
from fedgg.flower.node_state import Kept, NodeMemory, Overtaken

CPU = torch.device("cpu")


def about(round_: int, met: int = 0, settled: int = 0, attempt: int = 1) -> About:
    return About("run", "experiment", round_, attempt, 0, settled, met)


def of(value: float) -> Kept:
    return Kept({"c": torch.full((1, 3), value)}, {"n": torch.full((1,), int(value))})


def play(memory: NodeMemory, asked: About, value: float | None = None) -> float | None:
    """One round: what it started from; it ends with `value`, or with its own number."""
    ticket = f"{asked.round}.{asked.attempt}.{value}"
    kept, _ = memory.begin(asked, ticket, CPU)
    memory.keep(asked, ticket, of(asked.round if value is None else value))
    return None if kept is None else float(kept.memory["c"][0, 0])


@pytest.fixture
def memory(tmp_path: Path) -> NodeMemory:
    return NodeMemory(tmp_path / "memory", "run")


def test_a_round_starts_from_the_one_the_server_used_last(memory: NodeMemory) -> None:
    assert play(memory, about(1)) is None
    assert play(memory, about(2, met=1)) == 1
    assert play(memory, about(3, met=2)) == 2
    assert play(memory, about(4, met=2)) == 2  # the answer of round 3 was lost
    assert play(memory, about(5, met=4)) == 4


def test_a_round_that_is_played_again_starts_from_the_same(memory: NodeMemory) -> None:
    play(memory, about(1))
    assert play(memory, about(2, met=1), 20.0) == 1
    assert play(memory, about(2, met=1, attempt=2), 21.0) == 1
    assert play(memory, about(3, met=2)) == 21


def test_the_server_went_back(memory: NodeMemory) -> None:
    """Its newest checkpoint was torn, so it starts from the one before; what it never goes back to is forgotten."""
    for number in range(1, 7):
        play(memory, about(number, met=number - 1, settled=max(number - 3, 0)))
    assert play(memory, about(5, met=4, settled=3), 50.0) == 4
    assert play(memory, about(6, met=5, settled=3)) == 50
    kept, why = memory.begin(about(3, met=2, settled=0), "t", CPU)
    assert kept is None
    assert why == "its memory of round 2 is gone, it started anew"


def test_a_client_that_is_seldom_asked_keeps_its_old_memory(memory: NodeMemory) -> None:
    play(memory, about(2))
    assert play(memory, about(50, met=2, settled=48)) == 2
    assert play(memory, about(50, met=2, settled=48, attempt=2)) == 2
    assert play(memory, about(90, met=50, settled=88)) == 50
    assert len(list(memory.folder.glob("*.safetensors"))) == 2


def test_a_new_beginning_knows_nothing(memory: NodeMemory) -> None:
    play(memory, about(1))
    play(memory, about(2, met=1))
    assert play(memory, about(1)) is None
    assert [path.stem for path in memory.folder.glob("*.safetensors")] == ["000001"]


def test_runs_do_not_see_each_other(memory: NodeMemory, tmp_path: Path) -> None:
    play(memory, about(1))
    assert NodeMemory(tmp_path / "memory", "other").begin(about(2, met=1), "t", CPU)[0] is None
    for name in ("../other", "", "a/b", "A B", "x" * 65):
        with pytest.raises(UserError, match="no name fedgg gives"):
            NodeMemory(tmp_path, name)


def test_only_its_owner_may_read_it(memory: NodeMemory) -> None:
    before = os.umask(0)
    try:
        play(memory, about(1))
    finally:
        os.umask(before)
    for folder in (memory.folder, memory.folder.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in memory.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_file_that_was_damaged_counts_as_gone(memory: NodeMemory, damage: object) -> None:
    assert callable(damage)
    play(memory, about(1))
    path = memory.folder / "000001.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    kept, why = memory.begin(about(2, met=1), "t", CPU)
    assert kept is None
    assert why.startswith("its memory of round 1 cannot be read")


def test_a_message_that_was_overtaken_writes_nothing(memory: NodeMemory) -> None:
    """A process hung, its round was played again, and then it woke up."""
    memory.begin(about(1), "slow", CPU)
    play(memory, about(1, attempt=2), 7.0)
    with pytest.raises(Overtaken):
        memory.keep(about(1), "slow", of(1.0))
    assert play(memory, about(2, met=1)) == 7


def _keep_forever(folder: Path) -> None:
    memory, number = NodeMemory(folder, "run"), 1
    while True:
        memory.begin(about(number, met=number - 1, settled=number - 1), "t", CPU)
        memory.keep(about(number), "t", Kept({"c": torch.full((1, 300_000), float(number))}, {}))
        number += 1


def test_killed_at_any_moment_the_newest_is_whole(tmp_path: Path) -> None:
    for _ in range(5):
        process = multiprocessing.get_context("fork").Process(target=_keep_forever, args=(tmp_path,))
        process.start()
        time.sleep(0.15)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = sorted(int(path.stem) for path in (tmp_path / "run").glob("[0-9]*.safetensors"))
        if found:
            kept, why = NodeMemory(tmp_path, "run").begin(about(found[-1] + 1, met=found[-1]), "t", CPU)
            assert kept is not None, why
            assert torch.equal(kept.memory["c"], torch.full((1, 300_000), float(found[-1])))
