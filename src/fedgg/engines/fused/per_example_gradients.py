"""The Fisher information from one pass for many examples: squares of single examples' gradients, added up.

What a layer's weight gets from an example is made of what went in and of what came back: for a linear layer g x^T,
whose square is g^2 (x^2)^T, so that the sum over examples is one product; for a convolution, one small product an
example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad as gradient_of
from torch.func import vmap

from fedgg.core.client_rows import Rows
from fedgg.core.layout import Layout
from fedgg.core.model import Net
from fedgg.engines.module_equivalence import Trial, agree, is_plain, shares_parameters

Examples = tuple[Tensor, Tensor]  # x [B, ...], y [B]
AT_ONCE = 1 << 24  # numbers in the gradients of single examples that are held together
ON_A_GPU = 16  # times as many: what launching costs is worth a GB


@dataclass(eq=False)
class _LayerRecord:
    """What went into a layer, and what comes back out of it."""

    layer: nn.Module
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def note(self, _: nn.Module, layer_inputs: tuple[Tensor, ...], made: Tensor) -> Tensor:
        """The model continues with a copy: the next layer may work in place."""
        self.inputs.append(layer_inputs[0].detach())
        self.outputs.append(made)
        return made.clone()


def fisher(net: Net, row: Tensor, buffers: Rows, chunks: Iterable[Examples]) -> Tensor:
    """Mean square of the examples' gradients, `[1, P]`, in evaluation mode: `Net.fisher`, for many examples at once."""
    net.set_mode(False)
    layers = one_pass_layers(net)
    if row.is_cuda and layers is not None:
        chunks = regrouped(chunks, lambda x: examples_at_once(layers, x, ON_A_GPU * AT_ONCE))
    total, examples = torch.zeros_like(row[:, :1]), 0
    for x, y in chunks:
        squares = None if layers is None else squares_in_one_pass(net, layers, row, buffers, x, y)
        squares = squares_by_vmap(net, row, buffers, x, y) if squares is None else squares
        total = total + len(x) * (squares / len(x))
        examples += len(x)
    return total / max(examples, 1)


def squares_in_one_pass(
    net: Net, layers: dict[str, nn.Module], row: Tensor, buffers: Rows, x: Tensor, y: Tensor
) -> Tensor | None:
    """Sum of squared gradients over examples, where layers are simple enough."""
    few = examples_at_once(layers, x, ON_A_GPU * AT_ONCE if x.is_cuda else AT_ONCE)
    total = torch.zeros_like(row)
    for some, targets in zip(x.split(few), y.split(few), strict=True):
        with torch.enable_grad():
            losses = partial(net.losses, row[0].detach().requires_grad_(), buffers, some, targets)
            squares = sums_of_squares(layers, losses, net.layout, row)
        if squares is None:
            return None
        total = total + squares
    return total


def squares_by_vmap(net: Net, row: Tensor, buffers: Rows, x: Tensor, y: Tensor) -> Tensor:
    """The same for any model, from the gradient of each example by itself."""
    few = max(AT_ONCE // row.shape[1], 1)
    each = vmap(gradient_of(lambda row, x, y: net.losses(row, buffers, x[None], y[None]).sum()), in_dims=(None, 0, 0))
    parts = zip(x.split(few), y.split(few), strict=True)
    try:
        return torch.stack([each(row[0].detach(), *part).square().sum(0, keepdim=True) for part in parts]).sum(0)
    except (RuntimeError, NotImplementedError, ValueError):  # a module without a rule for many examples at once
        return net.squared_gradients(row, buffers, x, y)


def one_pass_layers(net: Net) -> dict[str, nn.Module] | None:
    """The layers by which squares of all examples come from one pass, where that was found to be true of this net.

    A function of the net alone: in every process, and whatever data come first.
    """
    layers = layers_of(net.module, net.layout)
    if layers is None:
        return None
    if "squares in one pass" not in net.facts:
        net.facts["squares in one pass"] = _squares_agree(net)
    return layers if net.facts["squares in one pass"] else None


def _squares_agree(net: Net) -> bool:
    trial = Trial.of(net)
    if trial is None:
        return False
    twin, row, x = trial.net, trial.w, trial.x[0]
    layers = layers_of(twin.module, twin.layout)
    y = trial.outputs(trial.x, slice(None))[1][0].argmin(1)  # unlikely classes, whose gradients are large
    twin.set_mode(False)

    def together() -> list[Tensor]:
        squares = None if layers is None else squares_in_one_pass(twin, layers, row, twin.start_buffers, x, y)
        return [] if squares is None else [squares]

    return agree(lambda: [twin.squared_gradients(row, twin.start_buffers, x, y)], together, trial.tolerance)


def regrouped(chunks: Iterable[Examples], most: Callable[[Tensor], int]) -> Iterator[Examples]:
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


def layers_of(module: nn.Module, layout: Layout) -> dict[str, nn.Module] | None:
    """The layers that own all parameters, if each of them is one whose squares are known.

    Whether the module uses them as layers, and in no other way, is for a trial to show (`one_pass_layers`).
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
    records = {name: _LayerRecord(part) for name, part in layers.items()}
    hooks = [one.layer.register_forward_hook(one.note) for one in records.values()]
    try:
        each = losses()
    finally:
        for hook in hooks:
            hook.remove()
    if any(len(one.outputs) != 1 or not _plain(one, len(each)) for one in records.values()):
        return None
    back = torch.autograd.grad(each.sum(), [one.outputs[0] for one in records.values()])
    parts: dict[str, Tensor] = {}
    for (name, one), grad in zip(records.items(), back, strict=True):
        for key, value in _squares(one.layer, one.inputs[0].to(like.dtype), grad.to(like.dtype)).items():
            parts[f"{name}.{key}" if name else key] = value
    row = layout.flatten(parts)
    return layout.arranged(row) if layout.pixelwise else row


def _fits(layer: nn.Module) -> bool:
    if is_plain(layer, nn.Conv2d):
        assert isinstance(layer, nn.Conv2d)
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return is_plain(layer, nn.Linear)


def _plain(one: _LayerRecord, examples: int) -> bool:
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
