"""The clients' rows in a file: the same mapping as a dict, whatever is killed, torn or resumed in between."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedgg.core.server import ServerState
from fedgg.core.tensor_rows import Rows
from fedgg.errors import UserError
from fedgg.lab.checkpoint import BadCheckpoint, Snapshot, pin, read_checkpoint, snapshot, unpin, write_checkpoint
from fedgg.lab.client_state import Places, RecordLayout, RowsOnDisk, Shelf
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import ServerConfig
from fedgg.lab.one_round import State, all_in_all, moved
from fedgg.lab.resume import newest_state
from fedgg.lab.store import Store

CPU = torch.device("cpu")
POPULATION = 6
ALWAYS = ServerConfig(memory_limit_mb=0)
EXPERIMENT = Experiment()
SERVER = ServerState(torch.zeros(1, 3), {}, {})


class Killed(Exception):
    pass


class Dying(dict[int, Rows]):
    """Rows of which only the first few are ever asked for: the process is killed in the middle of writing."""

    def __init__(self, rows: dict[int, Rows], after: int):
        super().__init__(rows)
        self.after = after

    def items(self) -> Iterator[tuple[int, Rows]]:  # type: ignore[override]
        for number, item in enumerate(super().items()):
            if number == self.after:
                raise Killed
            yield item


def rows_of(number: float) -> Rows:
    return {"variate": torch.full((1, 5), number), "count": torch.tensor([[int(number)]])}


def same(mapping: Any, expected: dict[int, float]) -> bool:
    if set(mapping) != set(expected) or len(mapping) != len(expected):
        return False
    return all(
        torch.equal(mapping[client][name], tensor)
        for client, number in expected.items()
        for name, tensor in rows_of(number).items()
    )


def save(store: Store, state: State) -> None:
    """A checkpoint, as `CheckpointWriter.save_now` writes it."""
    content = snapshot(state, EXPERIMENT.trajectory())
    unpin(content, store.write(content))


class Lives(RuleBasedStateMachine):
    """Rounds, checkpoints, kills between any two writes, torn checkpoints and resumes, against a dict a round."""

    @initialize()
    def begin(self) -> None:
        self.home = Path(tempfile.mkdtemp())
        self.store = Store(self.home)
        self.store.checkpoint_folder.mkdir()
        self.number = 0.0
        self.torn: set[Path] = set()
        self.open(State(0, SERVER, {}, {}), {0: {}})

    def open(self, state: State, known: dict[int, dict[int, float]]) -> None:
        self.state, self.known = state, known
        self.in_flight: Snapshot | None = None  # a checkpoint that is being written while rounds are played

    def teardown(self) -> None:
        shutil.rmtree(self.home)

    def fresh(self, clients: set[int], shared: bool) -> tuple[dict[int, float], dict[int, Rows]]:
        self.number += 1
        numbers = {client: self.number + (0 if shared else client / 10) for client in clients}
        one = rows_of(self.number)
        return numbers, {client: one if shared else rows_of(number) for client, number in numbers.items()}

    @rule(clients=st.sets(st.integers(0, POPULATION - 1), min_size=1, max_size=3), shared=st.booleans())
    def play(self, clients: set[int], shared: bool) -> None:
        numbers, rows = self.fresh(clients, shared)
        done = self.state.rounds_done
        memory = self.state.memory | rows
        self.state = moved(
            State(done + 1, SERVER, memory, {}), clients, POPULATION, ALWAYS, self.store.checkpoint_folder
        )
        self.known[done + 1] = self.known[done] | numbers

    @precondition(lambda self: isinstance(self.state.memory, RowsOnDisk))
    @rule(clients=st.sets(st.integers(0, POPULATION - 1), min_size=1, max_size=4))
    def a_round_that_is_given_up(self, clients: set[int]) -> None:
        """As when training diverges: the state before is the one that stands."""
        self.state.memory | self.fresh(clients, False)[1]

    @precondition(lambda self: self.state.rounds_done and self.in_flight is None)
    @rule()
    def save(self) -> None:
        save(self.store, self.state)
        self.torn.discard(self.store.checkpoint_folder / f"{self.state.rounds_done:06d}.safetensors")

    @precondition(lambda self: self.state.rounds_done and self.in_flight is None)
    @rule()
    def begin_to_save(self) -> None:
        self.in_flight = snapshot(self.state, EXPERIMENT.trajectory(), copy_into={})

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def end_to_save(self) -> None:
        assert self.in_flight is not None
        unpin(self.in_flight, self.store.write(self.in_flight))
        self.torn.discard(self.store.checkpoint_folder / f"{self.in_flight.rounds_done:06d}.safetensors")
        self.in_flight = None

    @rule(
        clients=st.sets(st.integers(0, POPULATION - 1), min_size=1, max_size=4),
        after=st.integers(0, 3),
        torn=st.booleans(),
    )
    def kill_and_resume(self, clients: set[int], after: int, torn: bool) -> None:
        if isinstance(self.state.memory, RowsOnDisk):
            with suppress(Killed):
                self.state.memory | Dying(self.fresh(clients, False)[1], after)
        paths = sorted(self.store.checkpoint_folder.glob("*.safetensors"))
        if torn and paths:
            paths[-1].write_bytes(paths[-1].read_bytes()[:-3])
            self.torn.add(paths[-1])
        rounds = [int(path.stem) for path in paths if path not in self.torn]
        state, _ = newest_state(self.store, EXPERIMENT, CPU)
        if state is None:
            assert not rounds
            for path in paths:
                path.unlink()
            self.open(State(0, SERVER, {}, {}), {0: {}})
        else:
            assert state.rounds_done == rounds[-1]
            self.open(state, self.known)

    @invariant()
    def all_is_there(self) -> None:
        assert same(self.state.memory, self.known[self.state.rounds_done])

    @invariant()
    def every_checkpoint_is_whole(self) -> None:
        for path in self.store.checkpoint_folder.glob("*.safetensors"):
            if path not in self.torn:
                state = read_checkpoint(path, EXPERIMENT.trajectories(), CPU)
                assert same(state.memory, self.known[state.rounds_done])


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLives = Lives.TestCase


def shelved(folder: Path | None, rows: dict[int, Rows], population: int = POPULATION) -> RowsOnDisk:
    path = folder / "client-memory.slots" if folder else None
    return RowsOnDisk(Shelf.new(path, next(iter(rows.values())), CPU), Places.none(population)) | rows


def test_a_mapping_like_any_other(tmp_path: Path) -> None:
    memory = shelved(tmp_path, {4: rows_of(4), 1: rows_of(1)})
    assert (list(memory), len(memory), 1 in memory, 2 in memory, -2 in memory) == ([1, 4], 2, True, False, False)
    assert memory.get(2) is None
    assert np.int64(4) in memory  # as in a dict: who asks with NumPy's numbers is no stranger
    with pytest.raises(KeyError):
        memory[-2]
    with pytest.raises(KeyError):
        memory[POPULATION]
    memory[1]["variate"].zero_()  # what is read belongs to the reader
    assert same(memory, {1: 1, 4: 4})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_every_type_and_shape_comes_back(dtype: torch.dtype) -> None:
    rows = {"b/ä": torch.arange(12).reshape(1, 3, 4).to(dtype), "a": torch.ones(1, 7, dtype=dtype)[:, 2:]}
    rows |= {"none": torch.empty(1, 0, dtype=dtype), "t": torch.arange(6).reshape(1, 2, 3).transpose(1, 2).to(dtype)}
    again = shelved(None, {0: rows})[0]
    assert again.keys() == rows.keys()
    for name, tensor in rows.items():
        assert again[name].dtype == dtype
        assert torch.equal(again[name], tensor)
        assert again[name].data_ptr() % 64 == 0
    assert RecordLayout.from_description(RecordLayout.like(rows).described()) == RecordLayout.like(rows)


def test_equal_rows_lie_in_one_slot(tmp_path: Path) -> None:
    """One tensor, as from the loop; or equal rows of a stack."""
    one = rows_of(7)
    memory = shelved(tmp_path, {3: rows_of(8), 0: one, 1: one, 2: rows_of(7)})
    assert memory.shelf.file.count == 2
    assert same(memory, {0: 7, 1: 7, 2: 7, 3: 8})


def test_the_file_stops_growing(tmp_path: Path) -> None:
    store, cohort, population = Store(tmp_path), 5, 40
    store.checkpoint_folder.mkdir()
    state, expected = State(0, SERVER, {}, {}), dict[int, float]()
    for number in range(1, 101):
        called = np.random.default_rng(number).choice(population, cohort, replace=False).tolist()
        now = {client: number + client / 100 for client in called}
        expected |= now
        memory = state.memory | {client: rows_of(value) for client, value in now.items()}
        state = moved(State(number, SERVER, memory, {}), called, population, ALWAYS, store.checkpoint_folder)
        save(store, state)
        assert isinstance(state.memory, RowsOnDisk)
        assert state.memory.shelf.file.count <= len(expected) + 3 * cohort
        assert len(state.memory.shelf.pinned) <= 2
    assert same(state.memory, expected)


def test_a_spoilt_slot_is_noticed(tmp_path: Path) -> None:
    memory = shelved(tmp_path, {0: rows_of(1), 1: rows_of(2)})
    path = tmp_path / "client-memory.slots"
    content = bytearray(path.read_bytes())
    content[memory.shelf.record.size + 3] ^= 1
    path.write_bytes(content)
    assert memory[0]["count"].item() == 1
    with pytest.raises(UserError, match=r"client-memory\.slots: the memory of client 1 .* checksum"):
        memory[1]


@pytest.mark.parametrize("how", ["flipped", "cut off", "missing"])
def test_a_checkpoint_whose_rows_are_gone_is_refused(how: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.checkpoint_folder.mkdir()
    first = State(1, SERVER, shelved(store.checkpoint_folder, {0: rows_of(1), 1: rows_of(2)}), {})
    save(store, first)
    save(store, State(2, SERVER, first.memory | {1: rows_of(3)}, {}))
    path = store.checkpoint_folder / "client-memory.slots"
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[-70] ^= 1
        path.write_bytes(content)
    elif how == "cut off":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    state, refused = newest_state(store, EXPERIMENT, CPU)
    assert "000002" in refused[0]
    assert "client-memory.slots" in refused[0]
    if how == "missing":
        assert state is None
    else:
        assert state is not None
        assert same(state.memory, {0: 1, 1: 2})


def test_any_flipped_bit_of_the_places_is_noticed(tmp_path: Path) -> None:
    state = State(3, SERVER, shelved(tmp_path, {0: rows_of(1), 3: rows_of(2)}), {})
    path = tmp_path / "000003.safetensors"
    write_checkpoint(path, state, "hash")
    good = path.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        try:
            read = read_checkpoint(path, ["hash"], CPU)
        except BadCheckpoint:
            continue
        assert same(read.memory, {0: 1, 3: 2}), f"byte {place}: {good[place : place + 1]!r}"


def test_other_checkpoints_may_be_anything(tmp_path: Path) -> None:
    state = State(3, SERVER, shelved(tmp_path, {0: rows_of(1)}), {})
    (tmp_path / "torn").write_bytes(b"torn")
    write_checkpoint(tmp_path / "plain", State(1, SERVER, {0: rows_of(1)}, {}), "hash")
    pin(state, {0: tmp_path / "missing", 1: tmp_path / "torn", 2: tmp_path / "plain"})
    assert isinstance(state.memory, RowsOnDisk)
    assert state.memory.shelf.pinned.keys() == {3}


def test_memory_in_a_file_keeps_its_shape(tmp_path: Path) -> None:
    memory = shelved(tmp_path, {0: {"v": torch.zeros(1, 5)}})
    for other in ({"v": torch.zeros(1, 6)}, {"w": torch.zeros(1, 5)}, {"v": torch.zeros(1, 5, dtype=torch.float64)}):
        with pytest.raises(UserError, match="client 1 keeps"):
            memory | {1: other}


@pytest.mark.parametrize(
    ("clients", "population", "limit", "every", "folder", "on_disk"),
    [
        (5, 5, 10, 1, True, False),  # 5 MB, all of it changed in every round
        (5, 5, 4, 1, True, True),  # more than the limit
        (5, 5, 4, 1, False, True),
        (5, 50, 1000, 1, True, True),  # a checkpoint would write ten times what a round changes
        (5, 50, 1000, 3, True, False),  # three rounds change nearly as much
        (5, 50, 1000, 1, False, False),  # no checkpoints
    ],
)
def test_when_rows_move(
    clients: int, population: int, limit: int, every: int, folder: bool, on_disk: bool, tmp_path: Path
) -> None:
    rows = {client: {"v": torch.zeros(1, 250_000)} for client in range(clients)}
    settings = ServerConfig(memory_limit_mb=limit, checkpoint_every=every)
    state = moved(State(1, SERVER, rows, {}), rows, population, settings, tmp_path if folder else None)
    assert isinstance(state.memory, RowsOnDisk) == on_disk
    assert list(tmp_path.iterdir()) == ([tmp_path / "client-memory.slots"] if on_disk and folder else [])


def test_what_the_whole_population_will_take() -> None:
    own = {client: {"v": torch.zeros(1, 25)} for client in range(4)}
    one = {"v": torch.zeros(1, 25)}
    shared = dict.fromkeys(range(4), one)
    assert all_in_all(own, 4) == (400, 400)
    assert all_in_all(own, 40) == (400, 4000)
    assert all_in_all(shared, 4) == (100, 100)
    assert all_in_all({}, 40) == (0, 0)
    # Models in use once everybody was called, 4 of 40 a round: counted, against the estimate.
    chance, last, counts = np.random.default_rng(0), np.zeros(40, int), []
    for number in range(1, 2001):
        last[chance.choice(40, 4, replace=False)] = number
        counts.append(len(np.unique(last)))
    assert 0.8 < 100 * np.mean(counts[200:]) / all_in_all(shared, 40)[1] < 1.2
