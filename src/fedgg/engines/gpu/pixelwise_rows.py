"""Rows in the pixelwise layout during a round: weights of convolutions lie as tensor cores read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from fedgg.core.local import LocalEnd, LocalStart
from fedgg.core.model import Net
from fedgg.core.tensor_rows import Rows


def arranged_rows(rows: Rows, net: Net) -> Rows:
    """Those with one value for each parameter in the net's memory layout."""
    return _each(rows, net.layout.arranged) if net.layout.pixelwise else rows


def arranged_start(start: LocalStart, net: Net) -> LocalStart:
    """The rows in the net's memory layout."""
    rows = arranged_rows({"w": start.w}, net)
    return replace(start, w=rows["w"], down=arranged_rows(start.down, net), memory=arranged_rows(start.memory, net))


def restored_end(end: LocalEnd, net: Net) -> LocalEnd:
    """What clients send and keep, in the layout of the module."""
    if not net.layout.pixelwise:
        return end
    convert = net.layout.restored
    return replace(end, up=_each(end.up, convert), memory=_each(end.memory, convert))


def _each(rows: Rows, convert: Callable[[Tensor], Tensor]) -> Rows:
    return {name: convert(tensor) for name, tensor in rows.items()}
