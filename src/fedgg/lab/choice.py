"""Which engine trains an experiment: the one it names where that works, else the fastest that does, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from fedgg.core.net import Net
from fedgg.lab.config import Experiment

EngineName = Literal["loop", "workers", "stacked", "streams"]

LARGE = 20e6  # multiply-adds an example: one client of such a model keeps a GPU busy, stacking gains nothing
LONG = 3e12  # multiply-adds a run: below this, starting worker processes takes longer than they save


@dataclass(frozen=True)
class Choice:
    name: EngineName
    notice: str | None  # one line for the user where the engine is not the one that was named


def choose(experiment: Experiment, net: Net, examples: int) -> Choice:
    """`examples`: how many a round trains on, over all epochs."""
    wanted = experiment.engine.name
    on_gpu = experiment.engine.device != "cpu"
    if wanted == "auto":
        best = _best_on_gpu(net) if on_gpu else _best_on_cpu(experiment, net, examples)
        return Choice(best, f"engine: {best} ({_why(best, net)})" if on_gpu else None)
    if wanted == "stacked" and not net.stackable:
        instead: EngineName = "streams" if on_gpu and not net.draws_random_numbers else "loop"
        return Choice(instead, f"this model cannot be stacked ({_obstacle(net)}): the engine {instead} trains it")
    if wanted == "streams" and net.draws_random_numbers:
        return Choice("loop", f"this model cannot be captured ({_obstacle(net)}): the engine loop trains it")
    return Choice(wanted, None)


def _best_on_gpu(net: Net) -> EngineName:
    if net.draws_random_numbers:
        return "loop"
    return "stacked" if net.multiply_adds < LARGE and net.stackable else "streams"


def _best_on_cpu(experiment: Experiment, net: Net, examples: int) -> EngineName:
    """Both have the same bits; processes pay when there is more than a few seconds' work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    work = 3 * net.multiply_adds * examples * experiment.rounds
    return "workers" if cores > 1 and experiment.engine.threads == 1 and work > LONG else "loop"


def _why(name: EngineName, net: Net) -> str:
    if name == "stacked":
        return "a small model: all clients as one program"
    if name == "loop":
        return _obstacle(net)
    large = net.multiply_adds >= LARGE
    return "a large model: several clients in flight" if large else f"{_obstacle(net)}: several clients in flight"


def _obstacle(net: Net) -> str:
    if net.draws_random_numbers:
        return "it draws random numbers other than F.dropout's"
    if net.keeps_statistics:
        return "it keeps batch statistics"
    if net.mixes_examples:
        return "it mixes the examples of a batch"
    return "torch.func.vmap has no rule for one of its layers, or gives other numbers"


def channels_last(experiment: Experiment, choice: Choice) -> bool:
    """Whether images lie pixel by pixel in memory, which is what tensor cores like best."""
    return choice.name == "streams" and experiment.engine.precision in ("tf32", "bf16")


def products(experiment: Experiment) -> torch.dtype | None:
    return torch.bfloat16 if experiment.engine.precision == "bf16" else None
