"""Two nodes, two rounds, TLS and authentication: a federation ends with the bits of the embedded loop, and is gone."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from federations import Up, assert_as_embedded, members, start

from fedgg.flower.flower_processes import cells_allowed
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
    apart = cells_allowed(up.out)
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


def nodes_seen_by(process: Any, out: Path) -> list[str]:
    view = Path(f"/proc/{process.pid}/root") / str(out).lstrip("/") / "federation" / "nodes"
    return [folder.name for folder in view.iterdir()]


def test_a_federation_of_two(tmp_path: Path) -> None:
    out = tmp_path / "run"
    up = start(EXPERIMENT, out)
    try:
        up.until_round(1)
        no_node_reads_anothers_data(up)
        said = up.wait()
        assert up.process.returncode == 0, said
        assert "after round 2" in said
        assert members(out) == []
    finally:
        up.stop()
    assert_as_embedded(EXPERIMENT, out, tmp_path)
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
