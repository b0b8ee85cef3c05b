"""Layers in order as a program over rows, with kernels of their own: for stacks of small models on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedgg.core.layout import Layout
from fedgg.engines.layers.layer_types import Dense, Flatten, Layer, Moment, WideDense

if TYPE_CHECKING:
    from fedgg.kernels.fused_step import Wide

ALIGNMENT = 64  # row lengths are padded to this many numbers, since matrix kernels read aligned words


class Program:
    """The layers in order; called with rows and inputs, differentiable in the rows."""

    def __init__(self, layers: Sequence[Layer], layout: Layout, products: torch.dtype | None = None):
        self.layers = tuple(layers)
        self.layout = layout
        self.products = products  # what layers take, if not what rows are made of
        self._first = next(n for n, layer in enumerate(self.layers) if not isinstance(layer, Flatten))
        self._withheld: list[Wide] | None = None

    @property
    def first(self) -> Layer:
        """The first layer that computes."""
        return self.layers[self._first]

    def withholds(self, batch: int) -> bool:
        """Whether the first layer's gradient can be left to the pass that uses it, for batches of this width."""
        return isinstance(self.first, WideDense) and self.first.takes(batch)

    @contextmanager
    def withholding(self) -> Iterator[list[Wide]]:
        """Within, backward passes leave the first layer's weight gradient unmade, and say here what it is made of."""
        self._withheld = []
        try:
            yield self._withheld
        finally:
            self._withheld = None

    def __call__(self, w: Tensor, x: Tensor, keys: Tensor | None = None, step: Tensor | int = 0) -> Tensor:
        return self.seen(w, x, keys, step)[0]

    def seen(self, w: Tensor, x: Tensor, keys: Tensor | None = None, step: Tensor | int = 0) -> tuple[Tensor, Tensor]:
        """The outputs, and what went into the last layer."""
        both: tuple[Tensor, Tensor] = _Run.apply(w, x, self, (keys, step))  # type: ignore[no-untyped-call]
        return both

    def offers(self, head: str) -> bool:
        """Whether the last layer is the one of this name, with others in front of it."""
        last = self.layers[-1]
        return isinstance(last, Dense) and last.weight == f"{head}.weight" and self._first < len(self.layers) - 1

    def mean_loss(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor | None:
        """Mean cross entropy `[K, 1]` by a kernel of its own, or None where there are too many outputs for it."""
        from fedgg.kernels import loss

        if not loss.takes(*outputs.shape[1:]):
            return None
        loss_: Tensor = _MeanLoss.apply(outputs, y, mask)  # type: ignore[no-untyped-call]
        return loss_

    def forward(self, w: Tensor, x: Tensor, moment: Moment = (None, 0)) -> tuple[Tensor, list[Any]]:
        """Outputs, and what the backward pass needs: the parameters as they were used, and each layer's notes."""
        parameters = self.layout.unflatten(w if self.products is None else w.to(self.products))
        saved: list[Any] = [parameters]
        for layer in self.layers:
            x, remembered = layer.forward(x, parameters, moment)
            saved.append(remembered)
        return x.to(w.dtype), saved

    def by_torch(self, w: Tensor, x: Tensor, keys: Tensor | None = None, step: int = 0) -> Tensor:
        """The same, row by row, in torch's own operations and the rows' own precision: what the layers stand for."""
        outputs = []
        for k in range(len(w)):
            y, parameters = x[k], self.layout.unflatten(w[k])
            for layer in self.layers:
                y = layer.by_torch(y, parameters, (None if keys is None else keys[k], step))
            outputs.append(y)
        return torch.stack(outputs)

    def into_last(self, saved: list[Any], like: Tensor) -> Tensor:
        """What went into the last layer, as the forward pass saved it; nothing where that layer saves no input."""
        if not isinstance(self.layers[-1], Dense):
            return like.new_empty(0)
        x: Tensor = saved[-1][0]
        return x.detach().to(like.dtype)  # a tensor of its own: what goes out must not hold what is saved

    def backward(self, w: Tensor, grad: Tensor, saved: list[Any], to_last: Tensor | None = None) -> Tensor:
        """The rows' gradient from that of the outputs, and from that of what went into the last layer, if any."""
        result = padded_rows(w)
        parameters, *saved = saved
        into = self.layout.unflatten(result)
        back: Tensor | None = grad
        for number in reversed(range(self._first, len(self.layers))):
            assert back is not None
            layer = self.layers[number]
            if self._withheld is not None and number == self._first and isinstance(layer, WideDense):
                self._withheld.append(layer.withheld(back, saved[number], into))
                return result
            back = layer.backward(back, saved[number], parameters, into, number > self._first)
            if to_last is not None and back is not None and number == len(self.layers) - 1:
                back = back + to_last.to(back.dtype)
        return result


def padded_rows(like: Tensor) -> Tensor:
    """Room for rows `[K, P]` that start at aligned addresses."""
    length = like.shape[1]
    return like.new_empty((len(like), -(-length // ALIGNMENT) * ALIGNMENT))[:, :length]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, program: Program, moment: Moment) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        outputs, ctx.saved = program.forward(w.detach(), x, moment)
        ctx.w, ctx.program, ctx.shape = w.detach(), program, outputs.shape
        return outputs, program.into_last(ctx.saved, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, to_last: Tensor | None) -> tuple[Tensor, None, None, None]:
        if grad is None:  # a loss of nothing but the representation
            grad = ctx.w.new_zeros(ctx.shape)
        return ctx.program.backward(ctx.w, grad, ctx.saved, to_last), None, None, None


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        from fedgg.kernels import loss

        mean, ctx.slope = loss.mean_cross_entropy(outputs.detach(), y, mask)
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.slope * grad[:, :, None], None, None
