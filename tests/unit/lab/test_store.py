"""Run folders: atomic, resumable bit for bit, and honest about what cannot be trusted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from earlier_folders import without_checksums
from observers import Callbacks
from safetensors.torch import load_file
from torch import Tensor, nn

from fedgg.algorithms import ALGORITHMS, FedAvg, FedGG
from fedgg.core.algorithm import Algorithm, Client
from fedgg.core.server import ServerState
from fedgg.core.tensor_rows import Rows
from fedgg.errors import UserError
from fedgg.files import write_atomically
from fedgg.lab.checkpoint import BadCheckpoint, read_checkpoint, write_checkpoint
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import State
from fedgg.lab.run_result import Run
from fedgg.lab.run_session import Session
from fedgg.lab.runner import run
from fedgg.lab.store import Store

pytestmark = pytest.mark.usefixtures("checkpoints_at_once")

CPU = torch.device("cpu")
MEASURED = {"seconds": 0, "checksum": "", "checksums": {}}  # of a summary: what depends on the time it took


class Stop(Exception):
    """As good as a kill: nothing after this round is done."""


def small(**changes: Any) -> Experiment:
    return Experiment(
        rounds=5,
        split={"clients": 4},
        local={"epochs": 1, "batch": 64},
        server={"cohort": 3},
        model={"name": "linear"},
        algorithm={"name": "fedavg"},
    ).changed(changes)


def stopped(experiment: Experiment, out: Path, after: int, *, killed: bool = True, **given: Any) -> None:
    def round_(record: dict[str, Any]) -> None:
        if record["round"] == after:
            if killed:
                patched.setattr(Session, "keep", lambda session: None)  # there is no time for it
            raise Stop

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Stop):
        run(experiment, out=out, observer=Callbacks(round=round_), **given)


def resumed(experiment: Experiment, out: Path, **given: Any) -> tuple[Run, list[str], int]:
    notices: list[str] = []
    starts: list[int] = []
    observer = Callbacks(started=lambda done, total: starts.append(done), notice=notices.append)
    return run(experiment, out=out, observer=observer, **given), notices, starts[0]


def history(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "checksum")} for line in lines]


def assert_same(a: Path, b: Path) -> None:
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert history(a) == history(b)
    left, right = (json.loads((folder / "summary.json").read_text()) for folder in (a, b))
    assert {**left, **MEASURED} == {**right, **MEASURED}


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.3), nn.Linear(8, 10))


NEEDS: dict[str, dict[str, Any]] = {"moon": {"model.name": "mlp", "model.hidden": 4}, "fedcl": {"data.proxy": 20}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({"algorithm.name": name, **NEEDS.get(name, {})}, {}) for name in ALGORITHMS},
    "fedgg sent": ({"algorithm.name": "fedgg", "algorithm.direction": "sent"}, {}),
    **{f"batch norm {p}": ({"model.statistics": p}, {"model": batch_norm}) for p in ("average", "local", "frozen")},
    "dropout": ({"algorithm.name": "scaffold"}, {"model": dropout}),
    "every third checkpoint": ({"server.checkpoint_every": 3, "algorithm.name": "scaffold"}, {}),
    "holdout, every second evaluation": ({"data.holdout": 0.2, "server.evaluate_every": 2}, {}),
    "fp64": ({"engine.precision": "fp64", "algorithm.name": "fedgg"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_resumed_is_uninterrupted(case: str, tmp_path: Path) -> None:
    changes, given = CASES[case]
    experiment = small(**changes)
    run(experiment, out=tmp_path / "straight", **given)
    stopped(experiment, tmp_path / "stopped", 1, **given)
    stopped(experiment, tmp_path / "stopped", 4, **given)
    again, _, start = resumed(experiment, tmp_path / "stopped", **given)
    assert start == (3 if "third" in case else 4)
    assert_same(tmp_path / "straight", tmp_path / "stopped")
    assert [record["round"] for record in again.rounds] == [1, 2, 3, 4, 5]


def test_client_state_of_an_earlier_version_is_refused_where_clients_skip_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that were not met yet would keep what the others do not have; with all in every round there are none."""
    push = {"algorithm.name": "fedgg", "algorithm.first_step": "relative_push"}
    all_clients, some = (small(**push, **{"server.cohort": cohort}) for cohort in (None, 2))
    with monkeypatch.context() as earlier:
        earlier.setattr(FedGG, "client_memory", lambda self, w: {"received": w})
        stopped(all_clients, tmp_path / "all", 2)
        stopped(some, tmp_path / "some", 2)
    resumed(all_clients, tmp_path / "all")
    run(all_clients, out=tmp_path / "straight")
    assert_same(tmp_path / "straight", tmp_path / "all")
    with pytest.raises(UserError, match="has no 'round', which the algorithm 'fedgg' keeps now"):
        resumed(some, tmp_path / "some")


