"""The only training loop of the library: what clients do in a round, for one row or many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Site
from fedgg.core.net import DropoutKey, Net
from fedgg.core.probe import Probe
from fedgg.core.rows import Rows, check
from fedgg.core.sgd import SGD


@dataclass(frozen=True)
class LocalStart:
    """What the rows bring to a round."""

    w: Tensor  # [K, P] the global model as received
    down: Rows
    memory: Rows
    buffers: Rows  # the rows' own copies: training moves them in place
    examples: Tensor  # [K, 1]
    steps: Tensor  # [K, 1]
    dropout: Sequence[DropoutKey]
    probe: Probe | None = None


@dataclass(frozen=True)
class LocalEnd:
    """What the rows have to show for it."""

    up: Rows
    memory: Rows
    buffers: Rows
    readings: Rows
    loss: Tensor  # [K, 1] mean training loss over the examples as they were seen


def local_round(algorithm: Algorithm, net: Net, sgd: SGD, start: LocalStart, batches: Iterable[Batch]) -> LocalEnd:
    """Train all rows on their batches; rows that have done their steps stand still."""
    w, clients = start.w, start.w.shape[0]
    forward = net.bind(start.buffers, train=True, dropout=start.dropout)
    site = Site(
        net=forward,
        probe=start.probe,
        down=start.down,
        memory=start.memory,
        notes={},
        steps=start.steps,
        effective_steps=sgd.effective_steps(start.steps),
        lr=sgd.lr,
        momentum=sgd.momentum,
        examples=start.examples,
        step=torch.zeros_like(start.steps),
        last_step=torch.zeros_like(w),
    )
    site = replace(site, notes=check(algorithm.begin(w, site), clients, "begin()"))
    uneven = bool((start.steps != start.steps[0]).any())
    velocity = torch.zeros_like(w)
    loss_sum = seen = torch.zeros_like(w[:, :1])

    for step, batch in enumerate(batches):
        forward.at_step(step)
        leaf = w.detach().requires_grad_()
        loss = algorithm.loss(leaf, batch, site)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        with torch.no_grad():
            count = batch.mask.sum(1, keepdim=True)
            loss_sum, seen = loss_sum + loss * count, seen + count
            move, velocity = sgd.move(algorithm.steer(grad, w, site), w, velocity)
            move = algorithm.nudge(move, w, site)
            if uneven:
                active = site.step < site.steps
                w = torch.where(active, w + move, w)
                move = torch.where(active, move, site.last_step)
            else:
                w = w + move
            site = replace(site, step=site.step + 1, last_step=move)

    with torch.no_grad():
        up, memory = algorithm.finish(w, site)
        return LocalEnd(
            up=check(up, clients, "finish() up"),
            memory=check(memory, clients, "finish() memory"),
            buffers=start.buffers,
            readings=check(algorithm.readings(w, site), clients, "readings()"),
            loss=loss_sum / seen.clamp_min(1),
        )
