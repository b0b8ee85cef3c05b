"""Checkpoints are written beside training: nothing waits for them, nothing that training changes gets into them."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from observers import Callbacks
from safetensors.torch import load
from test_client_state import POPULATION, SERVER, rows_of, same, shelved
from test_store import Stop, assert_same, resumed, small

from fedgg.core.server import ServerState
from fedgg.errors import UserError
from fedgg.lab.checkpoint import Snapshot, _write_safetensors, read_checkpoint, snapshot, write_snapshot
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import State
from fedgg.lab.run_session import SHARE, CheckpointWriter
from fedgg.lab.runner import run
from fedgg.lab.store import Store
from fedgg.older_python import tomllib
from fedgg.runfolder.checksums import checkpoints_in

CPU = torch.device("cpu")
PATIENCE = 30.0  # seconds


def at(rounds_done: int, value: float = 0.0) -> State:
    return State(rounds_done, ServerState(torch.full((1, 4), value), {}, {}), {0: {"c": torch.full((1, 4), value)}}, {})


class SlowDisk:
    """Store.write, which waits until it is told to go on; counts the writes."""

    def __init__(self, patched: pytest.MonkeyPatch):
        self.go_on, self.begun = threading.Event(), list[int]()
        write = Store.write

        def slow(store: Store, content: Snapshot) -> set[int]:
            self.begun.append(content.rounds_done)
            assert self.go_on.wait(PATIENCE)
            return write(store, content)

        patched.setattr(Store, "write", slow)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk(monkeypatch)
    yield slow
    slow.go_on.set()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "run").locked() as locked:
        yield locked


def rounds_on_disk(folder: Path) -> list[int]:
    return [int(path.stem) for path in checkpoints_in(folder)]


def every(rounds: int) -> Experiment:
    return Experiment(server={"checkpoint_every": rounds})


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_rounds_go_on_while_a_checkpoint_is_written_and_the_next_ones_are_postponed(
    tmp_path: Path, disk: SlowDisk
) -> None:
    experiment = small(**{"rounds": 9, "server.checkpoint_every": 1, "algorithm.name": "scaffold"})
    seen: dict[int, list[int]] = {}

    def round_(record: dict[str, Any]) -> None:
        seen[record["round"]] = rounds_on_disk(tmp_path / "run")
        if record["round"] == 6:
            disk.go_on.set()
            until(lambda: rounds_on_disk(tmp_path / "run") == [1])

    run(experiment, out=tmp_path / "run", observer=Callbacks(round=round_))
    assert all(seen[number] == [] for number in range(1, 7)), "six rounds were done before the first checkpoint was"
    assert disk.begun[:2] == [1, 7], "those of rounds 2 to 6 are postponed, not queued"
    assert rounds_on_disk(tmp_path / "run")[-1] == 9, "the end of a run waits for its checkpoint"
    run(experiment, out=tmp_path / "straight")
    assert_same(tmp_path / "straight", tmp_path / "run")


def test_by_rounds(store: Store) -> None:
    """The meaning of checkpoint_every: rounds 3, 6, 9; a postponed one does not shift those after it."""
    writer, written = CheckpointWriter(store, every(3), 0), list[int]()
    for number in (*range(1, 8), 10, 11, 12):
        writer.round_done(at(number))
        writer.wait()
        written += [round_ for round_ in rounds_on_disk(store.folder)[-1:] if round_ not in written]
    writer.close()
    assert written == [3, 6, 10, 12]


def test_by_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """SHARE times as long as the last one took, and after checkpoint_seconds at the latest."""
    now, write = [100.0], Store.write

    def slow(store: Store, content: Snapshot) -> set[int]:
        now[0] += took
        return write(store, content)

    monkeypatch.setattr(Store, "write", slow)
    monkeypatch.setattr("fedgg.lab.run_session.time.monotonic", lambda: now[0])
    writer = CheckpointWriter(store, Experiment(server={"checkpoint_seconds": 60}), 0)
    took, number, begun = 2.0, 0, list[float]()
    while now[0] < 400:
        number += 1
        before = now[0]
        writer.round_done(at(number))
        writer.wait()
        if now[0] > before:
            begun.append(before)
            took = 5.0 if len(begun) == 3 else 2.0
        now[0] += 1
    writer.close()
    waits = [later - earlier for earlier, later in pairwise(begun)]
    assert begun[0] == 100.0, "the first round has one"
    assert waits[:2] == [SHARE * 2.0] * 2
    assert waits[3] == 60.0, "not 100 s, although the last took 5 s"
    assert waits[4] == SHARE * 2.0


@pytest.mark.parametrize("settings", [{}, {"checkpoint_every": 7}, {"checkpoint_seconds": 0.5}])
def test_settings_of_checkpoints_are_no_part_of_the_experiment(settings: dict[str, float]) -> None:
    one, other = Experiment(), Experiment(server=settings)
    assert one.hash() == other.hash()
    assert one.trajectory() == other.trajectory()
    assert tomllib.loads(other.to_toml())["server"].items() >= settings.items()


# What is written ------------------------------------------------------------------------------------------------------


def test_what_changes_in_place_afterwards_is_not_in_it(store: Store, disk: SlowDisk) -> None:
    writer, state = CheckpointWriter(store, every(1), 0), at(1, 5.0)
    writer.round_done(state)
    state.server.w.add_(1)
    state.memory[0]["c"].zero_()
    disk.go_on.set()
    writer.close()
    written = read_checkpoint(checkpoints_in(store.folder)[0], every(1).trajectories(), CPU)
    assert written.server.w.tolist() == [[5.0] * 4]
    assert written.memory[0]["c"].tolist() == [[5.0] * 4]


def test_rows_in_a_file_that_it_refers_to_are_not_overwritten(store: Store, disk: SlowDisk) -> None:
    """Ten rounds during one write, each with new rows for all clients."""
    writer = CheckpointWriter(store, every(1), 0)
    memory = shelved(store.checkpoint_folder, {client: rows_of(client) for client in range(POPULATION)})
    writer.round_done(State(1, SERVER, memory, {}))
    for number in range(2, 12):
        memory = memory | {client: rows_of(100 * number + client) for client in range(POPULATION)}
        writer.round_done(State(number, SERVER, memory, {}))
    assert disk.begun == [1]
    disk.go_on.set()
    writer.wait()
    state = read_checkpoint(checkpoints_in(store.folder)[0], every(1).trajectories(), CPU)
    assert same(state.memory, {client: float(client) for client in range(POPULATION)})
    assert memory.shelf.file.count == 3 * POPULATION, "of the checkpoint, and of two rounds"
    writer.close()


def test_the_next_snapshot_uses_the_memory_of_the_last() -> None:
    copies: dict[str, torch.Tensor] = {}
    first = snapshot(at(1, 1.0), "hash", copy_into=copies)
    places = {name: tensor.data_ptr() for name, tensor in first.tensors.items()}
    second = snapshot(at(2, 2.0), "hash", copy_into=copies)
    assert {name: tensor.data_ptr() for name, tensor in second.tensors.items()} == places
    assert second.tensors["client/0/c"].tolist() == [[2.0] * 4]
    wider = replace(at(3), memory={1: {"c": torch.ones(1, 9).T}})  # another client, another shape, not contiguous
    third = snapshot(wider, "hash", copy_into=copies)
    assert third.tensors.keys() == copies.keys() == {"w", "client/1/c"}
    assert third.tensors["client/1/c"].is_contiguous()
    assert third.tensors["client/1/c"].shape == (9, 1)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]
)
def test_safetensors_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"b/ä": torch.arange(12).reshape(1, 3, 4).to(dtype), "none": torch.empty(1, 0, dtype=dtype)}
    tensors |= {"number": torch.tensor(1, dtype=dtype), "odd": torch.ones(3, dtype=torch.uint8)}
    with BytesIO() as file:
        _write_safetensors(file, tensors, {"key": "välue"})
        again = load(file.getvalue())
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (again[name].dtype, again[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(again[name], tensor)
    state = State(1, ServerState(torch.ones(1, 2), tensors, {}), {}, {})
    write_snapshot(tmp_path / "1.safetensors", snapshot(state, "hash"))
    buffers = read_checkpoint(tmp_path / "1.safetensors", ["hash"], CPU).server.buffers
    assert all(torch.equal(buffers[name], tensor) for name, tensor in tensors.items())


# Errors and interruptions ---------------------------------------------------------------------------------------------


def test_an_error_in_the_background_ends_the_run_at_the_next_round_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = small(**{"rounds": 9, "server.checkpoint_every": 1, "algorithm.name": "scaffold"})
    run(experiment, out=tmp_path / "straight")
    rounds: list[int] = []
    begin = CheckpointWriter.round_done

    def until_written(writer: CheckpointWriter, state: State) -> None:
        begin(writer, state)
        if writer._in_flight is not None:
            wait([writer._in_flight[1]], PATIENCE)  # raises nothing

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def round_(record: dict[str, Any]) -> None:
        rounds.append(record["round"])
        if record["round"] == 3:
            monkeypatch.setattr("fedgg.lab.checkpoint._write_safetensors", full)

    monkeypatch.setattr(CheckpointWriter, "round_done", until_written)
    with pytest.raises(UserError, match=r"cannot write to .*run: No space left on device; free some space, then res"):
        run(experiment, out=tmp_path / "run", observer=Callbacks(round=round_))
    assert rounds == [1, 2, 3, 4], "round 4 begins a checkpoint, which fails; at the end of round 5 the run ends"
    assert not list((tmp_path / "run").rglob("*.tmp"))
    monkeypatch.undo()
    _, _, start = resumed(experiment, tmp_path / "run")
    assert start >= 2
    assert_same(tmp_path / "straight", tmp_path / "run")


def test_a_folder_that_is_replaced_during_a_write(tmp_path: Path, disk: SlowDisk) -> None:
    """Nothing is written into the new one."""
    folder = tmp_path / "run"

    def round_(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            folder.rename(tmp_path / "elsewhere")
            (folder / "checkpoint").mkdir(parents=True)
            shutil.copy(tmp_path / "elsewhere" / "lock", folder / "lock")
            disk.go_on.set()

    with pytest.raises(UserError, match="was removed or replaced while this process worked in it"):
        run(small(rounds=9), out=folder, observer=Callbacks(round=round_))
    assert sorted(path.name for path in folder.rglob("*")) == ["checkpoint", "lock"]


@pytest.mark.parametrize("fails", [False, True])
def test_stopped_during_a_write(tmp_path: Path, disk: SlowDisk, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being written is waited for, and the rounds since are saved, too, whether that succeeds or not."""
    folder, stopped_at = tmp_path / "run", list[float]()

    def round_(record: dict[str, Any]) -> None:
        if record["round"] == 4:
            threading.Timer(0.2, disk.go_on.set).start()
            stopped_at.append(time.monotonic())
            raise Stop

    if fails:
        calls = iter([True])
        write = Store.write

        def once(store: Store, content: Snapshot) -> set[int]:
            if next(calls, False):
                assert disk.go_on.wait(PATIENCE)
                raise UserError("this disk has failed")
            return write(store, content)

        monkeypatch.setattr(Store, "write", once)
    with pytest.raises(Stop):
        run(small(rounds=9), out=folder, observer=Callbacks(round=round_))
    assert time.monotonic() - stopped_at[0] > 0.15
    assert rounds_on_disk(folder) == ([4] if fails else [1, 4])
    monkeypatch.undo()
    _, _, start = resumed(small(rounds=9), folder)
    assert start == 4


def test_the_thread_ends_before_the_lock_is_released(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if Ctrl-C is pressed again while it is waited for."""
    presses, wait = iter([True, True]), CheckpointWriter.wait

    def pressed(writer: CheckpointWriter) -> None:
        if next(presses, False):
            raise KeyboardInterrupt
        wait(writer)

    def round_(record: dict[str, Any]) -> None:
        if record["round"] == 3:
            monkeypatch.setattr(CheckpointWriter, "wait", pressed)
            threading.Timer(0.2, disk.go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small(rounds=9), out=tmp_path / "run", observer=Callbacks(round=round_))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]
    assert rounds_on_disk(tmp_path / "run") == [1], "the lock was held until it was written"
    monkeypatch.undo()
    assert resumed(small(rounds=9), tmp_path / "run")[2] == 1