@pytest.mark.parametrize("killed", [True, False])
def test_who_is_stopped_has_time_for_a_checkpoint_and_who_is_killed_has_not(killed: bool, tmp_path: Path) -> None:
    experiment = small(**{"server.checkpoint_every": 3, "algorithm.name": "scaffold"})
    run(experiment, out=tmp_path / "straight")
    stopped(experiment, tmp_path / "stopped", 2, killed=killed)
    _, _, start = resumed(experiment, tmp_path / "stopped")
    assert start == (0 if killed else 2)
    assert_same(tmp_path / "straight", tmp_path / "stopped")


def test_resumes_are_written_down(tmp_path: Path) -> None:
    stopped(small(), tmp_path, after=2)
    assert not (tmp_path / "resumes.jsonl").exists()
    versions = json.loads((without_checksums(tmp_path) / "versions.json").read_text())
    (tmp_path / "versions.json").write_text(json.dumps(versions | {"torch": "0.1"}))
    resumed(small(), tmp_path)
    resumed(small(), tmp_path)  # there was nothing left to do
    resumed(small(rounds=6), tmp_path)
    told = [json.loads(line) for line in (tmp_path / "resumes.jsonl").read_text().splitlines()]
    # A round that was written down but not yet in a checkpoint is played again.
    assert [line["after_round"] for line in told] == [2, 5]
    assert any("torch 0.1" in note for note in told[0]["notes"])
    assert all(line["when"].endswith("+00:00") for line in told)


def test_called_again_nothing_is_run_again(tmp_path: Path) -> None:
    first = run(small(), out=tmp_path)
    content = (tmp_path / "rounds.jsonl").read_bytes()
    played: list[Any] = []
    second = run(small(), out=tmp_path, observer=Callbacks(round=played.append))
    assert not played
    assert (tmp_path / "rounds.jsonl").read_bytes() == content
    assert second.summary == first.summary
    assert all(torch.equal(second.weights[name], first.weights[name]) for name in first.weights)


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "torn":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        content[-5] ^= 1
        path.write_bytes(content)
    elif how == "zeros":
        path.write_bytes(bytes(len(content)))
    elif how == "foreign":
        state = read_any(path)
        write_checkpoint(path, state, "another")


def read_any(path: Path) -> State:
    return State(3, ServerState(torch.zeros(1, 650), {}, {}), {}, {})


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("torn", "torn"),
        ("empty", "torn"),
        ("flipped", "checksum"),
        ("zeros", "torn"),
        ("foreign", "another experiment"),
    ],
)
def test_a_bad_checkpoint_is_refused_with_a_word_and_the_one_before_taken(how: str, word: str, tmp_path: Path) -> None:
    run(small(), out=tmp_path / "straight")
    stopped(small(), tmp_path / "hurt", 3)
    damage(tmp_path / "hurt" / "checkpoint" / "000003.safetensors", how)
    _, notices, start = resumed(small(), tmp_path / "hurt")
    assert start == 2
    assert any("000003" in sentence and word in sentence for sentence in notices)
    assert_same(tmp_path / "straight", tmp_path / "hurt")


