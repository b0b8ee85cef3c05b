"""One client's round on a CPU, without a tensor more than it needs: the twin of `local_step` for sums of terms.

Gradients stay where autograd leaves them, one for each parameter, and model, velocity and drift are moved in place: for
a model of a million parameters, fresh memory for every intermediate costs as much as the model's own arithmetic. Long
parameters are done piece by piece, so that a piece is still in the cache when its next operation comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch, Site
from fedgg.core.rows import Rows
from fedgg.core.sgd import SGD
from fedgg.core.terms import Asked

PIECE = 1 << 18  # numbers
SMALL = 1 << 17


@dataclass
class Walk:
    """A client on its way; its tensors are its own, and move."""

    w: Tensor  # [1, P]
    velocity: Tensor  # [1, P]
    drift: Tensor | None  # [1, P], where it is asked for
    step: Tensor  # [1, 1]
    loss_sum: Tensor
    seen: Tensor
    sums: Rows


def walk(algorithm: Algorithm, sgd: SGD, site: Site, asked: Asked, batches: Iterable[Batch]) -> Walk:
    """All steps of one row whose objective is the supervised loss."""
    zero = torch.zeros_like(site.w[:, :1])
    client = Walk(
        w=site.w.clone(),
        velocity=torch.zeros_like(site.w),
        drift=torch.zeros_like(site.w) if asked.drift else None,
        step=zero,
        loss_sum=zero.clone(),
        seen=zero.clone(),
        sums=dict.fromkeys(asked.pairs, zero),
    )
    views = list(site.net.layout.unflatten(client.w[0]).values())
    for number, batch in enumerate(batches):
        site.net.at_step(number)
        here = replace(site, step=client.step, w=client.w, last_step=None, sums=client.sums)
        leaves = [view.detach().requires_grad_() for view in views]
        loss = site.net.loss_with(leaves, batch.x, batch.y, batch.mask)
        grads = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
        with torch.no_grad():
            factors = {name: float(factor) for name, factor in algorithm.terms(here).items()}
            _move(client, sgd, site, asked, factors, grads)
            count = batch.mask.sum(1, keepdim=True)
            client.step = client.step + 1
            client.loss_sum += loss.detach() * count
            client.seen += count
    return client


def _move(
    client: Walk, sgd: SGD, site: Site, asked: Asked, factors: dict[str, float], grads: tuple[Tensor, ...]
) -> None:
    lr, momentum, decay = float(sgd.lr), float(sgd.momentum), float(sgd.weight_decay)
    parts: dict[str, list[Tensor]] = {both: [] for both in asked.pairs}
    end = 0
    for grad in _pieces(grads):
        start, end = end, end + len(grad)
        w, velocity = client.w[0, start:end], client.velocity[0, start:end]
        drift = None if client.drift is None else client.drift[0, start:end]
        notes = {name: site.notes[name][0, start:end] for name in asked.notes}
        for name, factor in factors.items():
            grad.add_(_vector(name, drift, grad, notes), alpha=factor)
        if sgd.has_decay:
            grad.add_(w, alpha=decay)
        if sgd.has_momentum:
            velocity.mul_(momentum).add_(grad)
        else:
            velocity.copy_(grad)
        step = torch.mul(velocity, -lr, out=grad)  # rounded before it is added, as everywhere else
        w.add_(step)
        if drift is not None:
            torch.sub(w, site.notes["anchor"][0, start:end], out=drift)
        for both in asked.pairs:
            a, b = (_vector(name, drift, step, notes) for name in both.split("."))
            parts[both].append(torch.dot(a, b))
    for both, found in parts.items():
        client.sums[both] = torch.stack(found).sum().view(1, 1)


def _pieces(grads: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Small models in one piece: for them, asking costs more than moving."""
    flat = [grad.reshape(-1) for grad in grads]
    if sum(len(grad) for grad in flat) <= SMALL:
        yield torch.cat(flat)
        return
    for grad in flat:
        yield from grad.split(PIECE)


def _vector(name: str, drift: Tensor | None, step: Tensor, notes: Rows) -> Tensor:
    if name == "step":
        return step
    if name == "drift":
        assert drift is not None
        return drift
    return notes[name]
