"""How much arithmetic a forward pass is: the multiply-adds of its products, seen as they are called.

torch has a counter of its own; the first use of it imports a compiler, which takes longer than many a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
