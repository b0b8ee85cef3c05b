"""Squares of single examples' gradients, added up, from one pass for all of them together.

What a layer's weight gets from an example is made of what went in and of what came back: for a linear layer g x^T,
whose square is g^2 (x^2)^T, so that the sum over examples is one product; for a convolution, one small product an
example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.core.equivalence import is_plain, shares_parameters
from fedgg.core.layout import Layout


@dataclass(eq=False)
class _Heard:
    """What went into a layer, and what comes back out of it."""

    layer: nn.Module
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def note(self, _: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
        """The model goes on with a copy: what comes next may work in place."""
        self.inputs.append(given[0].detach())
        self.outputs.append(made)
        return made.clone()


def layers_of(module: nn.Module, layout: Layout) -> dict[str, nn.Module] | None:
    """The layers that own all parameters, if each of them is one whose squares are known.

    Whether the module uses them as layers, and in no other way, is for a trial to show (`core.probe`).
    """
    trainable = {name.rpartition(".")[0] for name in layout.names}
    layers = {name: part for name, part in module.named_modules() if name in trainable}
    return None if shares_parameters(module) or not all(_fits(part) for part in layers.values()) else layers


def examples_at_once(layers: dict[str, nn.Module], x: Tensor, numbers: int) -> int:
    """How many examples' patches and gradients stay below so many numbers."""
    pixels = x[0].numel() // x.shape[1] if x.ndim == 4 else 1
    weights = [part.weight for part in layers.values() if isinstance(part, nn.Conv2d)]
    each = max((max(weight[0].numel() * pixels, weight.numel()) for weight in weights), default=x[0].numel())
    return max(numbers // each, 1)


def sums_of_squares(
    layers: dict[str, nn.Module], losses: Callable[[], Tensor], layout: Layout, like: Tensor
) -> Tensor | None:
    """`[1, P]`; `losses` gives the loss of each example; None if a layer is not called once, on a batch of examples."""
    heard = {name: _Heard(part) for name, part in layers.items()}
    hooks = [one.layer.register_forward_hook(one.note) for one in heard.values()]
    try:
        each = losses()
    finally:
        for hook in hooks:
            hook.remove()
    if any(len(one.outputs) != 1 or not _plain(one, len(each)) for one in heard.values()):
        return None
    back = torch.autograd.grad(each.sum(), [one.outputs[0] for one in heard.values()])
    parts: dict[str, Tensor] = {}
    for (name, one), grad in zip(heard.items(), back, strict=True):
        for key, value in _squares(one.layer, one.inputs[0].to(like.dtype), grad.to(like.dtype)).items():
            parts[f"{name}.{key}" if name else key] = value
    row = layout.flatten(parts)
    return layout.arranged(row) if layout.pixelwise else row


def _fits(layer: nn.Module) -> bool:
    if is_plain(layer, nn.Conv2d):
        assert isinstance(layer, nn.Conv2d)
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return is_plain(layer, nn.Linear)


def _plain(one: _Heard, examples: int) -> bool:
    x = one.inputs[0]
    return x.ndim == (4 if isinstance(one.layer, nn.Conv2d) else 2) and len(x) == examples


def _squares(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    if isinstance(layer, nn.Conv2d):
        grad = grad.flatten(2)
        weight = (grad @ _patches(layer, x).mT).square().sum(0).view_as(layer.weight)
        bias = grad.sum(2).square().sum(0)
    else:
        assert isinstance(layer, nn.Linear)
        weight, bias = grad.square().mT @ x.square(), grad.square().sum(0)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": bias}


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What each pixel of the output is made of, `[N, C k k, pixels]`, by one copy: F.unfold makes one an example."""
    assert not isinstance(layer.padding, str)
    (down, right), (high, wide), (tall, broad) = layer.stride, layer.kernel_size, layer.dilation
    x = F.pad(x, (layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0])).contiguous()
    many, channels, height, width = x.shape
    places = ((height - tall * (high - 1) - 1) // down + 1, (width - broad * (wide - 1) - 1) // right + 1)
    example, channel, row, column = x.stride()
    steps = (example, channel, row * tall, column * broad, row * down, column * right)
    return x.as_strided((many, channels, high, wide, *places), steps).reshape(many, channels * high * wide, -1)
