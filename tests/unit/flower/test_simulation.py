"""Flower's own simulation, with Ray: the loop's bits; and no memory is lost over many rounds of many clients."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from in_process_grid import small
from safetensors.torch import load_file

import fedgg
from fedgg.algorithms import ALGORITHMS
from fedgg.lab.config import Experiment
from fedgg.lab.store import Store

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
MEGABYTE = 1_000_000
LONGEST_SECONDS = 900
RAY_DID_NOT_START = b"The current node timed out during startup"  # it gives its helpers 15 s to import what they need


def simulate(experiment: Experiment, folder: Path, nodes: int) -> subprocess.Popen[bytes]:
    file = folder / "experiment.toml"
    file.write_text(experiment.to_toml())
    program = [sys.executable, str(Path(__file__).with_name("run_simulation.py"))]
    arguments = [str(file), str(folder / "run"), str(nodes)]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([*program, *arguments], stdout=log, stderr=log, env=os.environ | QUIET)


def simulate_to_the_end(experiment: Experiment, folder: Path, nodes: int) -> None:
    """Starts again where Ray did not start, as it may on a busy machine, and does not leave its processes behind."""
    for _ in range(3):
        process, end = simulate(experiment, folder, nodes), time.monotonic() + LONGEST_SECONDS
        while process.poll() is None and time.monotonic() < end and not _is_without_ray(folder):
            time.sleep(0.5)
        _kill(process)
        if not _is_without_ray(folder):
            break
    assert process.wait() == 0, (folder / "log").read_text()


def _is_without_ray(folder: Path) -> bool:
    return RAY_DID_NOT_START in (folder / "log").read_bytes()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        for part in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                part.kill()


def check_same(experiment: Experiment, folder: Path) -> None:
    plain, store = fedgg.run(experiment), Store(folder / "run")
    assert [line | {"seconds": 0} for line in store.rounds()] == [line | {"seconds": 0} for line in plain.rounds]
    for name, tensor in load_file(folder / "run" / "model.safetensors").items():
        assert torch.equal(tensor, plain.weights[name]), name


def check_owners(folder: Path) -> None:
    """Each client has its own files, whichever node answers for it."""
    owners = sorted(path.name for path in (folder / "run" / "nodes").iterdir())
    assert owners == [f"client-{number}" for number in range(4)]


def test_a_simulation_is_the_loop(tmp_path: Path) -> None:
    """In one life: `test_same_numbers.py` ends and resumes runs whose clients answer over messages."""
    experiment = small(algorithm__name="scaffold", data__holdout=0.2, rounds=2)
    simulate_to_the_end(experiment, tmp_path, nodes=3)  # for four clients: two share one
    check_same(experiment, tmp_path)
    check_owners(tmp_path)


@pytest.mark.slow
def test_a_simulation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    experiment = small(algorithm__name="scaffold", data__holdout=0.2)
    for rounds, nodes in ((2, 3), (4, 5)):  # for four clients: nodes share them, or have nothing to do
        simulate_to_the_end(experiment.changed({"rounds": rounds}), tmp_path, nodes)
    check_same(experiment, tmp_path)
    check_owners(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_in_a_simulation_is_the_loop(tmp_path: Path, name: str) -> None:
    experiment = small(algorithm__name=name, data__proxy=40 if ALGORITHMS[name].needs_proxy else 0, rounds=3)
    simulate_to_the_end(experiment, tmp_path, nodes=2)
    check_same(experiment, tmp_path)


@pytest.mark.slow
def test_memory_stays_flat_over_thirty_rounds_of_fifty_clients(tmp_path: Path) -> None:
    experiment = small(
        algorithm__name="fedgg",
        model__hidden=512,
        rounds=30,
        split__clients=50,
        split__scheme="iid",
        split__min_examples=1,
        local__batch=16,
        server__cohort=10,
    )
    process = simulate(experiment, tmp_path, nodes=50)
    rounds = tmp_path / "run" / "rounds.jsonl"
    seen: dict[int, float] = {}  # by round: megabytes of the whole tree
    while process.poll() is None:
        time.sleep(0.2)
        done = rounds.read_bytes().count(b"\n") if rounds.exists() else 0
        if done:
            seen[done] = max(seen.get(done, 0.0), _tree(process.pid))
    assert process.returncode == 0, (tmp_path / "log").read_text()
    print(sorted(seen.items()))
    early, late = ([seen[n] for n in seen if n in span] for span in (range(6, 13), range(23, 30)))
    assert sum(late) / len(late) < 1.03 * sum(early) / len(early) + 10
    check_same(experiment, tmp_path)


def _tree(pid: int) -> float:
    """What all its processes have for themselves: what they share is counted once at most."""
    total = 0.0
    try:
        for part in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                total += part.memory_full_info().pss / MEGABYTE
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
    except psutil.NoSuchProcess:
        return total
    return total
