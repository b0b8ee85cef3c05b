"""Examples of many rows gathered, moved and normalised in one pass: from bytes in the data set to what a model takes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather(
    source, where, top, left, mirror, shift, scale, out, values,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, margin: tl.constexpr,
    moved: tl.constexpr, by_channel: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * size + tl.arange(0, size)
    inside = at < values
    example = tl.maximum(tl.load(where + image), 0).to(tl.int64)
    channel = at // (height * width)
    if moved:
        y = (at // width) % height + tl.load(top + image).to(tl.int32) - margin
        x = at % width
        x = tl.where(tl.load(mirror + image) == 1, width - 1 - x, x) + tl.load(left + image).to(tl.int32) - margin
        seen = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        value = tl.load(source + example * values + channel * height * width + y * width + x, mask=seen, other=0)
    else:
        value = tl.load(source + example * values + at, mask=inside, other=0)
    if by_channel:
        offset, factor = tl.load(shift + channel, mask=inside), tl.load(scale + channel, mask=inside)
    else:
        offset, factor = tl.load(shift), tl.load(scale)
    tl.store(out + image * values + at, (value.to(offset.dtype) - offset) * factor, mask=inside)


def gather(
    source: Tensor,  # [N, ...]
    where: Tensor,  # [M] int32, -1 for padding, which reads example 0
    moves: tuple[Tensor, Tensor, Tensor] | None,  # top, left, mirror, `[M]` int8 each
    shift: Tensor,
    scale: Tensor,
    margin: int,
) -> Tensor:
    """`[M, ...]` in the type of `shift`."""
    shape = source.shape[1:]
    channels, height, width = shape if len(shape) == 3 else (shape[0], 1, max(1, shape[1:].numel()))
    out = torch.empty((len(where), *shape), dtype=shift.dtype, device=source.device)
    values, size = shape.numel(), 1024
    top, left, mirror = moves or (where, where, where)
    by_channel = shift.numel() > 1
    _gather[(len(where), -(-values // size))](
        source, where, top, left, mirror, shift, scale, out, values,
        channels, height, width, margin, moves is not None, by_channel, size,
    )  # fmt: skip
    return out
