"""Read-only measurements of a model on a client's own data: loss, gradient, Fisher information.

Models are looked at in evaluation mode, so that a measurement moves no statistics and draws no dropout mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedgg.core.net import Net, mean_loss
from fedgg.core.rows import Rows

Examples = tuple[Tensor, Tensor]  # x [B, ...], y [B]


@dataclass(frozen=True)
class Probe:
    """Measurements for one row; `examples` yields a client's data, in chunks, from the start each time it is called."""

    net: Net
    buffers: Rows
    examples: Callable[[], Iterable[Examples]]

    def loss(self, w: Tensor) -> Tensor:
        """Mean supervised loss over the client's examples, `[1, 1]`."""
        with torch.no_grad():
            return self._mean(lambda x, y: self._loss(w, x, y), w)

    def gradient(self, w: Tensor) -> Tensor:
        """Gradient of that mean loss, `[1, P]`."""

        def chunk(x: Tensor, y: Tensor) -> Tensor:
            leaf = w.detach().requires_grad_()
            return torch.autograd.grad(self._loss(leaf, x, y).sum(), leaf)[0]

        return self._mean(chunk, w)

    def fisher(self, w: Tensor) -> Tensor:
        """Diagonal of the empirical Fisher information, `[1, P]`: mean square of each example's gradient."""
        self.net.set_mode(False)
        buffers = {name: rows[0] for name, rows in self.buffers.items()}

        def loss(row: Tensor, x: Tensor, y: Tensor) -> Tensor:
            outputs = self.net.call(self.net.layout.unflatten(row), buffers, x[None])
            return self.net.criterion(outputs, y[None]).sum()

        each = vmap(grad(loss), in_dims=(None, 0, 0))
        return self._mean(lambda x, y: each(w[0].detach(), x, y).square().mean(0, keepdim=True), w)

    def _loss(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        outputs = self.net.bind(self.buffers, train=False)(w, x[None])
        return mean_loss(self.net.criterion, outputs, y[None], torch.ones_like(w[:1, :1]).expand(1, len(x)))

    def _mean(self, measure: Callable[[Tensor, Tensor], Tensor], like: Tensor) -> Tensor:
        total, seen = torch.zeros_like(like[:, :1]), 0
        for x, y in self.examples():
            total = total + len(x) * measure(x, y)
            seen += len(x)
        return total / max(seen, 1)
