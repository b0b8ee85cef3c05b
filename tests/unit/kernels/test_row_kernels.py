"""The kernels of large models, for many rows at once, against torch row by row in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("kernels need a GPU", allow_module_level=True)

from fedgg.kernels import (
    max_pool,
    narrow_convolution,
    optimiser_step,
    row_convolution,
    row_convolution_by_copies,
    row_group_norm,
    weight_gradient_step,
)
from fedgg.kernels.optimiser_step import Pass, Shared
from fedgg.kernels.row_convolution import Finish, Geometry

CUDA = torch.device("cuda")
UNTOUCHED = 9.0
# rows, batch, channels, height, width, outputs, kernel, stride, padding
Case = tuple[int, int, int, int, int, int, int, int, int]
CONVOLUTIONS: list[Case] = [
    (2, 5, 64, 8, 8, 64, 3, 1, 1),
    (3, 7, 32, 4, 4, 48, 3, 1, 1),
    (2, 50, 64, 1, 1, 128, 3, 1, 1),
    (2, 9, 128, 2, 2, 64, 1, 1, 0),
    (1, 3, 256, 16, 16, 128, 3, 1, 1),
    (2, 3, 16, 32, 32, 16, 5, 1, 2),
    (2, 4, 3, 32, 32, 64, 3, 1, 1),
    (2, 3, 3, 32, 32, 16, 7, 2, 3),
    (2, 3, 64, 8, 8, 128, 3, 2, 1),
    (2, 3, 64, 7, 9, 32, 1, 2, 0),
    (2, 3, 20, 6, 5, 10, 3, 1, 0),
    (1, 4, 16, 9, 9, 24, 2, 3, 1),
]
CLOSE = {"ieee": 1e-5, "tf32x3": 1e-5, "tf32": 3e-3, "bf16": 2e-2}


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=CUDA)


def distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).detach().norm() / exact.detach().norm())


@pytest.mark.parametrize("precision", ["tf32x3", "tf32", "bf16"])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions(case: Case, precision: str) -> None:
    torch.manual_seed(0)
    rows, batch, channels, height, width, outputs, kernel, stride, padding = case
    geometry = Geometry((kernel, kernel), (stride, stride), (padding, padding))
    dtype, weights = torch.bfloat16 if precision == "bf16" else torch.float32, outputs * channels * kernel**2
    stored = drawn(rows, weights + outputs + 64 - (weights + outputs) % 64, dtype=dtype)
    w, bias = stored[:, :weights].view(rows, outputs, kernel, kernel, channels), stored[:, weights:][:, :outputs]
    x = drawn(rows, batch, height, width, channels, dtype=dtype)
    exact_x, exact_w = (t.double().movedim(-1, -3).requires_grad_() for t in (x, w))
    outs = [F.conv2d(exact_x[k], exact_w[k], bias[k].double(), stride, padding) for k in range(rows)]
    exact = torch.stack(outs)
    grad = drawn(*exact.movedim(2, -1).shape, dtype=dtype)
    expected_x, expected_w = torch.autograd.grad(exact, (exact_x, exact_w), grad.double().movedim(-1, 2))

    by_copies = row_convolution_by_copies.supports(x, w, geometry)
    assert by_copies == (precision == "bf16" and stride == 1 and channels >= 16 and channels != 20)
    for copies in {by_copies, False}:
        into = torch.full_like(stored, UNTOUCHED, dtype=torch.float32)
        into_w = into[:, :weights].view_as(w)
        for splits in (1, 3):
            if copies:
                y = row_convolution_by_copies.forward(x, w, bias.float(), geometry, True)
                grad_x = row_convolution_by_copies.input_gradient(grad, w, height, width, geometry)
                row_convolution_by_copies.weight_gradient(x, grad, into_w, geometry, splits=splits)
            else:
                y = row_convolution.forward(x, w, bias.float(), geometry, True, precision)
                grad_x = row_convolution.input_gradient(grad, w, height, width, geometry, precision)
                row_convolution.weight_gradient(x, grad, into_w, geometry, precision, splits=splits)
            assert distance(y, exact.relu().movedim(2, -1)) < CLOSE[precision]
            assert distance(grad_x, expected_x.movedim(2, -1)) < CLOSE[precision]
            assert distance(into_w, expected_w.movedim(2, -1)) < CLOSE[precision]
            assert (into[:, weights:] == UNTOUCHED).all()


@pytest.mark.parametrize("case", [(256, 256, 2), (128, 128, 4), (64, 64, 32), (512, 512, 1)], ids=str)
def test_products_by_copies_repeat_to_the_bit(case: tuple[int, int, int]) -> None:
    """Sums of several turns, by so many programs that loads and products of several overlap."""
    torch.manual_seed(0)
    channels, outputs, side = case
    rows, batch, geometry = 20, 50, Geometry((3, 3), (1, 1), (1, 1))
    x = drawn(rows, batch, side, side, channels, dtype=torch.bfloat16)
    grad = drawn(rows, batch, side, side, outputs, dtype=torch.bfloat16)
    w, bias = drawn(rows, outputs, 3, 3, channels, dtype=torch.bfloat16), drawn(rows, outputs)

    def computed() -> tuple[Tensor, ...]:
        into = torch.empty_like(w, dtype=torch.float32)
        row_convolution_by_copies.weight_gradient(x, grad, into, geometry)
        forward = row_convolution_by_copies.forward(x, w, bias, geometry, True)
        return into, forward, row_convolution_by_copies.input_gradient(grad, w, side, side, geometry)

    first = computed()
    for _ in range(20):
        assert all(map(torch.equal, first, computed()))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_images_with_what_follows(dtype: torch.dtype, stride: int) -> None:
    torch.manual_seed(0)
    rows, batch, channels, side, outputs, precision = 3, 7, 64, 8, 32, "bf16" if dtype == torch.bfloat16 else "tf32x3"
    geometry = Geometry((3, 3), (stride, stride), (1, 1))
    x, added = (drawn(rows, batch, side, side, channels, dtype=dtype) for _ in range(2))
    w = drawn(rows, outputs, 3, 3, channels, dtype=dtype)
    grad = drawn(rows, batch, *geometry.outputs(side, side), outputs, dtype=dtype)
    leaf = x.double().movedim(-1, 2).requires_grad_()
    exact_w = w.double().movedim(-1, 2)
    y = torch.stack([F.conv2d(leaf[k], exact_w[k], None, stride, 1) for k in range(rows)])
    (plain,) = torch.autograd.grad(y, leaf, grad.double().movedim(-1, 2))
    exact = torch.where(x > 0, plain.movedim(2, -1) + added.double(), 0)
    finish = Finish(added, x)
    if row_convolution_by_copies.supports(x, w, geometry):
        ours = row_convolution_by_copies.input_gradient(grad, w, side, side, geometry, finish)
    else:
        ours = row_convolution.input_gradient(grad, w, side, side, geometry, precision, finish)
    assert finish.sums is not None
    assert distance(ours, exact) < CLOSE[precision]
    assert distance(finish.sums.sum(1), exact.sum((1, 2, 3))) < CLOSE[precision]


@pytest.mark.parametrize("precision", ["tf32x3", "tf32", "bf16"])
@pytest.mark.parametrize(
    "case",
    [
        (2, 5, 3, 32, 32, 64, 7, 2, 3),
        (3, 7, 3, 8, 9, 48, 3, 1, 1),
        (2, 3, 1, 9, 9, 16, 5, 1, 2),
        (1, 4, 4, 6, 6, 80, 1, 1, 0),
    ],
    ids=str,
)
def test_convolutions_of_few_channels(case: Case, precision: str) -> None:
    torch.manual_seed(0)
    rows, batch, channels, height, width, outputs, kernel, stride, padding = case
    geometry = Geometry((kernel, kernel), (stride, stride), (padding, padding))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x, w = drawn(rows, batch, channels, height, width, dtype=dtype), drawn(rows, outputs, kernel, kernel, channels)
    w, bias = w.to(dtype), drawn(rows, outputs)
    assert narrow_convolution.supports(w, geometry)
    exact_w = w.double().movedim(-1, 2).requires_grad_()
    y = torch.stack([F.conv2d(x[k].double(), exact_w[k], bias[k].double(), stride, padding) for k in range(rows)])
    packed = narrow_convolution.packed(x)
    grad = drawn(*y.movedim(2, -1).shape, dtype=dtype)
    (expected,) = torch.autograd.grad(y, exact_w, grad.double().movedim(-1, 2), retain_graph=True)
    ours = narrow_convolution.forward(packed, w, bias, geometry, True, precision)
    assert distance(ours, y.relu().movedim(2, -1)) < CLOSE[precision]
    for splits in (1, 3):
        into = torch.full_like(w, UNTOUCHED, dtype=torch.float32)
        narrow_convolution.weight_gradient(packed, grad, into, geometry, precision, splits)
        assert distance(into, expected.movedim(2, -1)) < CLOSE[precision]


STEPPED = [(3, 6, 128, 64, 2, 3), (3, 3, 64, 128, 4, 1), (3, 50, 128, 256, 1, 3), (12, 50, 256, 256, 2, 3)]


@pytest.mark.parametrize("vectors", [0, 1])
@pytest.mark.parametrize("case", STEPPED, ids=str)
def test_steps_in_the_kernel_of_a_gradient(case: tuple[int, ...], vectors: int) -> None:
    torch.manual_seed(0)
    rows, batch, channels, outputs, side, kernel = case
    before, behind, geometry = 48, 80, Geometry((kernel, kernel), (1, 1), (kernel // 2, kernel // 2))
    x = drawn(rows, batch, side, side, channels, dtype=torch.bfloat16)
    grad = drawn(rows, batch, side, side, outputs, dtype=torch.bfloat16)
    weights = outputs * kernel**2 * channels
    gradient = drawn(rows, before + weights + behind)
    of_weights = gradient[:, before : before + weights].view(rows, outputs, kernel, kernel, channels)
    row_convolution_by_copies.weight_gradient(x, grad, of_weights, geometry)
    spans = ((0, before), (before + weights, gradient.shape[1]))
    start, velocity, anchor, vector = (torch.randn_like(gradient) for _ in range(4))
    lead = torch.zeros(rows, dtype=torch.int32, device=CUDA)
    of_spans = optimiser_step.blocks(gradient.shape[1], 0, spans)
    blocks = {0: optimiser_step.blocks(gradient.shape[1])}
    blocks[len(spans)] = of_spans + weight_gradient_step.blocks(outputs, kernel**2 * channels, channels)
    numbers = {name: torch.rand(rows, 1, device=CUDA) for name in ("lr", "momentum", "decay")}
    at_work = torch.ones(rows, 1, dtype=torch.bool, device=CUDA)
    at_work[1] = False
    factors = torch.rand(rows, 3, device=CUDA)

    def begun(parts_of_row: tuple[tuple[int, int], ...]) -> Pass:
        return Pass(
            w=start.clone(),
            velocity=velocity.clone(),
            anchor=Shared(anchor, lead) if vectors else None,
            vectors=[Shared(vector, lead)] * vectors,
            factors=factors,
            has_factor=[bool(vectors), bool(vectors), False],
            at_work=at_work,
            parts=torch.zeros(rows, 2, blocks[len(parts_of_row)], device=CUDA),
            pairs=((1, 1), (0, 2)) if vectors else ((1, 1), (1, 1)),
            spans=parts_of_row,
            short=start.bfloat16(),
            **numbers,
        )

    def stepped_by_the_kernel() -> Pass:
        step = begun(spans)
        for number in range(len(spans)):
            optimiser_step.advance_span(step, gradient, number)
        weight_gradient_step.advance(step, x, grad, geometry, before, of_spans)
        return step

    expected = begun(())
    optimiser_step.advance(expected, gradient)
    gradient[:, before : before + weights] = torch.nan  # must not be read
    step = stepped_by_the_kernel()
    for name in ("w", "velocity", "short"):
        exact, ours = (getattr(one, name).double() for one in (expected, step))
        assert distance(ours, exact) < (1e-2 if name == "short" else 1e-5), name
    assert torch.equal(step.w[1], start[1])  # a row without work
    exact_sums, sums = (one.parts.double().sum(2) for one in (expected, step))
    assert distance(sums, exact_sums) < 1e-4
    for _ in range(10):
        again = stepped_by_the_kernel()
        assert torch.equal(again.w, step.w)
        assert torch.equal(again.parts, step.parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("with_shortcut", [True, False])
@pytest.mark.parametrize(
    "sizes", [(2, 3, 8, 8, 64, 2), (2, 5, 1, 1, 48, 4), (1, 2, 32, 32, 64, 2), (3, 2, 5, 7, 24, 8)]
)
def test_group_norm(sizes: tuple[int, ...], with_shortcut: bool, relu: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, batch, height, width, channels, groups = sizes
    x = (drawn(rows, batch, height, width, channels) + 3).to(dtype)
    shortcut = drawn(rows, batch, height, width, channels, dtype=dtype) if with_shortcut else None
    stored = drawn(rows, 2 * channels + 5)
    scale, shift = stored[:, :channels], stored[:, channels : 2 * channels]
    y, mean, deviation = row_group_norm.forward(x, scale, shift, groups, 1e-5, shortcut, relu)

    leaves = [t.double().requires_grad_() for t in (x, *([shortcut] if shortcut is not None else []), scale, shift)]
    outs = []
    for k in range(rows):
        out = F.group_norm(leaves[0][k].movedim(-1, 1), groups, leaves[-2][k], leaves[-1][k], 1e-5).movedim(1, -1)
        out = out + leaves[1][k] if with_shortcut else out
        outs.append(torch.where(y[k] > 0, out, 0) if relu else out)  # rounding may take an output to the other side
    exact, close = torch.stack(outs), 1e-5 if dtype == torch.float32 else 1e-2
    assert distance(y, exact) < close
    grad = drawn(*y.shape, dtype=dtype)
    expected = torch.autograd.grad(exact, leaves, grad.double())
    into = torch.full_like(stored, UNTOUCHED)
    of_x, of_shortcut, parts = row_group_norm.backward(grad, x, y, scale, mean, deviation, relu, with_shortcut)
    row_group_norm.add_images(parts, into[:, :channels], into[:, channels : 2 * channels])
    assert distance(of_x, expected[0]) < close
    assert (of_shortcut is None) == (not with_shortcut)
    if of_shortcut is not None:
        assert distance(of_shortcut, expected[1]) < close
    assert distance(into[:, :channels], expected[-2]) < close
    assert distance(into[:, channels : 2 * channels], expected[-1]) < close
    assert (into[:, 2 * channels :] == UNTOUCHED).all()


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 3, 2)])
def test_max_pool(kernel: int, stride: int, padding: int) -> None:
    torch.manual_seed(0)
    geometry = Geometry((kernel, kernel), (stride, stride), (padding, padding))
    x = drawn(4, 11, 8, 24) - 5  # all negative: padding must not win
    y, winner = max_pool.forward(x, geometry)
    leaf = x.clone().requires_grad_()
    exact = F.max_pool2d(leaf.movedim(-1, 1), kernel, stride, padding).movedim(1, -1)
    torch.testing.assert_close(y, exact)
    grad = drawn(*y.shape)
    (expected,) = torch.autograd.grad(exact, leaf, grad)
    torch.testing.assert_close(max_pool.backward(grad, winner, 11, 8, geometry), expected)
