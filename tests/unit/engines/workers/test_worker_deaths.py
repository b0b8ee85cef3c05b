"""Workers that are killed: their client is done again, with the same bits; a client that kills them all is given up."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from observers import Callbacks
from sent_models import Deadly

from fedgg.engines import Workers
from fedgg.engines.workers.pool import DEATHS
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin, next_job
from fedgg.lab.run_result import Run
from fedgg.lab.runner import run


def experiment(**changes: Any) -> Experiment:
    base = Experiment(
        rounds=3,
        split={"clients": 4},
        model={"name": "linear"},
        algorithm={"name": "scaffold"},
        local={"epochs": 2},
        engine={"name": "workers", "workers": 2},
    )
    return base.changed(changes)


def kill_all_workers() -> None:
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()


def run_with_kills(at: list[int], **given: Any) -> tuple[Run, list[str]]:
    """Kill all workers after these clients have come back, counted over the whole run."""
    said: list[str] = []
    count = 0

    def one_more(done: int, of: int) -> None:
        nonlocal count
        count += 1
        if count in at:
            kill_all_workers()

    return run(experiment(), observer=Callbacks(client=one_more, notice=said.append), **given), said


def test_a_killed_worker_is_replaced_and_its_client_done_again() -> None:
    ours, said = run_with_kills([1, 6])
    alone = run(experiment(**{"engine.name": "fused"}))
    assert all(torch.equal(ours.weights[name], alone.weights[name]) for name in alone.weights)
    assert ours.test_accuracy == alone.test_accuracy
    assert any("client" in sentence and "its process died" in sentence for sentence in said)


def deadly(**changes: Any) -> tuple[Experiment, Deadly, int]:
    """An experiment, an algorithm that kills the process of one of its clients, and which client that is."""
    chosen = experiment(**changes)
    sizes = build(chosen).examples
    victim = next(client for client, size in enumerate(sizes) if sizes.count(size) == 1)
    return chosen, Deadly(examples=sizes[victim]), victim


def test_a_client_on_which_all_processes_die_stops_the_run(tmp_path: Path) -> None:
    chosen, algorithm, victim = deadly()
    said: list[str] = []
    with pytest.raises(UserError, match=f"client {victim} of round 1.*{DEATHS} times.*fedgg resume {tmp_path}"):
        run(chosen, algorithm=algorithm, out=tmp_path, observer=Callbacks(notice=said.append))
    assert len([sentence for sentence in said if f"client {victim} of round 1" in sentence]) == DEATHS - 1
    assert multiprocessing.active_children() == []


def test_a_client_on_which_all_processes_die_is_left_out(tmp_path: Path) -> None:
    chosen, algorithm, victim = deadly(**{"engine.lost_clients": "leave_out", "rounds": 2})
    done = run(chosen, algorithm=algorithm, out=tmp_path)
    assert done.summary["clients_lost"] == 2
    for record in done.rounds:
        assert [gone["client"] for gone in record["lost"]] == [victim]
        assert "died" in record["lost"][0]["why"]
        assert [line["client"] for line in record["clients"]] == [c for c in range(4) if c != victim]


def test_workers_killed_while_they_have_nothing_to_do() -> None:
    federation = build(experiment())
    job = next_job(federation, begin(federation))
    with Workers(2) as engine:
        first = dict(engine.train(job))
        kill_all_workers()
        again = dict(engine.train(job))
    for client in job.cohort:
        assert torch.equal(first[client].up["delta"], again[client].up["delta"])  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    """Every worker imports the script again, and would start workers of its own."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import fedgg\n"
        "fedgg.run(fedgg.Experiment(rounds=1, engine={'name': 'workers', 'workers': 2}, local={'epochs': 1}))\n"
    )
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode != 0
    assert "__name__ == '__main__'" in found.stderr.splitlines()[-1]


@pytest.mark.slow
def test_thirty_kills_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """While they start, read, train and answer; on a slow machine the same client may be hit again and again."""
    monkeypatch.setattr("fedgg.engines.workers.pool.DEATHS", 100)
    chosen = experiment(**{"rounds": 25, "local.epochs": 8, "server.cohort": 3})
    chance, over = random.Random(0), threading.Event()

    def killer() -> None:
        for _ in range(30):
            time.sleep(chance.uniform(0.05, 0.6))
            children = multiprocessing.active_children()
            if over.is_set():
                return
            if children:
                os.kill(chance.choice(children).pid or 0, signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    ours = run(chosen)
    over.set()
    thread.join()
    alone = run(chosen.changed({"engine.name": "fused"}))
    assert all(torch.equal(ours.weights[name], alone.weights[name]) for name in alone.weights)
