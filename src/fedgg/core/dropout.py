"""Dropout masks that are counted, not drawn: each is a function of (seed, round, client, step, which dropout, element).

Integer arithmetic is the same everywhere, so every engine drops the same units: one client alone, many in a stack, on a
CPU, on a GPU, within a captured graph. torch's own generators could not do that, since what they draw depends on the
device and on the shape of the whole stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedgg.core.sampling import torch_seed

DropoutKey = tuple[int, int, int]  # seed, round, client

GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, odd, as a signed number
RESOLUTION = 24  # bits of the uniform number each element is compared by


def mask_keys(rows: Sequence[DropoutKey], device: torch.device) -> Tensor:
    """One key for each row, `[K, 1]`."""
    keys = [torch_seed(seed, "dropout", round_, client) for seed, round_, client in rows]
    return torch.tensor(keys, dtype=torch.int64, device=device)[:, None]


def keep(key: Tensor, step: Tensor | int, place: int, shape: torch.Size, p: float) -> Tensor:
    """Which elements survive, bool in `shape`; `key` `[1]` is one row's, `place` counts the dropouts of a forward."""
    moment = _mixed(key + GOLDEN * (torch.as_tensor(step, device=key.device).to(torch.int64) * 1024 + place + 1))
    element = torch.arange(shape.numel(), dtype=torch.int64, device=key.device)
    uniform = _shifted(_mixed(moment + GOLDEN * element), 64 - RESOLUTION)
    return (uniform >= round(p * (1 << RESOLUTION))).view(shape)


class CountedMasks(TorchFunctionMode):
    """Within the block `F.dropout` (and so `nn.Dropout`) takes counted masks; everything else is as it was."""

    def __init__(self, key: Tensor, step: Tensor | int):
        super().__init__()
        self._key, self._step = key, step
        self.used = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        return self._dropout(*args, **(kwargs or {}))

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        self.used += 1
        survives = keep(self._key, self._step, self.used, x.shape, p)
        return torch.where(survives, x / (1 - p), 0) if p < 1 else torch.zeros_like(x)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(z: Tensor) -> Tensor:
    """The finalising steps of SplitMix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit."""
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shifted(z, 31)
