"""Studies on Ray: nodes without the study folder, objects from Python, searches, and mistakes of the user."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from clusters import COMMAND, assert_same, ended, ray_cluster, resumes_of, start, study
from torch import nn
from typer.testing import CliRunner

import fedgg
from fedgg.cli import app
from fedgg.errors import UserError

pytest.importorskip("ray")
ray_warnings = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::FutureWarning"
)


def can_unshare() -> bool:
    return bool(shutil.which("unshare")) and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


def end_group(process: subprocess.Popen[bytes], signal_number: int) -> None:
    """The node and all its processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal_number)
    process.wait(timeout=30)


def refused(*words: str, **environment: str) -> str:
    """The one line with which a command ends."""
    call = start(*words, **environment)
    output, _ = call.communicate(timeout=120)
    assert call.returncode == 2, output
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, output
    return lines[0]


def refused_here(*words: str) -> str:
    """The same for a command called within this process."""
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


# Nodes that do not see the study folder -------------------------------------------------------------------------------


@pytest.mark.slow
@ray_warnings
@pytest.mark.skipif(not can_unshare(), reason="needs a mount namespace")
def test_a_node_without_the_study_folder(tmp_path: Path) -> None:
    """Its runs come back through the object store, and continue on another such node after it was killed."""
    out, disk = tmp_path / "out", tmp_path / "disk"
    out.mkdir()
    disk.mkdir()
    expected = tmp_path / "expected"
    rounds = 160  # a run takes several times the two seconds between two sendings
    ended(start(*study(expected, "0", rounds, "--jobs", "2")))
    with ray_cluster(0) as cluster:
        node = cluster.add_apart(out, disk)
        try:
            words = study(out / "study", "0", rounds, "--on", cluster.on)
            wait_for_a_core(cluster.on)
            call = start(*words)
            until = time.monotonic() + 120
            while not begun_after_another(out / "study") and time.monotonic() < until:
                assert call.poll() is None, call.communicate()[0]
                time.sleep(0.1)
            end_group(node, signal.SIGKILL)
            node = cluster.add_apart(out, disk)
            output = ended(call)
        finally:
            end_group(node, signal.SIGTERM)
    assert "has died; it continues from its last checkpoint" in output
    assert_same(out / "study", expected)
    assert [len(after) for after in resumes_of(out / "study").values()] == [1]
    assert all(after[0] > 0 for after in resumes_of(out / "study").values())
    assert not list(disk.iterdir())


def begun_after_another(folder: Path) -> bool:
    """Whether one run has ended and rounds of another have come back."""
    begun = {file.parent for file in folder.glob("*/*/rounds.jsonl") if file.stat().st_size}
    ended_runs = {file.parent for file in folder.glob("*/*/summary.json")}
    return bool(ended_runs) and bool(begun - ended_runs)


def wait_for_a_core(on: str) -> None:
    code = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
while ray.cluster_resources().get("CPU", 0) < 1:
    time.sleep(0.2)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, on.removeprefix("ray:")], check=True, timeout=60)


@pytest.mark.slow
@ray_warnings
@pytest.mark.skipif(not can_unshare(), reason="needs a mount namespace")
def test_a_full_disk_on_a_node(tmp_path: Path) -> None:
    out, disk = tmp_path / "out", tmp_path / "disk"
    out.mkdir()
    disk.mkdir()
    words = study(out / "study", "0", 200)
    with ray_cluster(0) as cluster:
        node = cluster.add_apart(out, disk, megabytes=0.06)
        try:
            wait_for_a_core(cluster.on)
            line = refused(*words, "--on", cluster.on)
        finally:
            end_group(node, signal.SIGTERM)
    assert "No space left on device" in line
    assert "on the node" in line
    ended(start(*words, "--jobs", "2"))  # nothing of it is in the way


# Objects from Python, and searches ------------------------------------------------------------------------------------


