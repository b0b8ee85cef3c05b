"""The clients of a run spread over Ray actors, on real clusters whose parts are killed: the bits of one machine."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clusters import ended, marked, ray_cluster, rounds_done, rounds_of, start
from observers import Callbacks
from step_cases import CASES, PERSONAL, StepCase, assert_as_reference, played_and_recorded
from typer.testing import CliRunner

import fedgg
from fedgg.cli import app
from fedgg.cluster.connect import Resources, connected, ray_address
from fedgg.engines import Fused, Stacked
from fedgg.engines.devices import Devices
from fedgg.engines.workers.process import pack, unpack
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.observer import Observer
from fedgg.lab.run_processes import Job

pytest.importorskip("ray")
from fedgg.cluster.actors import ActorPool, run_on_actors
from fedgg.cluster.study_on_ray import driver_info_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::FutureWarning"
)
slow = pytest.mark.slow
ON_ACTORS = [case for case in [*CASES, *PERSONAL] if case.model is None and not case.name.endswith("three of six")]
ROUNDS = 12


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray of three cores on this machine."""
    with connected(ray_address("ray:local"), 3) as ray:
        yield ray
    del ray
    gc.collect()  # files that Ray leaves open are noticed here, where such warnings are ignored


@contextmanager
def devices_on(ray: Any, count: int, each: Any = Fused) -> Iterator[Devices]:
    options = {"num_cpus": 1, "max_restarts": 0}
    pool = ActorPool(ray, "ray", count, options, driver_info_of(Path(), "", []), pytest.fail)
    with Devices(",".join(["cpu"] * count), each, notice=pytest.fail, pool=pool) as engine:
        yield engine


