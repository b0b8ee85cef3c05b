"""How much memory a stack takes, estimated before it is built."""

from __future__ import annotations

import torch

from fedgg.core.net import Net
from fedgg.core.plan import Work
from fedgg.engines.flops import activations

PASSES = 16  # rows of parameters alive at once: models, velocity, gradient, notes and memory, on the desk and beside it
TRACES = 3  # of each activation: itself, its gradient, and what a layer keeps for the backward pass
SHARE = 0.8  # of the memory that is free, the rest is for kernels and fragments


def stack_bytes(net: Net, work: Work, clients: int) -> int:
    """For so many clients of one experiment."""
    batch = work.batch or 256
    numbers = PASSES * net.layout.total + TRACES * batch * activations(net)
    return int(clients * numbers * net.start.element_size())


def room(device: torch.device) -> float:
    """Bytes that a stack may take."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return SHARE * free
