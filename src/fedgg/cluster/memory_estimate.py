"""How much memory of a node's host a task needs, estimated before it is submitted, as Ray's resource `memory`.

Ray starts a task where this much is not taken by other tasks; it does not limit what the task uses. The factors were
chosen by the measured peak of whole runs (tests/cluster/test_memory_estimate.py): the estimate is above it, and at most
2.5 times it there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

from fedgg.cluster.connect import amounts, shown
from fedgg.data.batch_preparation import CHUNK
from fedgg.engines.flops import activations, largest_activation
from fedgg.errors import UserError
from fedgg.lab.build import Federation, build
from fedgg.lab.config import Experiment
from fedgg.lab.preflight_checks import HERE
from fedgg.lab.run_processes import Job

PROCESS = 550e6  # bytes of a Ray worker with fedgg and torch that trains a very small model (torch 2.13, Ray 2.55.1)
CUDA = 3e9  # bytes that CUDA and its libraries take of the host's memory: assumed, not measured
LOADING = 3.5  # copies of a data set while it is read and decoded from its files
STEP = 3  # gradients, work space and activations, in activations of a batch
MEGABYTE = 1 << 20


def bytes_of_runs(federation: Federation, runs: int = 1, share: int = 1) -> float:
    """Of a task that trains these runs as one stack, or a part of the clients of one (`share`: one part in so many).

    `federation`: as one of the runs builds it on a CPU. Models, updates and activations of a run on a GPU are there;
    what its checkpoints and its clients' state take is counted as if it were in the host's memory.
    """
    experiment, net, feed = federation.experiment, federation.net, federation.feed
    model, number = net.start.nbytes, net.start.element_size()
    kept = sum(row.nbytes for row in federation.algorithm.client_memory(net.start).values())  # also where clients share
    kept += model * (experiment.personal is not None)
    state = min(len(federation.filled) * kept, experiment.server.memory_limit_mb * MEGABYTE)
    of_server = 6 * model + sum(row.nbytes for row in federation.algorithm.server_memory(net.start).values())
    cohort = -(-federation.cohort_size // share)
    updates = cohort * (5 * model + 4 * kept)  # rows that clients send or end with, and copies of them
    data = sum(x.element_size() * x.nelement() for x in feed.examples_of_all)
    batch = federation.work.batch or max(federation.examples)
    work = number * max(STEP * batch * activations(net), 3 * CHUNK * largest_activation(net))
    return PROCESS + LOADING * data + runs * (of_server + updates + 2 * state + work)


class MemoryEstimates:
    """The memory of the tasks of one command: one federation is built, on this machine, for each kind of run."""

    def __init__(self) -> None:
        self._known: dict[Hashable, float | None] = {}

    def of(self, job: Job, runs: int = 1, share: int = 1) -> float | None:
        """Bytes; None where the run cannot be built here, because of a mistake or because its data are elsewhere."""
        kind = (repr(job.experiment.changed({"seed": 0, "name": ""})), type(job.given.algorithm), runs, share)
        if kind not in self._known:
            try:
                self._known[kind] = _of_built(job, runs, share)
            except (UserError, ImportError):  # where it cannot be built on its node either, the task says why
                self._known[kind] = None
        return self._known[kind]


def _of_built(job: Job, runs: int, share: int) -> float:
    on_gpu = job.experiment.engine.devices[0] != "cpu"
    federation = built(job, job.experiment.changed(HERE) if on_gpu else job.experiment)
    return bytes_of_runs(federation, runs, share) + (CUDA if on_gpu else 0)


def built(job: Job, experiment: Experiment) -> Federation:
    """The federation of a run, in this process."""
    given = job.given
    return build(
        experiment,
        model=given.model,
        data=given.data,
        algorithm=given.algorithm,
        objective=given.objective,
        data_folder=job.data_folder,
    )


def with_memory(
    ray: ModuleType, options: dict[str, Any], estimate: float | None, notice: Callable[[str], None]
) -> dict[str, Any]:
    """The options of a task that names no memory, with the estimate; at most what a node has that has all else."""
    if "memory" in options:
        return options
    if estimate is None:
        notice("the memory of a task is not estimated: a run cannot be built on this machine (--resources memory=4G)")
        return options
    needs = amounts(options)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [node for node in nodes if all(node.get(name, 0) >= amount for name, amount in needs.items())]
    most = max((node.get("memory", 0.0) for node in fitting), default=estimate)
    if estimate > most:
        notice(
            f"a task needs about {shown({'memory': estimate})}, which no node has: it asks for what the largest node "
            f"has, {shown({'memory': most})} (an estimate: --resources memory=4G asks for another amount)"
        )
    return options | {"memory": int(min(estimate, most))}
