"""Rows in the pixelwise layout during a round: weights of convolutions lie as tensor cores read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from fedgg.core.local import LocalEnd, LocalStart
from fedgg.core.model import Net
from fedgg.core.tensor_rows import Rows


def arranged_start(start: LocalStart, net: Net) -> LocalStart:
    """The rows in the net's memory layout."""
    if not net.layout.pixelwise:
        return start
    convert = net.layout.arranged
    return replace(start, w=convert(start.w), down=_each(start.down, convert), memory=_each(start.memory, convert))


def restored_end(end: LocalEnd, net: Net) -> LocalEnd:
    """What clients send and keep, in the layout of the module."""
    if not net.layout.pixelwise:
        return end
    convert = net.layout.restored
    return replace(end, up=_each(end.up, convert), memory=_each(end.memory, convert))


def _each(rows: Rows, convert: Callable[[Tensor], Tensor]) -> Rows:
    return {name: convert(tensor) for name, tensor in rows.items()}
