"""Joining a Ray cluster, or starting Ray on this machine; what the cluster has to offer.

Ray is imported here and in the other files of this package only, when a study asks for it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from fedgg.errors import UserError, missing_extra

FORMS = (
    "ray (the cluster of this machine, else Ray on this machine alone), ray:local, ray:auto (an existing cluster), "
    "ray:HOST:PORT (a cluster of which this machine is a node) or ray://HOST:PORT (Ray Client, from any machine)"
)
OBJECT_STORE = 100_000_000  # bytes on this machine, where Ray is started here: messages and model files
CONNECT_SECONDS = 5.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray sends usage statistics otherwise
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a task without a GPU keeps the variables of its node
    "RAY_DEDUP_LOGS": "0",
}


@dataclass(frozen=True)
class RayAddress:
    """`--on ray...`: `init` is the address as `ray.init` takes it; None: that of this machine, or a new one."""

    text: str
    init: str | None


def is_ray(text: str) -> bool:
    return text.partition(":")[0].strip().lower() == "ray"


def ray_address(text: str) -> RayAddress:
    """UserError where it is none of the forms."""
    rest = text.strip()[len("ray") :]
    if rest == "":
        return RayAddress(text, None)
    if rest in (":local", ":auto"):
        return RayAddress(text, rest[1:])
    words = re.fullmatch(r":(//)?([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:]+\]):(\d{1,5})", rest)
    if words is None or not 0 < int(words[3]) < 65536:
        raise UserError(f"--on {text!r} is not an address of a Ray cluster: write {FORMS}")
    return RayAddress(text, f"{'ray://' if words[1] else ''}{words[2]}:{words[3]}")


@dataclass(frozen=True)
class Resources:
    """What one task needs, by the names that Ray has for it: `num_cpus`, `num_gpus`, `memory`, and others by name."""

    cpu: float | None = None
    gpu: float | None = None
    memory: float | None = None
    others: Mapping[str, float] = field(default_factory=dict)


_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def resources_from(text: str) -> Resources:
    """`gpu=0.5,cpu=2,memory=4G,NAME=1`."""
    numbers: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        words = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)b?", value.strip().lower())
        name = key.strip()
        if words is None or not re.fullmatch(r"[A-Za-z]\w*", name) or (words[2] and name != "memory"):
            raise UserError(f"--resources {text!r}: write gpu=0.5, cpu=2, memory=4G or NAME=1, several with commas")
        numbers[name] = float(words[1]) * _UNITS[words[2]]
    others = {name: number for name, number in numbers.items() if name not in ("cpu", "gpu", "memory")}
    return Resources(numbers.get("cpu"), numbers.get("gpu"), numbers.get("memory"), others)


def import_ray() -> ModuleType:
    """UserError with the way to install it, where it is not installed."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise missing_extra(error) or error from error
    return ray


@contextmanager
def connected(address: RayAddress, cpus: int | None = None) -> Iterator[ModuleType]:
    """Ray, connected to the cluster; a Ray that was started here ends with the block.

    `cpus`: of a Ray that is started here; by default all cores. A connection that the program has made stays open.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    in_main_thread = threading.current_thread() is threading.main_thread()
    on_term = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    here = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if address.init in (None, "auto"):
                try:
                    _check_reachable(os.environ.get("RAY_ADDRESS", ""))
                    ray.init(address="auto", **quiet)
                except ConnectionError:
                    if address.init == "auto" or os.environ.get("RAY_ADDRESS"):
                        raise
                    ray.init(address="local", **here, **quiet)
            elif address.init == "local":
                ray.init(address="local", **here, **quiet)
            else:
                assert address.init is not None
                _check_reachable(address.init)
                ray.init(address=address.init, **quiet)
    except Exception as error:  # a bare one where Ray's processes do not start in time
        with suppress(Exception):
            ray.shutdown()
        raise UserError(f"--on {address.text}: {_reason(error)}") from error
    if on_term is not None:  # Ray puts its own in its place
        signal.signal(signal.SIGTERM, on_term)
    try:
        with _without_raylet_messages():
            yield ray
    finally:
        ray.shutdown()


@contextmanager
def _without_raylet_messages() -> Iterator[None]:
    """Ray prints pages of a dead raylet's log, whatever its options say; the driver reports such deaths in a line."""
    import ray._private.worker

    worker: Any = ray._private.worker
    before = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *arguments, **options: None
    try:
        yield
    finally:
        worker.print_to_stdstream = before