@pytest.mark.slow
@ray_warnings
def test_objects_from_python(tmp_path: Path) -> None:
    """Arrays go once into the object store; models and algorithms of this file are sent with the tasks."""

    class Own(fedgg.FedAvg):
        """An algorithm that no module has."""

    random = np.random.default_rng(0)
    x = random.normal(size=(400, 6)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    settings = {"rounds": 4, "split": {"clients": 4, "scheme": "iid"}, "local": {"batch": 16, "epochs": 1}}
    results = {}
    for on in (None, "ray:local"):
        results[on] = fedgg.compare(
            {"own": Own(), "prox": fedgg.FedProx(mu=0.1)},
            settings,
            seeds=(0, 1),
            model=lambda: nn.Linear(6, 2),
            data=(x[:300], y[:300], x[300:], y[300:]),
            out=tmp_path / str(on),
            on=on,
        )
    assert results[None].final == results["ray:local"].final
    assert_same(tmp_path / "ray:local", tmp_path / "None")


@pytest.mark.slow
@ray_warnings
def test_a_study_of_runs_over_several_devices(tmp_path: Path) -> None:
    """A list in the experiment: the clients of each run are spread over actors of two nodes."""
    words = ["compare", "--algorithm", "fedavg", "--algorithm", "scaffold", "--model", "linear", "--rounds", "3"]
    words += ["--set", "local.epochs=1", "--seeds", "0", "--jobs", "2"]
    ended(start(*words, "--out", str(tmp_path / "here")))
    with ray_cluster(2) as cluster:
        spread = ("--set", "engine.device=cpu,cpu", "--on", cluster.on)
        output = ended(start(*words, "--out", str(tmp_path / "ray"), *spread))
    assert "fused in each of 2 Ray actors" in output
    assert_same(tmp_path / "ray", tmp_path / "here")


OWN = """
import fedgg

class Own(fedgg.FedProx):
    \"\"\"An algorithm of a file.\"\"\"
"""


@pytest.mark.slow
def test_ray_client_and_code_of_a_file(tmp_path: Path) -> None:
    """The file is named relative to the folder of the command, and allowed by being typed."""
    (tmp_path / "own.py").write_text(OWN)
    ray, port, client = Path(sys.executable).with_name("ray"), free_port(), free_port() + 1
    words = ["start", "--head", f"--port={port}", f"--ray-client-server-port={client}", "--num-cpus=2", "--block"]
    words += ["--object-store-memory=80000000", "--include-dashboard=false"]
    head = subprocess.Popen([ray, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not answers(client) and time.monotonic() < until:
            time.sleep(0.5)
        for name, on in (("here", ("--jobs", "1")), ("client", ("--on", f"ray://127.0.0.1:{client}"))):
            settings = ["--rounds", "3", "--seeds", "0,1", "--model", "linear", "--out", name, *on]
            command = [COMMAND, "compare", "--algorithm", "own.py:Own", "--algorithm", "fedavg", *settings]
            call = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
            assert call.returncode == 0, call.stderr
    finally:
        end_group(head, signal.SIGTERM)
    assert_same(tmp_path / "client", tmp_path / "here")


def free_port() -> int:
    """Above those that Ray gives to its workers."""
    for port in range(20100 + os.getpid() % 5000, 30000):
        if not answers(port):
            return port
    raise AssertionError("no port is free")


def answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_search_has_the_same_trials(tmp_path: Path) -> None:
    words = ["tune", "--algorithm", "fedavg", "--algorithm", "fedprox", "--trials", "6", "--rounds", "5"]
    words += ["--model", "linear", "--set", "local.epochs=1"]
    ended(start(*words, "--jobs", "1", "--out", str(tmp_path / "here")))
    ended(start(*words, "--on", "ray:local", "--jobs", "2", "--out", str(tmp_path / "ray")))
    trials = []
    for name in ("here", "ray"):
        lines = [json.loads(line) for line in (tmp_path / name / "trials.jsonl").read_text().splitlines()]
        trials.append(sorted((line["algorithm"], line["number"], line["settings"], line["scores"]) for line in lines))
    assert trials[0] == trials[1]
    assert len(trials[0]) == 12


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_addresses_that_are_none(tmp_path: Path) -> None:
    for on in ("ray:", "ray:host", "ray://host", "ray:host:99999", "rays", "cuda:0,cpu", "cuda:x,1"):
        with pytest.raises(UserError, match=r"write|one kind of device"):
            fedgg.compare([fedgg.FedAvg()], on=on, out=tmp_path / "study")
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("address", ["ray:127.0.0.1:1", "ray://127.0.0.1:1"])
def test_nothing_answers_at_the_address(address: str, tmp_path: Path) -> None:
    line = refused_here(*study(tmp_path / "study", "0", 2, "--on", address))
    assert "nothing answers at 127.0.0.1:1 (Connection refused)" in line


@pytest.mark.skipif(not can_unshare(), reason="needs a process namespace")
def test_no_cluster_on_this_machine(tmp_path: Path) -> None:
    """Ray looks for one among all processes, so that the command gets a process namespace of its own."""
    words = study(tmp_path / "study", "0", 2, "--on", "ray:auto")
    command = ["unshare", "--pid", "--fork", "--mount-proc", COMMAND, *words]
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    call = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert call.returncode == 2
    assert "error: --on ray:auto: no Ray cluster runs on this machine" in call.stderr


def test_ray_that_does_not_start_on_a_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives its helpers 15 s to import what they need; what it raises then is a bare Exception."""

    def init(**options: object) -> None:
        raise Exception(
            "The current node timed out during startup. This could happen because some of the raylet failed"
        )

    monkeypatch.setattr("ray.init", init)
    line = refused_here(*study(tmp_path / "study", "0", 2, "--on", "ray:local"))
    assert line.startswith(
        "--on ray:local: Ray's processes did not start within its limits: try again when this machine"
    )


def test_without_ray(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ModuleNotFoundError('no ray', name='ray')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    line = refused(*study(tmp_path / "study", "0", 2, "--on", "ray"), PYTHONPATH=path)
    assert "this needs ray, which is not installed: pip install 'fedgg[ray]'" in line


@pytest.mark.slow
def test_a_cluster_without_what_a_run_needs(tmp_path: Path) -> None:
    """Such a task would wait forever."""
    words = study(tmp_path / "study", "0", 2, "--on", "ray:local")
    assert "the cluster has no GPU, and the runs ask for one" in refused(*words, "--device", "cuda")
    assert "no node has what one run needs (64 CPU" in refused(*words, "--resources", "cpu=64")


def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    words = study(tmp_path / "study", "0", 2)
    assert "--shard is for jobs without Ray" in refused_here(*words, "--on", "ray", "--shard", "1/2")
    assert "Ray assigns the devices" in refused_here(*words, "--on", "ray", "--device", "cuda:0,1")
    assert "--resources are those of a Ray task" in refused_here(*words, "--resources", "gpu=1")
    assert "--resources 'gpu=many'" in refused_here(*words, "--on", "ray", "--resources", "gpu=many")
    assert "write --device cpu,cpu" in refused_here(*words, "--on", "cpu,cpu")