def test_both_checkpoints_bad(tmp_path: Path) -> None:
    stopped(small(), tmp_path, 3)
    for path in (tmp_path / "checkpoint").glob("*.safetensors"):
        damage(path, "torn")
    before = (tmp_path / "rounds.jsonl").read_bytes()
    with pytest.raises(UserError, match="None is left"):
        resumed(small(), tmp_path)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before


def test_all_checkpoints_deleted_but_history_left(tmp_path: Path) -> None:
    """Starting anew silently over three written rounds would be a surprise; the same bits again are fine."""
    run(small(), out=tmp_path / "straight")
    stopped(small(), tmp_path / "lost", 3)
    for path in (tmp_path / "lost" / "checkpoint").glob("*.safetensors"):
        path.unlink()
    resumed(small(), tmp_path / "lost")
    assert_same(tmp_path / "straight", tmp_path / "lost")


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Also in the header, where the number of rounds done is written."""
    w = torch.arange(4.0)[None]
    state = State(7, ServerState(w, {}, {"v": w + 1}), {3: {"received": w}, 4: {"received": w}}, {})
    path = tmp_path / "state.safetensors"
    write_checkpoint(path, state, "hash")
    good = path.read_bytes()
    unnoticed = []
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        try:
            read = read_checkpoint(path, ["hash"], CPU)
        except BadCheckpoint:
            continue
        except Exception as error:
            unnoticed.append(f"byte {place} ({good[place : place + 1]!r}): {type(error).__name__}: {error}")
            continue
        same = read.rounds_done == 7 and torch.equal(read.server.w, w) and torch.equal(read.server.memory["v"], w + 1)
        kept = [rows.get("received", 0 * w) for rows in read.memory.values()]
        same = same and read.memory.keys() == {3, 4} and all(torch.equal(rows, w) for rows in kept)
        if not same:
            unnoticed.append(f"byte {place} ({good[place : place + 1]!r}): read as something else")
    assert not unnoticed, f"{len(unnoticed)} of {len(good)}: {unnoticed[:5]}"


def test_checkpoint_round_trip_shares_what_is_equal(tmp_path: Path) -> None:
    w = torch.randn(1, 1000)
    state = State(
        2,
        ServerState(w, {"n": torch.tensor([3])}, {}),
        {client: {"received": w} for client in range(50)},
        {0: {"a.b": torch.ones(1, 2)}},
    )
    path = tmp_path / "state.safetensors"
    write_checkpoint(path, state, "hash")
    assert path.stat().st_size < 2 * 4000 + 10000
    again = read_checkpoint(path, ["hash"], CPU)
    assert torch.equal(again.memory[49]["received"], w)
    assert again.kept_buffers[0]["a.b"].tolist() == [[1.0, 1.0]]
    assert again.server.buffers["n"].tolist() == [3]


@dataclass(frozen=True)
class RemembersAPart(Algorithm):
    """Differs from FedAvg: a client keeps a slice of the model, and one of the slice."""

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, _ = super().finish(w, client)
        anchor = client.notes["anchor"]
        return up, {"head": anchor[:, :10], "rest": anchor[:, 5:], "all": anchor, "none": anchor[:, :0]}


def test_memory_may_be_a_view_of_the_model(tmp_path: Path) -> None:
    """Flat, tensors only, one row: `w[:, :10]` keeps every law there is."""
    finished = run(small(), algorithm=RemembersAPart(), out=tmp_path)
    assert finished.status == "finished"


def test_torn_last_line_of_the_history(tmp_path: Path) -> None:
    run(small(), out=tmp_path / "straight")
    stopped(small(), tmp_path / "hurt", 3)
    with (tmp_path / "hurt" / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 4, "test_acc')
    resumed(small(), tmp_path / "hurt")
    assert_same(tmp_path / "straight", tmp_path / "hurt")


def test_history_shorter_than_the_checkpoint(tmp_path: Path) -> None:
    run(small(), out=tmp_path / "straight")
    stopped(small(), tmp_path / "cut", 3)
    file = tmp_path / "cut" / "rounds.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0])
    with pytest.raises(UserError, match=r"000002.* is refused: rounds.jsonl is damaged \(it ends at round 1\)"):
        resumed(small(), tmp_path / "cut")
    file.write_bytes(b"".join(lines[:2]))
    _, notices, start = resumed(small(), tmp_path / "cut")
    assert start == 2
    assert any("000003.safetensors is refused: rounds.jsonl is damaged" in sentence for sentence in notices)
    assert_same(tmp_path / "straight", tmp_path / "cut")


def test_history_shorter_than_the_checkpoint_in_a_folder_without_checksums(tmp_path: Path) -> None:
    stopped(small(), tmp_path, 3)
    file = without_checksums(tmp_path) / "rounds.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match=r"it has 2 rounds, the checkpoint 3.*history was lost"):
        resumed(small(), tmp_path)


def test_a_history_without_its_experiment_is_left_alone(tmp_path: Path) -> None:
    run(small(), out=tmp_path)
    (tmp_path / "config.toml").unlink()
    before = (tmp_path / "rounds.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"has a history, and its config\.toml is gone: put the file back"):
        run(small(), out=tmp_path)
    with pytest.raises(UserError, match=r"config\.toml is gone"):
        Store(tmp_path).experiment()
    assert (tmp_path / "rounds.jsonl").read_bytes() == before


def test_another_format(tmp_path: Path) -> None:
    stopped(small(), tmp_path, 2)
    versions = json.loads((without_checksums(tmp_path) / "versions.json").read_text())
    (tmp_path / "versions.json").write_text(json.dumps({**versions, "format": 99}))
    for call in (lambda: run(small(), out=tmp_path), lambda: Store(tmp_path).experiment()):
        with pytest.raises(UserError, match="format 99"):
            call()


def test_other_versions_are_named_and_the_run_goes_on(tmp_path: Path) -> None:
    stopped(small(), tmp_path, 2)
    versions = json.loads((without_checksums(tmp_path) / "versions.json").read_text())
    (tmp_path / "versions.json").write_text(json.dumps({**versions, "torch": "1.0"}))
    _, notices, _ = resumed(small(), tmp_path)
    assert any("torch 1.0" in sentence for sentence in notices)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3"])
@pytest.mark.parametrize("name", ["versions.json", "partition.json"])
def test_damaged_facts(name: str, content: str, tmp_path: Path) -> None:
    stopped(small(), tmp_path, 1)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError):
        run(small(), out=tmp_path)


def test_another_experiment_data_or_split(tmp_path: Path) -> None:
    stopped(small(), tmp_path, 1)
    with pytest.raises(UserError, match="another experiment"):
        run(small(seed=1), out=tmp_path)
    facts = json.loads((without_checksums(tmp_path) / "partition.json").read_text())
    (tmp_path / "partition.json").write_text(json.dumps({**facts, "hash": "other"}))
    with pytest.raises(UserError, match="another split"):
        run(small(), out=tmp_path)


def test_another_number_of_threads_is_another_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits differ. A folder of an older fedgg, which left threads out of its hashes, can be resumed."""
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)  # two on a busy machine are many times slower
    experiment = small(**{"engine.threads": 2})
    run(experiment, out=tmp_path / "straight")
    stopped(experiment, tmp_path / "run", 2)
    with pytest.raises(UserError, match=r"engine\.threads = 2 there, its default here"):
        run(small(), out=tmp_path / "run")
    own, older = experiment.trajectories()
    versions = without_checksums(tmp_path / "run") / "versions.json"
    assert own in versions.read_text()
    versions.write_text(versions.read_text().replace(own, older))
    for file in (tmp_path / "run" / "checkpoint").glob("*.safetensors"):
        write_checkpoint(file, read_checkpoint(file, [own], CPU), older)
    with pytest.raises(UserError, match=r"engine\.threads = 2 there, 3 here"):
        run(small(**{"engine.threads": 3}), out=tmp_path / "run")
    _, _, start = resumed(experiment, tmp_path / "run")
    assert start == 2
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_data_changed_since(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"x_train": rng.normal(size=(80, 5)), "x_test": rng.normal(size=(20, 5))}
    arrays |= {"y_train": np.arange(80) % 3, "y_test": np.arange(20) % 3}
    np.savez(tmp_path / "mine.npz", **arrays)
    experiment = small(**{"data.source": f"npz:{tmp_path / 'mine.npz'}", "local.batch": 8, "split.clients": 4})
    stopped(experiment, tmp_path / "run", 2)
    arrays["x_test"][3, 2] += 1e-6
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(UserError, match="other data"):
        run(experiment, out=tmp_path / "run")