def _check_reachable(address: str) -> None:
    """ConnectionError where nothing listens: Ray itself would try for half a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ConnectionError(
            f"nothing answers at {host}:{port} ({reason}); start the cluster, or check host and port (6379 is the port "
            f"of `ray start --head`, 10001 that of ray://)"
        ) from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "Could not find any running Ray instance" in text:
        return "no Ray cluster runs on this machine: `ray start --head` starts one, and --on ray needs none"
    if "No node info found" in text or "node_ip_address" in text or "Can't find" in text:
        way_out = "`ray start --address=HOST:PORT` makes it one, and ray://HOST:10001 works from any machine"
        return f"this machine is not a node of that cluster: {way_out} ({text[:120]})"
    if "ersion mismatch" in text:
        return f"the cluster has another version of Ray or Python; install the same ({text[:300]})"
    if "timed out during startup" in text:
        return (
            f"Ray's processes did not start within its limits: try again when this machine is less busy ({text[:120]})"
        )
    return text[:300] or type(error).__name__


# What the cluster has -------------------------------------------------------------------------------------------------


def describe(ray: ModuleType) -> str:
    """A sentence on the cluster, since `ray` may be one that another program has started on this machine."""
    nodes = sum(node["Alive"] for node in ray.nodes())
    total = ray.cluster_resources()
    amount = ", ".join(f"{total[name]:g} {name}" for name in ("CPU", "GPU") if total.get(name))
    return (
        f"Ray at {ray.get_runtime_context().gcs_address}: {nodes} node{'s' if nodes != 1 else ''}, {amount or 'no CPU'}"
    )


class OwnNodeDied(UserError):
    """The raylet of this machine, through which the driver talks to the cluster, has died."""


def check_own_node(ray: ModuleType, text: str) -> None:
    """OwnNodeDied if the node of the driver is not alive: Ray would wait forever."""
    own = ray.get_runtime_context().get_node_id()
    if any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes()):
        raise OwnNodeDied(
            f"--on {text}: the Ray node of this machine has died; start it again (`ray start --address=...`), then "
            f"call the same command again: finished rounds are kept"
        )


def check_can_run(ray: ModuleType, needs: Mapping[str, float], text: str) -> None:
    """UserError where no node of the cluster has enough for one task, which would wait forever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if needs.get("GPU", 0) > 0 and not any(node.get("GPU", 0) > 0 for node in nodes):
        raise UserError(
            f"--on {text}: the cluster has no GPU, and the runs ask for one (engine.device = 'cuda'): add a node with "
            f"one, or set --device cpu"
        )
    if not any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        most = shown({name: max(node.get(name, 0) for node in nodes) for name in needs}) if nodes else "no node"
        raise UserError(f"--on {text}: no node has what one run needs ({shown(needs)}; the most on a node is {most})")


def amounts(options: Mapping[str, Any]) -> dict[str, float]:
    """Options of a task under the names that nodes have for them."""
    named = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0), "memory": options.get("memory", 0)}
    return {name: float(amount) for name, amount in (named | dict(options.get("resources", {}))).items() if amount}


def shown(needs: Mapping[str, float]) -> str:
    """Amounts for people: `1 CPU, 2.5 GB memory`."""
    texts = {name: f"{amount / 1e9:.3g} GB" if name == "memory" else f"{amount:g}" for name, amount in needs.items()}
    return ", ".join(f"{text} {name}" for name, text in texts.items())


def what_waits(ray: ModuleType, needs: Mapping[str, float]) -> str:
    """What tasks that do not start wait for, and how much of it is free."""
    free = ray.available_resources()
    at_hand = shown({name: free.get(name, 0.0) for name in needs})
    advice = "; --resources memory=4G asks for another amount of memory" if "memory" in needs else ""
    return f"waiting for {shown(needs)} on one node of the Ray cluster; free on all of them: {at_hand}{advice}"
