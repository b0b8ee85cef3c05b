"""Group normalisation of many rows at once, each with its own scale and shift, with a sum and ReLU behind it.

Images are pixelwise, `[K, B, H, W, C]`. One program normalises one group of one image. The residual sum of a block,
`relu(norm(x) + shortcut)`, is part of the same pass. Gradients of scale and shift are written for each image and then
added in a fixed order, so that results are reproducible to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 8192  # of a group that are in registers at a time


@triton.jit
def _group(x, image, start, pixels, channels, group, each: tl.constexpr, size_p: tl.constexpr, size_c: tl.constexpr):
    """Places and mask of some pixels of the group's channels."""
    p = start + tl.arange(0, size_p)
    c = tl.arange(0, size_c)
    at = image.to(tl.int64) * pixels * channels + p[:, None] * channels + group * each + c[None, :]
    return at, (p < pixels)[:, None] & (c < each)[None, :]


@triton.jit(do_not_specialize=["batch", "pixels"])
def _forward(
    x, scale, shift, shortcut, y, mean, deviation, stride_row, batch, pixels, channels, epsilon,
    each: tl.constexpr, has_shortcut: tl.constexpr, relu: tl.constexpr, whole: tl.constexpr,
    size_p: tl.constexpr, size_c: tl.constexpr,
):  # fmt: skip
    """With `whole`, a group is in registers at once, and read once."""
    image, group = tl.program_id(0), tl.program_id(1)
    row = (image // batch).to(tl.int64)
    elements = pixels * each
    c = group * each + tl.arange(0, size_c)
    in_group = tl.arange(0, size_c) < each
    scales = tl.load(scale + row * stride_row + c, mask=in_group, other=0.0).to(tl.float32)[None, :]
    shifts = tl.load(shift + row * stride_row + c, mask=in_group, other=0.0).to(tl.float32)[None, :]
    if whole:
        at, inside = _group(x, image, 0, pixels, channels, group, each, size_p, size_c)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        average = tl.sum(value) / elements
        apart = tl.where(inside, value - average, 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(apart * apart) / elements + epsilon)
        value = apart * inverse * scales + shifts
        if has_shortcut:
            value += tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
        if relu:
            value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + at, value, mask=inside)
        tl.store(mean + image * tl.num_programs(1) + group, average)
        tl.store(deviation + image * tl.num_programs(1) + group, inverse)
    else:
        total = tl.zeros((size_p, size_c), tl.float32)
        for start in range(0, pixels, size_p):
            at, inside = _group(x, image, start, pixels, channels, group, each, size_p, size_c)
            total += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        average = tl.sum(total) / elements
        total = tl.zeros((size_p, size_c), tl.float32)
        for start in range(0, pixels, size_p):
            at, inside = _group(x, image, start, pixels, channels, group, each, size_p, size_c)
            apart = tl.where(inside, tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - average, 0.0)
            total += apart * apart
        inverse = 1.0 / tl.sqrt(tl.sum(total) / elements + epsilon)
        for start in range(0, pixels, size_p):
            at, inside = _group(x, image, start, pixels, channels, group, each, size_p, size_c)
            value = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - average) * inverse * scales + shifts
            if has_shortcut:
                value += tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
            if relu:
                value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
            tl.store(y + at, value, mask=inside)
        tl.store(mean + image * tl.num_programs(1) + group, average)
        tl.store(deviation + image * tl.num_programs(1) + group, inverse)


@triton.jit
def _slope(grad, x, y, at, inside, average, inverse, relu: tl.constexpr):
    """The gradient before ReLU, and the normalised images."""
    slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if relu:
        slope = tl.where(tl.load(y + at, mask=inside, other=0.0) > 0, slope, 0.0)
    return slope, (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - average) * inverse


