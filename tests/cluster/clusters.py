"""Ray clusters of several raylets on this machine, and the comparison of two study folders bit by bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
COMMAND = str(Path(sys.executable).with_name("fedgg"))
STORE = 80_000_000  # bytes, about the least that Ray takes
ALGORITHMS = ("fedavg", "fedprox", "scaffold", "fedgg")


class RayCluster:
    """A head without cores, and nodes of one core each."""

    def __init__(self, nodes: int):
        from ray.cluster_utils import Cluster

        settings = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=settings)
        self.nodes = [self.add() for _ in range(nodes)]

    @property
    def on(self) -> str:
        return f"ray:{self._cluster.address}"

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=STORE)

    def add_apart(self, hidden: Path, temporary: Path, megabytes: float = 200) -> subprocess.Popen[bytes]:
        """A node with a mount namespace of its own: an empty folder in place of `hidden`, and a small disk."""
        size = int(megabytes * 1024)
        mounts = f"mount -t tmpfs none {hidden} && mount -t tmpfs -o size={size}k none {temporary}"
        words = f"start --address={self._cluster.address} --num-cpus=1 --object-store-memory={STORE} --block"
        ray = Path(sys.executable).with_name("ray")
        command = ["unshare", "--mount", "sh", "-c", f"{mounts} && exec {ray} {words}"]
        environment = {**os.environ, "TMPDIR": str(temporary), "RAY_TMPDIR": "/tmp"}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def kill(self, node: Any) -> None:
        """The raylet, as a machine that loses its power; its workers are not asked."""
        for process in node.all_processes["raylet"]:
            os.kill(process.process.pid, signal.SIGKILL)

    def kill_head(self) -> None:
        """The raylet that the driver is connected to."""
        self.kill(self._cluster.head_node)

    def workers(self, title: str = "ray::run_request") -> list[int]:
        """Processes of this cluster that run a task of a study, or that have another title."""
        raylets = {one.process.pid for node in self._cluster.list_all_nodes() for one in node.all_processes["raylet"]}
        lines = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        processes = [line.split(maxsplit=2) for line in lines.splitlines()[1:]]
        return [int(pid) for pid, parent, args in processes if title in args and int(parent) in raylets]

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    cluster = RayCluster(nodes)
    try:
        yield cluster
    finally:
        cluster.close()


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def ended(call: subprocess.Popen[str], seconds: float = 400) -> str:
    """What a command has printed, which must have succeeded without a traceback."""
    output, _ = call.communicate(timeout=seconds)
    assert call.returncode == 0, output
    assert "Traceback" not in output
    return output


def study(out: Path, seeds: str, rounds: int, *more: str) -> list[str]:
    """The words of a comparison of four algorithms on digits with a linear model."""
    words = ["compare", *(word for name in ALGORITHMS for word in ("--algorithm", name)), "--model", "linear"]
    return [*words, "--set", "local.epochs=1", "--seeds", seeds, "--rounds", str(rounds), "--out", str(out), *more]


def marked(mark: str) -> list[str]:
    """The names of processes that have this text in their environment."""
    names = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                names.append((folder / "comm").read_text().strip())
    return names


def runs_of(folder: Path) -> list[Path]:
    listing = json.loads((folder / "study.json").read_text())
    return [Path(place) for places in listing["runs"].values() for place in places.values()]


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """Without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "checksum")} for line in lines]


def assert_same(study_folder: Path, expected: Path) -> None:
    """All runs finished, with the same final models, buffers and rounds, bit by bit."""
    assert sorted(runs_of(study_folder)) == sorted(runs_of(expected))
    for run in runs_of(expected):
        mine, theirs = study_folder / run, expected / run
        assert json.loads((mine / "summary.json").read_text())["status"] == "finished", run
        assert (mine / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes(), run
        assert (mine / "partition.npz").read_bytes() == (theirs / "partition.npz").read_bytes(), run
        assert rounds_of(mine) == rounds_of(theirs), run
    left = [path.name for path in study_folder.rglob("*") if path.name.startswith((".ray-", ".process-", ".waiting-"))]
    assert not left
    assert not list(study_folder.rglob("*.tmp"))


def resumes_of(study_folder: Path) -> dict[str, list[int]]:
    """By run, the rounds after which it was resumed."""
    resumes = {}
    for file in study_folder.rglob("resumes.jsonl"):
        after = [json.loads(line)["after_round"] for line in file.read_text().splitlines()]
        resumes[file.parent.relative_to(study_folder).as_posix()] = after
    return resumes


def rounds_done(study_folder: Path) -> int:
    files = study_folder.rglob("rounds.jsonl") if study_folder.exists() else ()
    return sum(file.read_bytes().count(b"\n") for file in files)
