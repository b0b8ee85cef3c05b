"""Two nodes, two rounds, TLS and authentication: the same bits as the loop, and no process is left."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from federations import Up, assert_as_embedded, members, start
from observers import TRACKER_OF_LINES

from fedgg.flower.local.namespaces import PrivateNetwork, hiding_available, private_network
from fedgg.lab.config import Experiment

EXPERIMENT = Experiment(
    rounds=2,
    algorithm={"name": "scaffold"},
    model={"name": "mlp", "hidden": 8},
    split={"clients": 2, "beta": 0.5},
    local={"epochs": 1},
    engine={"precision": "fp64"},
)


def no_node_reads_anothers_data(up: Up) -> None:
    """By what the long-lived processes of a node see, which those they start inherit, and by what they have open."""
    apart = hiding_available(up.out)
    for client, other in ((0, 1), (1, 0)):
        theirs = up.out / "federation" / "nodes" / f"client-{other}"
        assert stat.S_IMODE(theirs.stat().st_mode) == 0o700
        assert stat.S_IMODE((theirs / "data.npz").stat().st_mode) == 0o600
        for program in ("flower-supernode", "flower-superexec"):
            (process,) = up.find(f"client-{client}", program)
            assert not [file.path for file in process.open_files() if file.path.startswith(str(theirs))]
            assert not apart or nodes_seen_by(process, up.out) == [f"client-{client}"]
    (server,) = up.find("SuperLink", "flower-superlink")
    assert not apart or nodes_seen_by(server, up.out) == []


def nobody_else_reaches_it(up: Up) -> bool:
    """Not the SuperLink, nor a node, from this process; False where the system gives no network of its own."""
    if not namespaces_allowed():
        return False
    programs = [("SuperLink", "flower-superlink"), ("client-0", "flower-supernode"), ("client-1", "flower-supernode")]
    for part, program in programs:
        (process,) = up.find(part, program)
        words = process.cmdline()
        address = (words[words.index("--host") + 1], int(words[words.index("--port") + 1]))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 5)
        assert Path(f"/proc/{process.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    return True


def namespaces_allowed() -> bool:
    with private_network("127.0.0.1") as network:
        return isinstance(network, PrivateNetwork)


def nodes_seen_by(process: Any, out: Path) -> list[str]:
    view = Path(f"/proc/{process.pid}/root") / str(out).lstrip("/") / "federation" / "nodes"
    return [folder.name for folder in view.iterdir()]


def test_a_federation_of_two(tmp_path: Path) -> None:
    out, tracker = tmp_path / "run", tmp_path / "lines.py"
    tracker.write_text(TRACKER_OF_LINES)
    up = start(EXPERIMENT, out, "--track", f"{tracker}:Lines")
    try:
        up.until_round(1)
        no_node_reads_anothers_data(up)
        apart = nobody_else_reaches_it(up)
        said = up.wait()
        assert up.process.returncode == 0, said
        assert ("no other account can submit an app" if apart else "every account of this machine can submit") in said
        assert "after round 2" in said
        assert members(out) == []
    finally:
        up.stop()
    assert_as_embedded(EXPERIMENT, out, tmp_path)
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
    tracked = json.loads((out / "lines" / "lines.json").read_text())
    assert [line[:2] for line in tracked] == [["open", 2], ["log", 1], ["log", 2], ["end", "finished"]]


@pytest.mark.slow
def test_in_the_network_of_the_machine_it_says_who_can_submit_apps(tmp_path: Path) -> None:
    """Without TLS and authentication, too: what the line is about."""
    experiment = EXPERIMENT.changed({"rounds": 1})
    up = start(experiment, tmp_path / "run", "--shared-network", "--no-tls")
    try:
        said = up.wait()
        assert up.process.returncode == 0, said
        assert "every account of this machine can submit an app to 127.0.0.1:" in said
        assert members(tmp_path / "run") == []
    finally:
        up.stop()
    assert_as_embedded(experiment, tmp_path / "run", tmp_path)
