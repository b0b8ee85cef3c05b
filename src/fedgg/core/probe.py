"""Read-only measurements of models on data: loss, gradient, Fisher information. A client's own, or the server's proxy.

Models are looked at in evaluation mode, with the statistics the server sent, so that a measurement moves nothing, draws
no dropout mask, and is the same in every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedgg.core.criterion import mean_loss
from fedgg.core.equivalence import Trial, agree
from fedgg.core.net import Net
from fedgg.core.rows import Rows
from fedgg.core.squares import examples_at_once, layers_of, sums_of_squares
from fedgg.errors import UserError

Examples = tuple[Tensor, Tensor]  # x [B, ...], y [B]
AT_ONCE = 1 << 24  # numbers in the gradients of single examples that are held together
ON_A_GPU = 16  # times as many: what launching costs is worth a GB


@dataclass(frozen=True)
class Probe:
    """Measurements row by row; `examples` yields a row's data, in chunks, from the start each time it is called.

    Rows may be fewer than there are data: those that have left a stack stood at its end.
    """

    net: Net
    buffers: Rows  # one row, for all
    examples: Callable[[int], Iterable[Examples]]
    each: Callable[[int], Probe] | None = None  # of a row by itself, where rows are of different nets

    def loss(self, w: Tensor) -> Tensor:
        """Mean supervised loss over each row's examples, `[K, 1]`."""
        if self.each is not None:
            return torch.cat([self.each(k).loss(w[k : k + 1]) for k in range(len(w))])
        with torch.no_grad():
            return self._means(self._loss, w)

    def gradient(self, w: Tensor) -> Tensor:
        """Gradient of that mean loss, `[K, P]`."""
        if self.each is not None:
            return torch.cat([self.each(k).gradient(w[k : k + 1]) for k in range(len(w))])

        def chunk(row: Tensor, x: Tensor, y: Tensor) -> Tensor:
            leaf = row.detach().requires_grad_()
            return torch.autograd.grad(self._loss(leaf, x, y).sum(), leaf)[0]

        return self._means(chunk, w)

    def fisher(self, w: Tensor) -> Tensor:
        """Diagonal of the empirical Fisher information, `[K, P]`: mean square of each example's gradient."""
        if self.each is not None:
            return torch.cat([self.each(k).fisher(w[k : k + 1]) for k in range(len(w))])
        if self.net.mixes_in_evaluation:
            raise UserError(
                f"{type(self.net.module).__name__} mixes the examples of a batch in evaluation mode, so that a single "
                f"example has no gradient of its own, which the Fisher information is made of: take a model that does "
                f"not (BatchNorm with track_running_stats=True, for instance), or another algorithm"
            )
        self.net.set_mode(False)
        layers = one_pass_layers(self.net)

        def chunk(row: Tensor, x: Tensor, y: Tensor) -> Tensor:
            found = None if layers is None else self._squares_together(layers, row, x, y)
            return (self._squares_apart(row, x, y) if found is None else found) / len(x)

        if not w.is_cuda or layers is None:
            return self._means(chunk, w)
        together = partial(_put_together, most=lambda x: examples_at_once(layers, x, ON_A_GPU * AT_ONCE))
        return replace(self, examples=lambda row: together(self.examples(row)))._means(chunk, w)

    def _squares_together(self, layers: dict[str, nn.Module], row: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
        """Sum of squared gradients over examples, where layers are simple enough."""
        few = examples_at_once(layers, x, ON_A_GPU * AT_ONCE if x.is_cuda else AT_ONCE)
        total = torch.zeros_like(row)
        for some, targets in zip(x.split(few), y.split(few), strict=True):
            with torch.enable_grad():
                losses = partial(self._losses, row[0].detach().requires_grad_(), some, targets)
                squares = sums_of_squares(layers, losses, self.net.layout, row)
            if squares is None:
                return None
            total = total + squares
        return total

    def _squares_apart(self, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The same for any model, from the gradient of each example by itself."""
        few = max(AT_ONCE // row.shape[1], 1)
        each = vmap(grad(lambda row, x, y: self._losses(row, x[None], y[None]).sum()), in_dims=(None, 0, 0))
        parts = zip(x.split(few), y.split(few), strict=True)
        try:
            return torch.stack([each(row[0].detach(), *part).square().sum(0, keepdim=True) for part in parts]).sum(0)
        except (RuntimeError, NotImplementedError, ValueError):  # a module without a rule for many examples at once
            return self._squares_one_by_one(row, x, y)

    def _squares_one_by_one(self, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros_like(row)
        for k in range(len(x)):
            with torch.enable_grad():
                leaf = row[0].detach().requires_grad_()
                (slope,) = torch.autograd.grad(self._losses(leaf, x[k : k + 1], y[k : k + 1]).sum(), leaf)
            total = total + slope.square()
        return total

    def _losses(self, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        buffers = {name: rows[0] for name, rows in self.buffers.items()}
        return self.net.criterion(self.net.call(self.net.layout.unflatten(row), buffers, x), y)

    def _loss(self, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        outputs = self.net.bind(self.buffers, train=False)(row, x[None])
        return mean_loss(self.net.criterion, outputs, y[None], torch.ones_like(row[:1, :1]).expand(1, len(x)))

    def _means(self, measure: Callable[[Tensor, Tensor, Tensor], Tensor], w: Tensor) -> Tensor:
        return torch.cat([self._mean(measure, w[k : k + 1], k) for k in range(len(w))])

    def _mean(self, measure: Callable[[Tensor, Tensor, Tensor], Tensor], row: Tensor, k: int) -> Tensor:
        total, seen = torch.zeros_like(row[:, :1]), 0
        for x, y in self.examples(k):
            total = total + len(x) * measure(row, x, y)
            seen += len(x)
        return total / max(seen, 1)


def one_pass_layers(net: Net) -> dict[str, nn.Module] | None:
    """The layers by which squares of all examples come from one pass, where that was found to be true of this net.

    A function of the net alone: in every process, and whatever data come first.
    """
    layers = layers_of(net.module, net.layout)
    if layers is None:
        return None
    if net.squares_in_one_pass is None:
        net.squares_in_one_pass = _squares_agree(net)
    return layers if net.squares_in_one_pass else None


def _squares_agree(net: Net) -> bool:
    trial = Trial.of(net)
    if trial is None:
        return False
    twin, row, x = trial.net, trial.w, trial.x[0]
    probe, layers = Probe(twin, twin.start_buffers, lambda k: ()), layers_of(twin.module, twin.layout)
    y = trial.outputs(trial.x, slice(None))[1][0].argmin(1)  # unlikely classes, whose gradients are large
    twin.set_mode(False)

    def together() -> list[Tensor]:
        squares = None if layers is None else probe._squares_together(layers, row, x, y)
        return [] if squares is None else [squares]

    return agree(lambda: [probe._squares_one_by_one(row, x, y)], together, trial.tolerance)


def _put_together(chunks: Iterable[Examples], most: Callable[[Tensor], int]) -> Iterator[Examples]:
    """The same examples in fewer chunks: as many in one as are allowed, and never less than there were."""
    held: list[Examples] = []
    for x, y in chunks:
        if held and sum(len(y) for _, y in held) + len(y) > most(x):
            yield _joined(held)
            held = []
        held.append((x, y))
    if held:
        yield _joined(held)


def _joined(parts: list[Examples]) -> Examples:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