def test_another_model_handed_in_is_noticed(tmp_path: Path) -> None:
    """Two lambdas have the same name; what they make does not have the same shape."""

    def model(hidden: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Linear(hidden, 10))

    stopped(small(), tmp_path, 2, model=model(4))
    with pytest.raises(UserError):
        run(small(), out=tmp_path, model=model(5))


def test_second_process_is_refused(tmp_path: Path) -> None:
    code = "import sys, time\nfrom pathlib import Path\nfrom fedgg.lab.store import Store\n"
    code += "with Store(Path(sys.argv[1])).locked():\n    print('held', flush=True)\n    time.sleep(60)\n"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process"):
            run(small(), out=tmp_path)
    finally:
        other.kill()
        other.wait()
        other.stdout.close()  # type: ignore[union-attr]
    assert run(small(), out=tmp_path).status == "finished"  # a kill releases the lock


def test_writes_are_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new" * 1000)
    assert path.read_bytes() == b"old"


def test_two_checkpoints_are_kept(tmp_path: Path) -> None:
    run(small(), out=tmp_path)
    assert [path.name for path in sorted((tmp_path / "checkpoint").iterdir())] == [
        "000004.safetensors",
        "000005.safetensors",
    ]


def test_no_folder_nothing_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(small())
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        run(small(**{"data.source": "digit"}), out=tmp_path / "runs" / "typo")
    assert not (tmp_path / "runs" / "typo").exists()


