"""Four nodes over TLS with authentication whose processes are killed or hang; takes minutes, so only in `make slow`.

Afterwards history and final weights are those of the loop with the same clients dropped in the same rounds, and every
restart is in the run folder.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("flwr")

from federations import PATIENCE, Up, assert_as_embedded, events, lost, members, start

import fedgg
from fedgg.analysis.chart_data import run_columns
from fedgg.flower.local.certificates import make_node_key
from fedgg.flower.local.processes import ProcessSpec, flower_environment, supervised
from fedgg.flower.local.setup import FederationFolder, free_ports
from fedgg.lab.config import Experiment
from fedgg.runfolder.read import read_run

pytestmark = pytest.mark.slow

EXPERIMENT = Experiment(
    rounds=5,
    algorithm={"name": "scaffold"},
    model={"name": "mlp", "hidden": 8},
    split={"clients": 4, "beta": 0.5},
    local={"epochs": 1},
    engine={"precision": "fp64"},
)


@pytest.fixture
def up(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Up]:
    running = start(EXPERIMENT, tmp_path / "run", *getattr(request, "param", ()))
    yield running
    running.stop()


def finish(up: Up) -> str:
    said = up.wait()
    assert up.process.returncode == 0, said
    assert members(up.out) == []
    return said


@pytest.mark.parametrize("up", [("--shared-network",)], indirect=True)  # a network of its own is out of reach
def test_a_node_with_a_wrong_key_is_refused(up: Up, tmp_path: Path) -> None:
    up.until_round(1)
    make_node_key(tmp_path / "key", tmp_path / "key.pub")
    paths = FederationFolder(up.out)
    address = up.find("SuperLink", "flower-superlink")[0].cmdline()
    port = address[address.index("--port") + 1]
    command = [
        *("flower-supernode", "--superlink", f"127.0.0.1:{port}", "--port", str(free_ports("127.0.0.1", 1)[0])),
        *("--root-certificates", str(paths.certificates.authority), "--node-config", "client-id=1"),
        *("--auth-supernode-private-key", str(tmp_path / "key")),
    ]
    with supervised(f"unregistered-{os.getpid()}") as begin:
        environment, log = flower_environment(tmp_path / "home", "127.0.0.1"), tmp_path / "log"
        unregistered = begin(ProcessSpec(f"unregistered-{os.getpid()}", "client-1", command, environment, log))
        assert unregistered.process.wait(PATIENCE) != 0
        assert "Failed to activate SuperNode" in log.read_text()
    finish(up)
    assert lost(up.out) == {}
    assert_as_embedded(EXPERIMENT, up.out, tmp_path)


def test_a_killed_node_is_restarted_with_its_client_state(up: Up, tmp_path: Path) -> None:
    up.until_round(2)
    up.next_client_app("client-2")
    up.hurt("client-2", "flower-supernode", signal.SIGKILL)
    said = finish(up)
    assert "client 2: its SuperNode ended with code -9" in said
    assert any(event.startswith("client 2: its SuperNode ended with code -9") for event in events(up.out))
    assert [told["who"] for told in run_columns(read_run(up.out))["processes"]] == ["client 2"]  # in the report
    assert all(client == 2 for _, client in lost(up.out))
    assert not any("notes" in record for record in up.rounds()), "its client state is missing"
    assert_as_embedded(EXPERIMENT, up.out, tmp_path)


def test_a_missing_client_state_is_recorded(up: Up) -> None:
    up.until_round(2)
    for file in FederationFolder(up.out).node(1).memory.rglob("*"):
        if file.is_file():
            file.unlink()
    finish(up)
    marked = [note for record in up.rounds() for note in record.get("notes", ())]
    assert {note["client"] for note in marked} == {1}
    assert "client state" in marked[0]["what"]
    assert lost(up.out) == {}


@pytest.mark.parametrize("up", [("--deadline", "40")], indirect=True)
def test_a_node_that_hangs_is_dropped_and_restarted(up: Up, tmp_path: Path) -> None:
    up.until_round(1)
    up.next_client_app("client-3")
    up.hurt("client-3", "flower-supernode", signal.SIGSTOP)
    said = finish(up)
    assert "no reply within 40 s" in [why for (_, client), why in lost(up.out).items() if client == 3]
    assert "client 3: no reply" in said
    assert any(event.startswith("client 3: no reply") for event in events(up.out))
    assert_as_embedded(EXPERIMENT, up.out, tmp_path)


def test_a_client_process_that_hangs(up: Up, tmp_path: Path) -> None:
    """Flower misses its heartbeat long before the deadline. Where the process hung before it took up its work, another
    one does it; else the client is left out. The one that hangs is taken down with the rest."""
    up.until_round(1)
    hung = up.next_client_app("client-3")
    hung.suspend()
    finish(up)
    assert not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE
    assert all(client == 3 for _, client in lost(up.out))
    assert_as_embedded(EXPERIMENT, up.out, tmp_path)


def test_a_node_that_computes_nan_is_dropped_and_named(tmp_path: Path) -> None:
    flag = tmp_path / "ill"
    code = Path(__file__).with_name("poisoned.py")
    fedgg.trust(code)  # here; the federation is asked by its own words
    model = {"name": f"{code}:Poisoned", "client": 1, "flag": str(flag)}
    experiment = EXPERIMENT.changed({"model.name": model["name"]} | {f"model.{key}": model[key] for key in model})
    up = start(experiment, tmp_path / "run", "--trust", str(code))
    try:
        up.until_round(1)
        flag.touch()
        up.until(lambda: lost(up.out))
        flag.unlink()
        finish(up)
    finally:
        up.stop()
    assert all(client == 1 and "finite" in why for (_, client), why in lost(up.out).items())
    assert_as_embedded(experiment, up.out, tmp_path)


def test_a_run_that_diverged_is_resumed_once_its_nodes_are_repaired(tmp_path: Path) -> None:
    flag, code = tmp_path / "ill", Path(__file__).with_name("poisoned.py")
    fedgg.trust(code)
    model = {"name": f"{code}:Poisoned", "client": -1, "flag": str(flag)}
    experiment = EXPERIMENT.changed({"model.name": model["name"]} | {f"model.{key}": model[key] for key in model})
    up = start(experiment, tmp_path / "run", "--trust", str(code))
    try:
        up.until_round(1)
        flag.touch()
        up.wait()
    finally:
        up.stop()
    assert json.loads((up.out / "summary.json").read_text())["status"] == "diverged"
    assert (up.out / "model.safetensors").exists()
    flag.unlink()
    again = start(experiment, up.out, again=("resume", str(up.out), "--trust", str(code)))
    try:
        finish(again)
    finally:
        again.stop()
    assert any("had diverged" in note for note in json.loads((up.out / "resumes.jsonl").read_text())["notes"])
    assert_as_embedded(experiment, up.out, tmp_path)


@pytest.mark.parametrize("program", ["flwr-serverapp", "flower-superlink"])
def test_a_killed_server_is_resumed(up: Up, tmp_path: Path, program: str) -> None:
    up.until_round(2)
    up.hurt("SuperLink", program, signal.SIGKILL)
    finish(up)
    resumed = [json.loads(line) for line in (up.out / "resumes.jsonl").read_text().splitlines()]
    # A kill between a round's line and its checkpoint takes the run back to the round before.
    assert [told["after_round"] >= 1 for told in resumed] == [True]
    assert any(("ServerApp" in event) or ("SuperLink" in event) for event in events(up.out))
    assert_as_embedded(EXPERIMENT, up.out, tmp_path)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_federation_leaves_no_process_and_can_be_resumed(
    up: Up, tmp_path: Path, sign: signal.Signals
) -> None:
    up.until_round(2)
    up.process.send_signal(sign)
    up.process.wait()
    up.stop()
    assert members(up.out) == []
    if sign is not signal.SIGKILL:
        assert up.process.returncode == 130
    again = start(EXPERIMENT, up.out, again=("resume", str(up.out)))
    try:
        finish(again)
    finally:
        again.stop()
    assert lost(up.out) == {}
    assert_as_embedded(EXPERIMENT, up.out, tmp_path)
