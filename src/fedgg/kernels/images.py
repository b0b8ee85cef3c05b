"""Examples gathered, augmented and normalised in one pass: from bytes of the data set to a model's inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather(
    source, where, top, left, mirror, shift, scale, out, values, length,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr, margin: tl.constexpr,
    moved: tl.constexpr, by_channel: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * size + tl.arange(0, size)
    example = tl.maximum(tl.load(where + image), 0).to(tl.int64)
    if lanes > 0:
        channel, pixel = at % lanes, at // lanes
        inside = (at < length) & (channel < channels)
    else:
        channel, pixel = at // (height * width), at % (height * width)
        inside = at < length
    seen = inside
    if moved:
        y = pixel // width + tl.load(top + image).to(tl.int32) - margin
        x = pixel % width
        x = tl.where(tl.load(mirror + image) == 1, width - 1 - x, x) + tl.load(left + image).to(tl.int32) - margin
        seen = seen & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        pixel = y * width + x
    value = tl.load(source + example * values + channel * (height * width) + pixel, mask=seen, other=0)
    if by_channel:
        offset, factor = tl.load(shift + channel, mask=inside, other=0), tl.load(scale + channel, mask=inside, other=0)
    else:
        offset, factor = tl.load(shift), tl.load(scale)
    ready = tl.where(inside, (value.to(offset.dtype) - offset) * factor, 0)
    tl.store(out + image * length + at, ready, mask=at < length)


def gather(
    source: Tensor,  # [N, ...]
    where: Tensor,  # [M] int32, -1 for padding, which reads example 0
    moves: tuple[Tensor, Tensor, Tensor] | None,  # top, left, mirror, `[M]` int8 each
    shift: Tensor,
    scale: Tensor,
    margin: int,
    lanes: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`[M, ...]`; with `lanes`, images are packed: channels last, padded with zeros to this number."""
    shape = source.shape[1:]
    channels, height, width = shape if len(shape) == 3 else (shape[0], 1, shape[1:].numel())
    images, values, size = len(where), shape.numel(), 1024
    length = height * width * lanes if lanes else values
    out = torch.empty((images, length), dtype=dtype or shift.dtype, device=source.device)
    top, left, mirror = moves or (where, where, where)
    _gather[(images, -(-length // size))](
        source, where, top, left, mirror, shift, scale, out, values, length,
        channels, height, width, lanes, margin, moves is not None, shift.numel() > 1, size,
    )  # fmt: skip
    if not lanes:
        return out.view(images, *shape)
    return out.view(images, height, width, lanes).permute(0, 3, 1, 2)[:, :channels]