def test_the_final_model_is_what_was_evaluated(tmp_path: Path) -> None:
    finished = run(small(), out=tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == finished.weights.keys()
    assert all(torch.equal(weights[name], finished.weights[name]) for name in weights)
    assert FedAvg() == FedAvg()


def test_what_is_read_lies_where_torch_would_put_it(tmp_path: Path) -> None:
    """A product over tensors at odd addresses is summed in another order: a resumed run would end with other bits."""
    memory = {client: {"kept": torch.randn(1, 7), "one": torch.randn(1, 1)} for client in range(5)}
    state = State(1, ServerState(torch.randn(1, 7), {}, {}), memory, {})
    write_checkpoint(tmp_path / "checkpoint.safetensors", state, "hash")
    read = read_checkpoint(tmp_path / "checkpoint.safetensors", ["hash"], CPU)
    assert all(rows.data_ptr() % 64 == 0 for kept in read.memory.values() for rows in kept.values())
    assert read.server.w.data_ptr() % 64 == 0


def test_a_copy_of_a_checkpoint_under_another_name_is_ignored(tmp_path: Path) -> None:
    stopped(small(), tmp_path, 3)
    first = sorted((tmp_path / "checkpoint").glob("*.safetensors"))[0]
    shutil.copy(first, first.with_name(f"{first.stem} copy.safetensors"))
    assert run(small(), out=tmp_path).test_accuracy == run(small()).test_accuracy
