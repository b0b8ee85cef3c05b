"""Studies on a real Ray cluster of several raylets, parts of which are killed: nothing is lost, with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from clusters import RayCluster, assert_same, ended, marked, ray_cluster, resumes_of, rounds_done, runs_of, start, study

from fedgg.lab.store import Store

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),  # of Ray
]
SEEDS, ROUNDS = "0-5", 40  # 24 runs


@pytest.fixture(scope="module")
def local_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "study"
    ended(start(*study(folder, SEEDS, ROUNDS, "--jobs", "2")))
    return folder


def wait_for_rounds(folder: Path, count: int, call: subprocess.Popen[str], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while rounds_done(folder) < count and time.monotonic() < until:
        assert call.poll() is None, call.communicate()[0]
        time.sleep(0.2)


def test_a_raylet_is_killed_and_another_started(local_study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    with ray_cluster(2) as cluster:
        call = start(*study(folder, SEEDS, ROUNDS, "--on", cluster.on))
        wait_for_rounds(folder, 150, call)
        cluster.kill(cluster.nodes[0])
        time.sleep(2)
        cluster.add()
        output = ended(call)
    assert "has died; it continues from its last checkpoint" in output
    assert_same(folder, local_study)
    resumes = resumes_of(folder)
    assert len(resumes) == 1, resumes  # that of the dead node, from a checkpoint; all others ran once
    assert sum(map(len, resumes.values())) == 1
    notices = [line for line in output.splitlines() if "note:" in line and "another process" in line]
    assert not notices or len(notices) <= 1


def test_workers_are_killed(local_study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    with ray_cluster(2) as cluster:
        call = start(*study(folder, SEEDS, ROUNDS, "--on", cluster.on))
        for count in (100, 350, 600):
            wait_for_rounds(folder, count, call)
            for pid in cluster.workers():
                os.kill(pid, signal.SIGKILL)
        ended(call)
    assert_same(folder, local_study)
    assert 1 <= sum(map(len, resumes_of(folder).values())) <= 6


def test_the_driver_is_killed_and_called_again(local_study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    with ray_cluster(2) as cluster:
        words = study(folder, SEEDS, ROUNDS, "--on", cluster.on)
        call = start(*words)
        wait_for_rounds(folder, 300, call)
        call.kill()
        call.communicate()
        finished = {run for run in runs_of(folder) if (folder / run / "summary.json").exists()}
        before = {run: (folder / run / "summary.json").stat().st_mtime_ns for run in finished}
        assert 0 < len(finished) < 24
        ended(start(*words))
    assert_same(folder, local_study)
    for run, written in before.items():
        assert (folder / run / "summary.json").stat().st_mtime_ns == written, "a finished run is not run again"
    assert sum(map(len, resumes_of(folder).values())) <= 2


def test_the_node_of_the_driver_is_killed(local_study: Path, tmp_path: Path) -> None:
    """One line, no process, and another cluster continues."""
    folder = tmp_path / "study"
    with ray_cluster(1) as cluster:
        call = start(*study(folder, SEEDS, ROUNDS, "--on", cluster.on))
        wait_for_rounds(folder, 150, call)
        cluster.kill_head()
        output, _ = call.communicate(timeout=120)
        assert call.returncode == 2, output
        assert "the Ray node of this machine has died" in output
        assert "Traceback" not in output
        assert not cluster.workers()
    ended(start(*study(folder, SEEDS, ROUNDS, "--on", "ray:local", "--jobs", "2")))
    assert_same(folder, local_study)


def test_ctrl_c_leaves_no_process_and_a_study_to_continue(local_study: Path, tmp_path: Path) -> None:
    """In a cluster that stays, and in a Ray that the command has started."""
    folder = tmp_path / "study"
    with ray_cluster(1) as cluster:
        _interrupt(folder, cluster, signal.SIGINT)
        assert not cluster.workers()
        _interrupt(folder, cluster, signal.SIGTERM)
        assert not cluster.workers()
    _interrupt(folder, None, signal.SIGINT)
    assert not marked(str(folder)), "no process of the Ray that the command had started"
    ended(start(*study(folder, SEEDS, ROUNDS, "--jobs", "2")))  # and without Ray it goes on as well
    assert_same(folder, local_study)


def _interrupt(folder: Path, cluster: RayCluster | None, number: signal.Signals) -> None:
    on = ("--on", "ray:local" if cluster is None else cluster.on)
    before = rounds_done(folder)
    call = start(*study(folder, SEEDS, ROUNDS, *on), MARK=str(folder))
    wait_for_rounds(folder, before + 100, call)
    assert cluster is not None or "raylet" in marked(str(folder))
    call.send_signal(number)
    output, _ = call.communicate(timeout=60)
    assert call.returncode == 130, output
    assert "run the same command again to continue" in output
    assert "Traceback" not in output
    for run in runs_of(folder):
        store = Store(folder / run)
        if store.rounds():
            assert len(store.rounds()) == int(sorted((folder / run / "checkpoint").glob("*.safetensors"))[-1].stem)
