"""How much arithmetic a forward pass is, and how many numbers it leaves behind: for the choice of an engine.

Multiply-adds are counted as the module's products are called.

torch has a counter of its own; the first use of it imports a compiler, which takes longer than many a run.
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


def _transposed(y: Tensor, x: Tensor, weight: Tensor, *_: Any) -> int:
    return x.numel() * weight[0].numel()


def _matrices(y: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    return y.numel() * a.shape[-1]


def _added_matrices(y: Tensor, _: Tensor, a: Tensor, b: Tensor, *__: Any) -> int:
    return y.numel() * a.shape[-1]


def _attention(y: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    return query.numel() * key.shape[-2] + y.numel() * key.shape[-2]


COUNTS: dict[Any, Count] = {
    F.linear: _linear,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _transposed),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, torch.mv, Tensor.matmul, Tensor.mm, Tensor.bmm), _matrices),
    **dict.fromkeys((Tensor.__matmul__, Tensor.__rmatmul__), _matrices),
    **dict.fromkeys((torch.addmm, torch.baddbmm), _added_matrices),
    F.scaled_dot_product_attention: _attention,
}


class CountedProducts(TorchFunctionMode):
    """Within, every product is counted; what is none of `COUNTS` (a recurrent layer's, for instance) is not."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outputs = function(*args, **(kwargs or {}))
        count = COUNTS.get(function)
        if count is not None and isinstance(outputs, Tensor):
            operands = [thing for thing in (*args, *(kwargs or {}).values()) if isinstance(thing, Tensor)]
            self.multiply_adds += count(outputs, *operands)
        return outputs


def multiply_adds(net: Net) -> float:
    """Of a forward pass, an example; zero for a net that has not been examined."""
    return _size_of_a_pass(net)[0]


def activations(net: Net) -> int:
    """Numbers that a forward pass leaves behind, an example."""
    return _size_of_a_pass(net)[1]


def _size_of_a_pass(net: Net) -> tuple[float, int]:
    """Both, counted once for each way to run the module."""
    key, x = f"size of a pass of {type(net).__name__}", net.sample
    if x is None:
        return 0.0, 0
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
        net.facts[key] = products.multiply_adds / len(x), sum(sizes)
    size: tuple[float, int] = net.facts[key]
    return size


def _numel(outputs: object) -> int:
    return outputs.numel() if isinstance(outputs, Tensor) else 0