@triton.jit(do_not_specialize=["batch", "pixels"])
def _backward(
    grad, x, y, scale, mean, deviation, grad_x, grad_shortcut, parts, stride_row, batch, pixels, channels,
    each: tl.constexpr, has_shortcut: tl.constexpr, relu: tl.constexpr, whole: tl.constexpr,
    size_p: tl.constexpr, size_c: tl.constexpr,
):  # fmt: skip
    image, group = tl.program_id(0), tl.program_id(1)
    row = (image // batch).to(tl.int64)
    average = tl.load(mean + image * tl.num_programs(1) + group)
    inverse = tl.load(deviation + image * tl.num_programs(1) + group)
    c = tl.arange(0, size_c)
    factor = tl.load(scale + row * stride_row + group * each + c, mask=c < each, other=0.0).to(tl.float32)
    place = image.to(tl.int64) * 2 * channels + group * each + c
    if whole:
        at, inside = _group(x, image, 0, pixels, channels, group, each, size_p, size_c)
        slope, normal = _slope(grad, x, y, at, inside, average, inverse, relu)
        if has_shortcut:
            tl.store(grad_shortcut + at, slope, mask=inside)
        of_scale, of_shift = tl.sum(slope * normal, axis=0), tl.sum(slope, axis=0)
        along = tl.sum(of_scale * factor) / (pixels * each)
        beside = tl.sum(of_shift * factor) / (pixels * each)
        tl.store(grad_x + at, (slope * factor[None, :] - beside - normal * along) * inverse, mask=inside)
        tl.store(parts + place, of_scale, mask=c < each)
        tl.store(parts + place + channels, of_shift, mask=c < each)
    else:
        of_scale = tl.zeros((size_c,), tl.float32)
        of_shift = tl.zeros((size_c,), tl.float32)
        for start in range(0, pixels, size_p):
            at, inside = _group(x, image, start, pixels, channels, group, each, size_p, size_c)
            slope, normal = _slope(grad, x, y, at, inside, average, inverse, relu)
            if has_shortcut:
                tl.store(grad_shortcut + at, slope, mask=inside)
            of_scale += tl.sum(slope * normal, axis=0)
            of_shift += tl.sum(slope, axis=0)
        along = tl.sum(of_scale * factor) / (pixels * each)
        beside = tl.sum(of_shift * factor) / (pixels * each)
        for start in range(0, pixels, size_p):
            at, inside = _group(x, image, start, pixels, channels, group, each, size_p, size_c)
            slope, normal = _slope(grad, x, y, at, inside, average, inverse, relu)
            tl.store(grad_x + at, (slope * factor[None, :] - beside - normal * along) * inverse, mask=inside)
        tl.store(parts + place, of_scale, mask=c < each)
        tl.store(parts + place + channels, of_shift, mask=c < each)


@triton.jit(do_not_specialize=["batch"])
def _add_images(parts, grad_scale, grad_shift, stride_row, batch, channels, size: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * size + tl.arange(0, size)
    images = tl.arange(0, 32)
    total = tl.zeros((32, size), tl.float32)
    for start in range(0, batch, 32):
        place = (row * batch + start + images)[:, None] * 2 * channels + at[None, :]
        total += tl.load(
            parts + place, mask=(start + images < batch)[:, None] & (at < 2 * channels)[None, :], other=0.0
        )
    total = tl.sum(total, axis=0)
    tl.store(grad_scale + row * stride_row + at, total, mask=at < channels)
    tl.store(grad_shift + row * stride_row + at - channels, total, mask=(at >= channels) & (at < 2 * channels))


def _sizes(pixels: int, each: int) -> tuple[int, int]:
    columns = triton.next_power_of_2(each)
    return max(1, min(triton.next_power_of_2(pixels), ELEMENTS // columns)), columns


def _warps(size_p: int, size_c: int) -> int:
    return max(1, min(8, size_p * size_c // 1024))


def forward(
    x: Tensor, scale: Tensor, shift: Tensor, groups: int, epsilon: float, shortcut: Tensor | None, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised images, and the mean and the inverse standard deviation of each group; scale and shift `[K, C]`."""
    models, batch, height, width, channels = x.shape
    y = torch.empty_like(x)
    mean = torch.empty((models * batch, groups), dtype=torch.float32, device=x.device)
    deviation = torch.empty_like(mean)
    sizes = _sizes(height * width, channels // groups)
    _forward[(models * batch, groups)](
        x, scale, shift, x if shortcut is None else shortcut, y, mean, deviation, scale.stride(0),
        batch, height * width, channels, epsilon, channels // groups, shortcut is not None, relu,
        sizes[0] >= height * width, *sizes,
        num_warps=_warps(*sizes),
    )  # fmt: skip
    return y, mean, deviation


def backward(
    grad: Tensor, x: Tensor, y: Tensor, scale: Tensor, mean: Tensor, deviation: Tensor, relu: bool, with_shortcut: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of the images and of the shortcut, and each image's of scale and shift, `[K, B, 2, C]`."""
    models, batch, height, width, channels = x.shape
    groups = mean.shape[1]
    grad_x = torch.empty_like(x)
    grad_shortcut = torch.empty_like(x) if with_shortcut else None
    parts = torch.empty((models, batch, 2, channels), dtype=torch.float32, device=x.device)
    sizes = _sizes(height * width, channels // groups)
    _backward[(models * batch, groups)](
        grad, x, y, scale, mean, deviation, grad_x, grad_x if grad_shortcut is None else grad_shortcut, parts,
        scale.stride(0), batch, height * width, channels, channels // groups, with_shortcut, relu,
        sizes[0] >= height * width, *sizes, num_warps=_warps(*sizes),
    )  # fmt: skip
    return grad_x, grad_shortcut, parts


def add_images(parts: Tensor, into_scale: Tensor, into_shift: Tensor) -> None:
    """Writes the gradients of scale and shift, summed over the images, into views `[K, C]` of rows."""
    models, batch, _, channels = parts.shape
    size = 64
    _add_images[(-(-2 * channels // size), models)](
        parts, into_scale, into_shift, into_scale.stride(0), batch, channels, size
    )
