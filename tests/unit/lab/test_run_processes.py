"""Several runs at a time: workers and parents may be killed at any moment."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from observers import Events

from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.resume import newest_state
from fedgg.lab.run_processes import ATTEMPTS, Job, run_jobs
from fedgg.lab.run_session import interrupts_deferred
from fedgg.lab.store import Store
from fedgg.runfolder.checksums import newest_checkpoint

ALIVE = 20.0  # seconds a process may take to notice that it is alone


def experiment(**changes: Any) -> Experiment:
    return Experiment(
        rounds=4, split={"clients": 3}, local={"epochs": 1}, model={"name": "linear"}, algorithm={"name": "fedavg"}
    ).changed(changes)


def jobs(folder: Path, count: int = 3, **changes: Any) -> list[Job]:
    return [Job(f"job {n}", experiment(seed=n, **changes), folder / str(n), None) for n in range(count)]


def test_stopped_workers_write_a_checkpoint_of_their_last_round(tmp_path: Path) -> None:
    """Ctrl-C in the parent, between two checkpoints of its workers."""
    heard: dict[str, int] = {}

    def press_ctrl_c(run: str, kind: str, what: Any) -> None:
        if kind == "round":
            heard[run] = what["round"]
        if len(heard) == 2 and min(heard.values()) >= 3:
            raise KeyboardInterrupt

    some = jobs(tmp_path, 2, **{"rounds": 100_000, "server.checkpoint_every": 50_000})
    with pytest.raises(KeyboardInterrupt):
        run_jobs(some, 2, Events(press_ctrl_c))
    assert not multiprocessing.active_children()
    for job in some:
        rounds = len((job.folder / "rounds.jsonl").read_text().splitlines())
        assert rounds >= heard[job.name]
        assert newest_checkpoint(job.folder) == rounds


class KillingObserver(Events):
    """Records what happens, and kills all workers at certain events: the first of each kind, or every one."""

    def __init__(self, *kill_at: tuple[str, int], always: bool = False) -> None:
        super().__init__(self.hear)
        self.ended: list[str] = []
        self.notices: list[str] = []
        self.kill_at, self.always = {*kill_at}, always

    def hear(self, run: str, kind: str, what: Any) -> None:
        if kind == "ended":
            self.ended.append(f"{run} {what['status']}")
        if kind == "notice":
            self.notices.append(what)
        number = what["round"] if kind == "round" else 0
        if (kind, number) in self.kill_at:
            self.kill_at -= set() if self.always else {(kind, number)}
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGKILL)
                child.join()


def test_killed_workers_are_replaced_and_runs_go_on(tmp_path: Path) -> None:
    """Killed in a round, and between two jobs, when a worker is idle and nothing is read from it."""
    observer = KillingObserver(("round", 2), ("ended", 0))
    run_jobs(jobs(tmp_path, 3), 2, observer)
    assert not observer.kill_at, "both happened"
    assert sorted(observer.ended) == [f"job {n} finished" for n in range(3)]
    assert any("killed" in sentence for sentence in observer.notices)
    for n in range(3):
        assert len((tmp_path / str(n) / "rounds.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
def test_a_run_whose_worker_always_dies_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"killed {ATTEMPTS} times"):
        run_jobs(jobs(tmp_path, 2), 2, KillingObserver(("started", 0), always=True))
    assert multiprocessing.active_children() == []


def test_a_mistake_in_one_job_is_told_and_leaves_no_worker(tmp_path: Path) -> None:
    wrong = jobs(tmp_path, 1, **{"data.source": "npz:nosuch.npz"}) + jobs(tmp_path / "other", 1)
    with pytest.raises(UserError, match=r"nosuch\.npz"):
        run_jobs(wrong, 2, KillingObserver())
    assert multiprocessing.active_children() == []


def children_of(group: int) -> list[int]:
    """Processes of a process group that are alive (no zombies)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def start_study(folder: Path, epochs: int = 1) -> subprocess.Popen[str]:
    """A comparison of two long runs in two workers, in a process group of its own; waits until both have begun."""
    command = [sys.executable, "-m", "fedgg", "compare", "--algorithm", "fedavg"]
    command += ["--algorithm", "fedgg", "--seeds", "0", "--rounds", "100000", "--jobs", "2", "--model", "linear"]
    command += ["--set", f"local.epochs={epochs}", "--out", str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: len([*folder.glob("*/seed-0/config.toml")]) == 2, "both runs", 60)
    return process


def _lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def wait_for(truth: Any, what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")


@needs_proc
def test_a_killed_parent_leaves_no_orphan(tmp_path: Path) -> None:
    """Workers end at once, not with the round they are in: here that would take hours."""
    parent = start_study(tmp_path, epochs=1_000_000)
    try:
        assert len(children_of(parent.pid)) >= 3
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        wait_for(lambda: not children_of(parent.pid), "the workers to end", ALIVE)
    finally:
        for left in children_of(parent.pid):
            os.kill(left, signal.SIGKILL)
        parent.communicate()


@needs_proc
def test_ctrl_c_stops_everything_and_the_study_can_go_on(tmp_path: Path) -> None:
    parent = start_study(tmp_path)
    # Two rounds in the history: the checkpoint of the first is there.
    wait_for(
        lambda: [_lines(file) >= 2 for file in tmp_path.glob("*/seed-0/rounds.jsonl")] == [True] * 2, "two rounds", 60
    )
    try:
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=ALIVE)
        assert parent.returncode == 130
        assert "Traceback" not in errors
        assert "stopped" in errors
        wait_for(lambda: not children_of(parent.pid), "the workers to end", ALIVE)
    finally:
        for left in children_of(parent.pid):
            os.kill(left, signal.SIGKILL)
    for folder in tmp_path.glob("*/seed-0"):
        store = Store(folder)
        with store.locked():
            state, refused = newest_state(store, store.experiment(), torch.device("cpu"))
        assert state is not None
        assert not refused
        assert len(store.rounds()) >= state.rounds_done


@needs_proc
@pytest.mark.slow
def test_ctrl_c_while_workers_start_prints_no_traceback(tmp_path: Path) -> None:
    """Workers import torch for two seconds before they can ask to be left alone."""
    command = [sys.executable, "-m", "fedgg", "compare", "--rounds", "1000", "--jobs", "2"]
    for delay in (1.5, 2.0, 2.5, 3.0, 3.5):
        parent = subprocess.Popen(
            [*command, "--out", str(tmp_path / str(delay))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        time.sleep(delay)
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=ALIVE)
        assert "Traceback" not in errors, f"after {delay} s"
        assert parent.returncode == 130
        wait_for(lambda group=parent.pid: not children_of(group), "the workers to end", ALIVE)


def test_an_interrupt_while_a_round_is_recorded_takes_effect_after_it() -> None:
    before, steps = signal.getsignal(signal.SIGINT), list[str]()

    def record() -> None:
        with interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("recorded")
        steps.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        record()
    assert (steps, signal.getsignal(signal.SIGINT)) == (["recorded"], before)
