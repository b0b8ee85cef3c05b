"""The memory that a Ray task asks for by default, beside the measured peak of whole runs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from clusters import ended, ray_cluster, start, study

from fedgg.cluster.connect import Resources
from fedgg.cluster.memory_estimate import MemoryEstimates, with_memory
from fedgg.cluster.study_on_ray import task_options
from fedgg.lab.config import Experiment
from fedgg.lab.run_processes import Job

MOST = 2.5  # times the measured peak
PEAK = """
import sys
import time
from pathlib import Path
import fedgg, ray
import fedgg.cluster.task
fedgg.run(fedgg.Experiment(**eval(sys.argv[1])), out=sys.argv[2])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(status["VmHWM"].split()[0])
"""
RUNS: dict[str, dict[str, Any]] = {
    "a small model and SCAFFOLD": {"model": {"name": "linear"}, "algorithm": {"name": "scaffold"}},
    "an MLP, 50 clients and FedAvg": {
        "model": {"name": "mlp"},
        "split": {"clients": 50},
        "algorithm": {"name": "fedavg"},
    },
    "an MLP, 50 clients and SCAFFOLD": {
        "model": {"name": "mlp"},
        "split": {"clients": 50},
        "algorithm": {"name": "scaffold"},
    },
    "a ResNet-18 and FedGG": {"model": {"name": "resnet18"}, "server": {"cohort": 3}, "rounds": 1},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random, file = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "images.npz"
    arrays = dict[str, Any]()
    for name, count in (("train", 5000), ("test", 1000)):
        arrays[f"x_{name}"] = random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        arrays[f"y_{name}"] = random.integers(0, 10, count)
    np.savez(file, **arrays)
    return file


def job_of(settings: dict[str, Any], data_folder: Path | None = None) -> Job:
    return Job("", Experiment(**settings), Path(), data_folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", RUNS)
def test_the_estimate_is_above_the_peak_and_not_far(name: str, images: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    settings = {"rounds": 2, "data": {"source": f"npz:{images}"}, "local": {"steps": 2}, "engine": {"name": "fused"}}
    settings |= RUNS[name]
    words = [sys.executable, "-W", "ignore", "-c", PEAK, repr(settings), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    peak = 1024 * int(done.stdout.split()[-1])
    estimate = MemoryEstimates().of(job_of(settings))
    assert estimate is not None
    print(f"{name}: estimated {estimate / 1e6:.0f} MB, measured {peak / 1e6:.0f} MB, ratio {estimate / peak:.2f}")
    assert peak <= estimate <= MOST * peak


def test_more_clients_more_state_and_more_runs_need_more() -> None:
    estimates = MemoryEstimates()

    def of(settings: dict[str, Any], runs: int = 1, share: int = 1) -> float:
        estimate = estimates.of(job_of({"model": {"name": "mlp"}, "local": {"batch": 16}, **settings}), runs, share)
        assert estimate is not None
        return estimate

    fedavg, scaffold = {"algorithm": {"name": "fedavg"}}, {"algorithm": {"name": "scaffold"}}
    assert of(fedavg) < of(scaffold) < of({**scaffold, "split": {"clients": 40, "scheme": "iid"}})
    assert of({**scaffold, "server": {"memory_limit_mb": 0}}) < of(scaffold)
    assert of(fedavg, share=5) < of(fedavg) < of(fedavg, runs=3)


def test_a_run_that_cannot_be_built_here_has_no_estimate(tmp_path: Path) -> None:
    """Its task starts as before, and the notice names the way to ask for memory."""
    job, notices = job_of({"data": {"source": "cifar10"}}, tmp_path), list[str]()
    assert MemoryEstimates().of(job) is None
    options = task_options(job.experiment, Resources())
    assert with_memory(ray_of(), options, None, notices.append) == options
    assert "is not estimated" in notices[0]


def ray_of(*nodes: dict[str, float]) -> Any:
    return SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": node} for node in nodes])


def test_a_task_never_asks_for_more_than_a_suitable_node_has() -> None:
    notices = list[str]()
    options = task_options(Experiment(), Resources())
    small, large, without_core = {"CPU": 1, "memory": 2e9}, {"CPU": 4, "memory": 5e9}, {"CPU": 0, "memory": 9e9}
    ray = ray_of(small, large, without_core)
    assert with_memory(ray, options, 3e9, notices.append)["memory"] == 3e9
    assert not notices
    assert with_memory(ray, options, 7e9, notices.append)["memory"] == 5e9
    assert "needs about 7 GB memory, which no node has: it asks for what the largest node has, 5 GB" in notices[0]


def test_resources_override_the_estimate() -> None:
    for asked in (4e9, 0.0):
        options = task_options(Experiment(), Resources(memory=asked))
        assert with_memory(ray_of(), options, 1e9, pytest.fail)["memory"] == asked


OCCUPY = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
ray.get(ray.remote(num_cpus=1)(lambda: time.sleep(50)).remote())
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of Ray
def test_a_study_says_what_it_waits_for(tmp_path: Path) -> None:
    """Another program has the only core; the study begins when it ends."""
    pytest.importorskip("ray")
    with ray_cluster(1) as cluster:
        words = [sys.executable, "-W", "ignore", "-c", OCCUPY, cluster.on.removeprefix("ray:")]
        other = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(8)
        output = " ".join(ended(start(*study(tmp_path / "study", "0", 2, "--on", cluster.on))).split())
        other.wait(timeout=60)
    assert "memory (memory as estimated)" in output
    assert "waiting for 1 CPU, 0.5" in output
    assert "free on all of them: 0 CPU" in output
