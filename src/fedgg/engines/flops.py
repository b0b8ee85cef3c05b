"""Multiply-adds and number of activations of a forward pass, for the choice of an engine.

`torch.utils.flop_counter` is not used: its first use imports a compiler, which takes longer than many runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedgg.core.model import Net

Count = Callable[..., int]


def _linear(y: Tensor, x: Tensor, weight: Tensor, *_: Any) -> int:
    return y.numel() * weight.shape[-1]


def _convolution(y: Tensor, x: Tensor, weight: Tensor, *_: Any) -> int:
    return y.numel() * weight[0].numel()


def _transposed_convolution(y: Tensor, x: Tensor, weight: Tensor, *_: Any) -> int:
    return x.numel() * weight[0].numel()


def _matmul(y: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    return y.numel() * a.shape[-1]


def _addmm(y: Tensor, _: Tensor, a: Tensor, b: Tensor, *__: Any) -> int:
    return y.numel() * a.shape[-1]


def _attention(y: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    return query.numel() * key.shape[-2] + y.numel() * key.shape[-2]


COUNTS: dict[Any, Count] = {
    F.linear: _linear,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _transposed_convolution),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, torch.mv, Tensor.matmul, Tensor.mm, Tensor.bmm), _matmul),
    **dict.fromkeys((Tensor.__matmul__, Tensor.__rmatmul__), _matmul),
    **dict.fromkeys((torch.addmm, torch.baddbmm), _addmm),
    F.scaled_dot_product_attention: _attention,
}


class CountedProducts(TorchFunctionMode):
    """Counts the multiply-adds of the functions in `COUNTS`; others, for instance recurrent layers, are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outputs = function(*args, **(kwargs or {}))
        count = COUNTS.get(function)
        if count is not None and isinstance(outputs, Tensor):
            operands = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)]
            self.multiply_adds += count(outputs, *operands)
        return outputs


def multiply_adds(net: Net) -> float:
    """Multiply-adds of a forward pass per example; zero for a net without a sample input."""
    return _forward_size(net)[0]


def activations(net: Net) -> int:
    """Number of activations of a forward pass per example; zero for a net without a sample input."""
    return _forward_size(net)[1]


def largest_activation(net: Net) -> int:
    """Number of activations of the layer that has most, per example; zero for a net without a sample input."""
    return _forward_size(net)[2]


def _forward_size(net: Net) -> tuple[float, int, int]:
    """Multiply-adds and activations per example, counted once per net and class (`Net`, `FusedNet`)."""
    key, x = f"forward size of {type(net).__name__}", net.sample
    if x is None:
        return 0.0, 0, 0
    if key not in net.facts:
        sizes: list[int] = [x[0].numel()]
        leaves = [part for part in net.module.modules() if not list(part.children())]
        products = CountedProducts()
        hooks = [part.register_forward_hook(lambda _, __, y: sizes.append(_numel(y) // len(x))) for part in leaves]
        try:
            with torch.no_grad(), products:
                net.bind(net.start_buffers, train=False)(net.start, x[None])
        finally:
            for hook in hooks:
                hook.remove()
        net.facts[key] = products.multiply_adds / len(x), sum(sizes), max(sizes)
    size: tuple[float, int, int] = net.facts[key]
    return size


def _numel(outputs: object) -> int:
    return outputs.numel() if isinstance(outputs, Tensor) else 0
