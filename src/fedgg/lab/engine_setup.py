"""How an experiment is computed: which engine trains it and why, and torch's settings during a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from fedgg.core.model import Net
from fedgg.core.random_choices import Work
from fedgg.engines import ENGINES, Engine
from fedgg.engines.devices import Devices, ProcessPool
from fedgg.engines.flops import multiply_adds
from fedgg.engines.gpu.stacked import room, stack_bytes
from fedgg.engines.layers.module_programs import runs_rows
from fedgg.engines.module_equivalence import is_stackable, mixes_examples
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import EngineConfig
from fedgg.lab.name_resolution import engine_class
from fedgg.registry import accepted_settings

LARGE = 20e6  # multiply-adds an example: torch's own layers of one client of such a model keep a GPU busy
LONG = 3e12  # multiply-adds a run: below this, starting worker processes takes longer than they save


@dataclass(frozen=True)
class Choice:
    name: str
    reason: str
    notice: str | None = None  # one line for the user where the engine is not the one that was named
    spread: bool = False  # whether it is the engine of each of several devices


def choose(
    experiment: Experiment,
    net: Net,
    work: Work,
    sizes: Sequence[int],
    chosen_because: str | None = None,
    of_each: bool = False,
) -> Choice:
    """The engine that the experiment names where that can train the model, else the fastest one that can.

    `sizes`: how many examples each client trains on. `chosen_because`: why a study has put the engine that the
    experiment names into the place of `auto`. `of_each`: of several devices, the engine of each, as if it were alone.
    """
    wanted, devices = experiment.engine.name, experiment.engine.devices
    if len(devices) > 1 and not of_each:
        each = choose(experiment, net, work, sizes, chosen_because, of_each=True)
        reason = f"{each.name} in a process on each of {', '.join(devices)} ({each.reason})"
        return Choice(each.name, reason, f"engine: {reason}", spread=True)
    on_gpu = devices[0] != "cpu"
    if wanted in ("auto", "devices"):
        best, reason = (_best_on_gpu if on_gpu else _best_on_cpu)(experiment, net, work, sizes)
        return Choice(best, reason, f"engine: {best} ({reason})")
    if wanted == "stacked" and not is_stackable(net):
        instead = "streams" if on_gpu and not net.draws_random_numbers else "fused"
        reason = f"this model cannot be stacked ({_obstacle(net)})"
        return Choice(instead, reason, f"{reason}: the engine {instead} trains it")
    if wanted == "streams" and net.draws_random_numbers:
        reason = f"this model cannot be captured ({_obstacle(net)})"
        return Choice("fused", reason, f"{reason}: the engine fused trains it")
    if chosen_because is not None:
        return Choice(wanted, chosen_because, f"engine: {wanted} ({chosen_because})")
    return Choice(wanted, "named in the experiment")


def _best_on_gpu(experiment: Experiment, net: Net, work: Work, sizes: Sequence[int]) -> tuple[str, str]:
    if net.draws_random_numbers:
        return "fused", _obstacle(net)
    large = multiply_adds(net) >= LARGE
    if not large and is_stackable(net):
        return "stacked", "a small model: all clients as one program"
    # In the other precisions cuDNN's kernels, client by client, are as fast or have not been compared.
    if large and experiment.engine.precision == "bf16" and is_stackable(net) and runs_rows(net, "bf16"):
        devices = experiment.engine.devices
        each = -(-experiment.cohort_of(sum(size > 0 for size in sizes)) // len(devices))
        clients = each * max(map(devices.count, devices))  # on one GPU
        if stack_bytes(net, experiment.local.batch, clients) <= room(net.start.device):
            return "stacked", "a large model with kernels for all clients at once"
        return "streams", "a large model, and no memory for all clients at once: several clients in flight"
    return "streams", f"{'a large model' if large else _obstacle(net)}: several clients in flight"


def _best_on_cpu(experiment: Experiment, net: Net, work: Work, sizes: Sequence[int]) -> tuple[str, str]:
    """Both have the same bits; processes pay when there is more than a few seconds' work."""
    if len(experiment.engine.devices) > 1:
        return "fused", "one client after another"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores == 1:
        return "fused", "one core"
    if experiment.engine.threads > 1:
        return "fused", f"engine.threads = {experiment.engine.threads} in one process"
    if 3 * multiply_adds(net) * work.examples_trained(sizes) * experiment.rounds <= LONG:
        return "fused", "a short run: processes would save little"
    return "workers", f"{cores} cores, and a longer run"


def _obstacle(net: Net) -> str:
    if net.draws_random_numbers:
        return "it draws random numbers other than F.dropout's"
    if net.keeps_statistics:
        return "it keeps batch statistics"
    if mixes_examples(net):
        return "it mixes the examples of a batch"
    return "torch.func.vmap has no rule for one of its layers, or gives other numbers"


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.float32}


def build_engine(
    choice: Choice, config: EngineConfig, processes: tuple[str, ProcessPool | None] | None = None
) -> Engine:
    """The chosen engine, made with those settings of [engine] that its constructor has parameters for.

    `processes`: over which clients are spread, as `Devices` takes them; by default those of `engine.device`.
    """
    kind = ENGINES.get(choice.name) or engine_class(choice.name)
    accepted, settings = accepted_settings(kind), config.model_dump(exclude={"name"})
    if choice.spread:  # a process sees one GPU, under the name cuda
        settings["device"] = "cpu" if config.devices[0] == "cpu" else "cuda"
    make = partial(kind, **{key: value for key, value in settings.items() if key in accepted})
    if not choice.spread:
        return make()
    device, pool = processes or (config.device, None)
    return Devices(device, make, lost_clients=config.lost_clients, pool=pool)


@contextmanager
def arithmetic(experiment: Experiment) -> Iterator[None]:
    """TF32, deterministic kernels and threads as in the section [engine]; the user's settings come back afterwards."""
    engine, matmul, cudnn = experiment.engine, torch.backends.cuda.matmul, torch.backends.cudnn
    threads = torch.get_num_threads()
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark)
    coarse = engine.precision in ("tf32", "bf16")
    torch.set_num_threads(engine.threads_in_use)
    matmul.allow_tf32, cudnn.allow_tf32 = coarse, coarse
    cudnn.deterministic, cudnn.benchmark = engine.deterministic, not engine.deterministic
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
        torch.set_num_threads(threads)


def chosen_device(experiment: Experiment) -> torch.device:
    """The device that `engine.device` names, of several the first; UserError where this machine does not have all."""
    devices = experiment.engine.devices
    for name in devices:
        if name != "cpu":
            count = torch.cuda.device_count()
            if int(name.partition(":")[2] or 0) >= count:
                raise UserError(
                    f"engine.device = {name!r}: this machine has {count} CUDA devices; set engine.device = 'cpu'"
                )
    return torch.device(devices[0])