def same_files(folder: Path, expected: Path) -> None:
    for name in ("model.safetensors", "partition.npz"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    assert rounds_of(folder) == rounds_of(expected)
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_a_run_on_two_actors_has_the_bits_of_one_process(ray: Any, tmp_path: Path) -> None:
    """With state that travels with the clients, and an algorithm, a model and data that are sent as objects."""

    class Inner(fedgg.FedProx):
        """One that no module has."""

    notices = list[str]()
    observer = Callbacks(notice=notices.append)
    inputs, labels = torch.randn(300, 6, generator=torch.manual_seed(0)).numpy(), np.arange(300) % 3
    own = {"algorithm": Inner(mu=0.1), "model": lambda: torch.nn.Linear(6, 3), "data": (inputs, labels, inputs, labels)}
    experiment = Experiment(rounds=3, model={"name": "linear"}, local={"epochs": 1, "batch": 8}, split={"beta": 1.0})
    for name, objects in (("scaffold", {"algorithm": "scaffold"}), ("own", own)):
        fedgg.run(experiment, **objects, out=tmp_path / name / "here")
        fedgg.run(experiment, **objects, out=tmp_path / name / "ray", on="ray:local", actors=2, observer=observer)
        same_files(tmp_path / name / "ray", tmp_path / name / "here")
    assert any("fused in each of 2 Ray actors" in sentence for sentence in notices)
    assert not any("alone" in sentence for sentence in notices)


@slow
@pytest.mark.parametrize("each", [Fused, partial(Stacked, "fp64")], ids=["fused", "stacked"])
def test_clients_spread_over_actors_take_the_reference_steps(ray: Any, each: Any) -> None:
    with devices_on(ray, 2, each) as engine:
        for case in ON_ACTORS:
            check_case(case, engine)


def check_case(case: StepCase, engine: Devices) -> None:
    try:
        assert_as_reference(case, *played_and_recorded(case.federation(), engine))
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_objects_without_a_file_are_mapped_or_copied() -> None:
    rows = {"x": torch.arange(100_000, dtype=torch.float32), "y": torch.ones(3)}
    for shared in (False, True):
        packed = pack(rows, shared=shared, in_file=False)
        assert packed.file is None
        again = unpack(pickle.loads(pickle.dumps(packed)))
        assert all(torch.equal(again[name], rows[name]) for name in rows)
        assert all(again[name].data_ptr() % 64 == 0 for name in rows)


def words(out: Path, *more: str, rounds: int = ROUNDS) -> list[str]:
    fixed = ["--model", "mlp", "--set", "model.hidden=256", "--algorithm", "scaffold", "--set", "local.epochs=40"]
    settings = ["--set", "server.checkpoint_every=1", "--set", "engine.name=fused"]
    return ["run", *fixed, *settings, "--rounds", str(rounds), "--out", str(out), *more]


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "run"
    ended(start(*words(folder)))
    return folder


def wait_for_rounds(folder: Path, count: int, call: subprocess.Popen[str], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while rounds_done(folder) < count and time.monotonic() < until:
        assert call.poll() is None, call.communicate()[0]
        time.sleep(0.02)


@slow
def test_a_raylet_is_killed_in_a_round(local_run: Path, tmp_path: Path) -> None:
    """Its actor is not replaced, for want of a node; the others train its clients, until there is a node again."""
    folder = tmp_path / "run"
    with ray_cluster(3) as cluster:
        call = start(*words(folder, "--on", cluster.on))
        wait_for_rounds(folder, 2, call)
        cluster.kill(cluster.nodes[0])
        wait_for_rounds(folder, 6, call)
        cluster.add()
        output = ended(call)
        assert not cluster.workers("ray::ClientActor")
    assert "clients are spread over 3 actors" in output
    assert "has died; another actor repeats it" in output
    same_files(folder, local_run)


@slow
def test_actors_are_killed(local_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ray_cluster(2) as cluster:
        call = start(*words(folder, "--on", cluster.on, "--actors", "2"))
        for count in (1, 5):
            wait_for_rounds(folder, count, call)
            for pid in cluster.workers("ray::ClientActor"):
                os.kill(pid, signal.SIGKILL)
        output = ended(call)
    assert "has died; another actor repeats it" in output
    same_files(folder, local_run)


@slow
def test_the_driver_is_killed_and_called_again(local_run: Path, tmp_path: Path) -> None:
    """On another number of actors; then interrupted, which leaves no actor; then without Ray."""
    folder = tmp_path / "run"
    with ray_cluster(3) as cluster:
        call = start(*words(folder, "--on", cluster.on, "--actors", "2"))
        wait_for_rounds(folder, 3, call)
        call.kill()
        call.communicate()
        no_actors(cluster)
        call = start(*words(folder, "--on", cluster.on, "--actors", "3"))
        wait_for_rounds(folder, 6, call)
        call.send_signal(signal.SIGINT)
        output, _ = call.communicate(timeout=60)
        assert call.returncode == 130, output
        assert "stopped; resume with: fedgg resume" in output
        assert "Traceback" not in output
        no_actors(cluster)
    ended(start("resume", str(folder)))
    same_files(folder, local_run)
    after = [json.loads(line)["after_round"] for line in (folder / "resumes.jsonl").read_text().splitlines()]
    assert after[0] >= 1  # its checkpoints may be a round behind its history
    assert after[1] >= 6


def no_actors(cluster: Any) -> None:
    until = time.monotonic() + 30
    while cluster.workers("ray::ClientActor") and time.monotonic() < until:
        time.sleep(0.2)
    assert not cluster.workers("ray::ClientActor")


@slow
def test_interrupted_in_a_ray_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    call = start(*words(folder, "--on", "ray:local", "--actors", "2"), MARK=str(folder))
    wait_for_rounds(folder, 2, call)
    assert "raylet" in marked(str(folder))
    call.send_signal(signal.SIGTERM)
    output, _ = call.communicate(timeout=60)
    assert "Traceback" not in output
    assert not marked(str(folder))


DEADLY = """
import os
import fedgg

class Deadly(fedgg.FedAvg):
    \"\"\"Ends the process that trains the largest client in the second round.\"\"\"

    def begin(self, w, client):
        if client.round.max() == 1 and client.examples.max() == LARGEST:
            os._exit(1)
        return super().begin(w, client)
"""


AS_COMMAND: dict[str, Any] = {"model": {"name": "linear"}, "local": {"epochs": 1}, "rounds": 3}


@slow
@pytest.mark.parametrize("lost", ["stop", "leave_out"])
def test_three_deaths_of_a_share(lost: str, tmp_path: Path) -> None:
    largest = max(build(Experiment(**AS_COMMAND)).examples)
    (tmp_path / "deadly.py").write_text(DEADLY.replace("LARGEST", str(largest)))
    settings = ["--model", "linear", "--set", "local.epochs=1", "--rounds", "3", "--set", f"engine.lost_clients={lost}"]
    command = ["run", "--algorithm", f"{tmp_path}/deadly.py:Deadly", *settings, "--out", str(tmp_path / "run")]
    call = start(*command, "--on", "ray:local", "--actors", "2")
    output, _ = call.communicate(timeout=200)
    assert "Traceback" not in output
    assert "its actor died 3 times" in output
    if lost == "stop":
        assert call.returncode == 2, output
        assert "finished rounds are kept, resume with" in output
        assert rounds_done(tmp_path / "run") == 1
    else:
        assert call.returncode == 0, output
        assert [bool(one["lost"]) for one in rounds_of(tmp_path / "run")] == [False, True, False]


@slow
def test_actors_that_do_not_start_are_named(tmp_path: Path) -> None:
    """More than the cluster has room for: the others train all clients, and the user is told why."""
    with ray_cluster(1) as cluster:
        settings = ["--set", "local.epochs=300", "--rounds", "8", "--model", "mlp", "--set", "model.hidden=256"]
        output = ended(start("run", *settings, "--on", cluster.on, "--actors", "2", "--out", str(tmp_path / "run")))
    assert "1 of 2 actors has not started, waiting for 1 CPU" in output
    assert "the others train its clients" in output


def test_mistakes_of_the_command(tmp_path: Path) -> None:
    def refused(*more: str) -> str:
        result = CliRunner().invoke(app, ["run", "--rounds", "1", "--out", str(tmp_path / "run"), *more])
        assert isinstance(result.exception, UserError), result.output
        return str(result.exception)

    assert "--actors needs a Ray cluster: add --on ray" in refused("--actors", "2")
    assert "--resources needs a Ray cluster: add --on ray" in refused("--resources", "cpu=2")
    assert "names no Ray cluster: write --on ray, or --device cpu,cpu" in refused("--on", "cpu,cpu")
    assert not (tmp_path / "run").exists()


def test_mistakes_in_python(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="in Python actors= needs on='ray'"):
        fedgg.run(Experiment(rounds=1), actors=2)
    with pytest.raises(UserError, match="give out=FOLDER"):
        fedgg.run(Experiment(rounds=1), on="ray")


def test_more_than_a_node_has_is_refused(ray: Any, tmp_path: Path) -> None:
    job = Job("", Experiment(rounds=1), tmp_path / "run", None)
    with pytest.raises(UserError, match=r"no node has what one run needs \(64 CPU"):
        run_on_actors(job, Observer(), address=ray_address("ray:local"), resources=Resources(cpu=64))
    assert not (tmp_path / "run").exists()
