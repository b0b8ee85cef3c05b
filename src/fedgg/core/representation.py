"""What a model makes of its inputs before its last layer: the representation that contrastive algorithms compare.

It is the input of the `nn.Linear` that makes the outputs, found by looking at what happens, and recorded with a hook: a
user's module needs no second way to be called, and one pass gives outputs and representation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedgg.errors import UserError

if TYPE_CHECKING:
    from fedgg.core.net import Net


@contextmanager
def recorded_inputs(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Within, whatever goes into the layer."""
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, layer_inputs: inputs.append(layer_inputs[0]))
    try:
        yield inputs
    finally:
        hook.remove()


def head_of(net: Net, x: Tensor) -> str:
    """The name of the layer whose input is the representation, as two examples go through the model."""
    title = type(net.module).__name__
    made: list[tuple[str, Tensor, Tensor]] = []  # name, input and output of every linear layer, as they are called

    def note(name: str, layer_inputs: tuple[Tensor, ...], output: Tensor) -> None:
        made.append((name, layer_inputs[0], output))

    layers = [(name, part) for name, part in net.module.named_modules() if isinstance(part, nn.Linear)]
    hooks = [
        part.register_forward_hook(lambda _, layer_inputs, output, name=name: note(name, layer_inputs, output))
        for name, part in layers
    ]
    try:
        net.set_mode(False)
        row = net.start[0].detach().requires_grad_()
        buffers = {name: rows[0] for name, rows in net.start_buffers.items()}
        outputs = net.call(net.layout.unflatten(row), buffers, x)
    finally:
        for hook in hooks:
            hook.remove()
    if not made or made[-1][2].shape != outputs.shape or not torch.equal(made[-1][2].to(outputs.dtype), outputs):
        raise UserError(
            f"{title} offers no representation: its outputs do not come out of an nn.Linear, whose input it would be; "
            f"let the model end with one"
        )
    name, representation, _ = made[-1]
    if not representation.requires_grad:
        raise UserError(
            f"{title} offers no representation: its only layer, {name!r}, sees the inputs themselves; "
            f"take a model with a hidden layer, as mlp or cnn"
        )
    return name
