"""Each kernel against its plain torch twin, in float64 where rounding would hide a mistake."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("kernels need a GPU", allow_module_level=True)

from fedgg.core.forward import keep
from fedgg.data.batch_preparation import Draws, augment
from fedgg.kernels import convolution, dense, images, loss, optimiser_step, relu_pool_dropout

CUDA = torch.device("cuda")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=CUDA)


def gap(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).detach().abs().max() / exact.detach().abs().max())


@pytest.mark.parametrize(("precision", "close"), [("tf32x3", 3e-6), ("tf32", 3e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize(
    "sizes", [(3, 64, 3, 32, 6, 5), (4, 64, 6, 14, 16, 5), (2, 7, 2, 9, 3, 3), (1, 1, 1, 16, 5, 5)]
)
def test_convolution_relu_pool(sizes: tuple[int, ...], precision: str, close: float) -> None:
    torch.manual_seed(0)
    many, batch, channels, side, out, k = sizes
    shape, count = convolution.Shape(channels, side, side, out, k), out * channels * k * k
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    rows = (0.1 * drawn(many, count + out + 7)).to(dtype).float()
    weight, bias = rows[:, :count].view(many, out, channels, k, k), rows[:, count : count + out]
    x = convolution.packed(drawn(many, batch, channels, side, side).to(dtype), shape.lanes_in)
    kernels = convolution.spread(weight, shape, dtype)
    y, winner = convolution.forward(x, kernels, bias, shape, precision)

    exact_x, exact_rows = x.double().requires_grad_(), rows.double().requires_grad_()
    outputs = []
    for k_row in range(many):
        w = exact_rows[k_row, :count].view(out, channels, k, k)
        outputs.append(F.conv2d(exact_x[k_row], w, exact_rows[k_row, count : count + out]))
    exact = F.max_pool2d(F.relu(torch.cat(outputs)), 2).view(y.shape)
    assert gap(y, exact) < close

    # Behind a maximum, rounding may choose another pixel: gradients are compared where both chose the same.
    grad = drawn(*y.shape)
    same = _chosen(torch.stack(outputs)) == _winners(winner, y)
    grad = torch.where(same, grad, 0).to(dtype)
    assert float(same.float().mean()) > (0.9999 if precision == "tf32x3" else 0.95)
    packed = convolution.packed(grad, shape.lanes_out)
    into = torch.full_like(rows, 9.0)
    convolution.weight_gradient(
        x, packed, winner, shape, precision, into[:, :count].view_as(weight), into[:, count : count + out]
    )
    to_x, to_rows = torch.autograd.grad((exact * grad.double()).sum(), (exact_x, exact_rows))
    assert gap(into[:, : count + out], to_rows[:, : count + out]) < close
    assert bool((into[:, count + out :] == 9.0).all())
    assert gap(convolution.input_gradient(packed, winner, kernels, shape, batch, precision), to_x) < close


def _chosen(outputs: Tensor) -> Tensor:
    """Which of the window's four is the maximum, 4 where none is positive."""
    windows = outputs.unfold(3, 2, 2).unfold(4, 2, 2).flatten(-2)
    best, at = windows.max(-1)
    return torch.where(best > 0, at, 4)


def _winners(winner: Tensor, y: Tensor) -> Tensor:
    many, batch, out, high, wide = y.shape
    return winner.view(many, batch, high, wide, -1).permute(0, 1, 4, 2, 3)[:, :, :out].long()


def test_a_nan_stays_a_nan() -> None:
    shape = convolution.Shape(3, 12, 12, 6, 5)
    x = convolution.packed(drawn(1, 2, 3, 12, 12), shape.lanes_in)
    kernels = convolution.spread(torch.full((1, 6, 3, 5, 5), float("nan"), device=CUDA), shape, torch.float32)
    y, _ = convolution.forward(x, kernels, torch.zeros(1, 6, device=CUDA), shape, "tf32x3")
    assert bool(torch.isnan(y).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pass_of_the_optimiser(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    w, grad, velocity, anchor, a = (drawn(5, 5000, dtype=dtype) for _ in range(5))
    anchor[1] = anchor[3] = anchor[0]
    a[3] = a[0]
    owners = [0, 0, 1, 0, 1]
    shared = [optimiser_step.Shared(rows, optimiser_step.leads(rows, owners)) for rows in (anchor, a)]
    assert [one.lead.tolist() for one in shared] == [[0, 0, 2, 0, 4], [0, 1, 2, 0, 4]]
    factors, lr, momentum, decay = (torch.rand(5, n, dtype=dtype, device=CUDA) for n in (3, 1, 1, 1))
    at_work = torch.tensor([[True], [True], [False], [True], [True]], device=CUDA)
    total = grad + factors[:, :1] * (w - anchor) + factors[:, 1:2] * a + decay * w + momentum * velocity
    step = -lr * total
    drift = w + step - anchor
    expected = torch.where(at_work, w + step, w), torch.where(at_work, total, velocity)
    parts = torch.zeros(5, 3, optimiser_step.blocks(5000), dtype=dtype, device=CUDA)
    pairs = (
        (optimiser_step.DRIFT, optimiser_step.DRIFT),
        (optimiser_step.DRIFT, optimiser_step.FIRST_VECTOR),
        (optimiser_step.STEP, optimiser_step.STEP),
    )
    rest = [True, True, False], lr, momentum, decay, at_work, parts, pairs
    optimiser_step.advance(optimiser_step.Pass(w, velocity, shared[0], shared[1:], factors, *rest), grad)
    close = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close((w, velocity), expected, rtol=close, atol=close)
    sums = torch.stack([(drift * drift).sum(1), (drift * a).sum(1), (step * step).sum(1)], 1) * at_work
    torch.testing.assert_close(parts.sum(2), sums, rtol=10 * close, atol=100 * close)


@pytest.mark.parametrize(("precision", "close"), [("tf32", 3e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("sizes", [(3, 64, 192, 128), (2, 7, 64, 64), (130, 100, 64, 256)])
def test_a_wide_layer_and_its_step(sizes: tuple[int, ...], precision: str, close: float) -> None:
    torch.manual_seed(5)
    many, batch, inputs, outputs = sizes
    wide, length = inputs * outputs, inputs * outputs + outputs + 70
    rows, velocity, a, grad = (drawn(many, length) for _ in range(4))
    weight, bias = rows[:, :wide].unflatten(1, (outputs, inputs)), rows[:, wide : wide + outputs]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x, back = drawn(many, batch, inputs).to(dtype), drawn(many, batch, outputs).to(dtype)
    plain = x.double() @ weight.double().mT + bias.double()[:, None]
    assert gap(dense.forward(x, weight, bias, False, precision), plain) < close
    assert gap(dense.forward(x, weight, bias, True, precision), plain.relu()) < close

    exact = grad.double()
    exact[:, :wide] = (back.double().mT @ x.double()).flatten(1)
    grad[:, :wide] = float("nan")  # nobody may read it
    lr, momentum, factors = (torch.rand(many, n, device=CUDA) for n in (1, 1, 3))
    total = exact + factors[:, 1:2] * a + momentum * velocity
    step = -lr * total
    at_work = torch.ones(many, 1, dtype=torch.bool, device=CUDA)
    at_work[1] = False
    expected = torch.where(at_work, rows + step, rows), torch.where(at_work, total, velocity)
    sums = torch.stack([(step * step).sum(1), (step * a).sum(1)], 1) * at_work
    parts = torch.zeros(many, 2, optimiser_step.blocks(length, wide), device=CUDA)
    vector = optimiser_step.Shared(a, torch.arange(many, dtype=torch.int32, device=CUDA))
    pairs = ((optimiser_step.STEP, optimiser_step.STEP), (optimiser_step.STEP, optimiser_step.FIRST_VECTOR))
    rest = [False, True, False], lr, momentum, None, at_work, parts, pairs
    optimiser_step.advance(
        optimiser_step.Pass(rows, velocity, None, [vector], factors, *rest),
        grad,
        optimiser_step.Wide(x, back, precision),
    )
    assert gap(rows, expected[0]) < close
    assert gap(velocity, expected[1]) < close
    assert gap(parts.sum(2), sums) < close


@pytest.mark.parametrize("relu", [True, False])
def test_the_way_back_through_a_wide_layer(relu: bool) -> None:
    torch.manual_seed(6)
    grad, y, rows = drawn(3, 50, 192), drawn(3, 50, 192), torch.full((3, 500), 9.0, device=CUDA)
    expected = torch.where(y > 0, grad, 0) if relu else grad
    assert torch.equal(dense.back(grad, y, relu, torch.bfloat16, rows[:, 100:292]), expected.bfloat16())
    torch.testing.assert_close(rows[:, 100:292], expected.sum(1), rtol=1e-5, atol=1e-5)
    assert bool((rows[:, :100] == 9.0).all() & (rows[:, 292:] == 9.0).all())


@pytest.mark.parametrize(("batch", "classes"), [(64, 10), (13, 2), (1, 100), (128, 100)])
def test_mean_cross_entropy(batch: int, classes: int) -> None:
    torch.manual_seed(7)
    outputs = (30 * drawn(5, batch, classes)).requires_grad_()
    targets = torch.randint(classes, (5, batch), device=CUDA)
    mask = (torch.rand(5, batch, device=CUDA) > 0.3).float()
    mask[4] = 0  # a row that is done
    exact = outputs.double()
    each = F.cross_entropy(exact.flatten(0, 1), targets.flatten(), reduction="none").view_as(mask)
    expected = (each * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
    slope = torch.autograd.grad(expected.sum(), outputs)[0]
    assert loss.supports(batch, classes)
    ours, ours_slope = loss.mean_cross_entropy(outputs.detach(), targets, mask)
    torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours_slope, slope, rtol=1e-4, atol=1e-6)
    spoiled = outputs.detach().clone()
    spoiled[2, 0, 0] = float("nan")
    mask[2, 0] = 1
    assert loss.mean_cross_entropy(spoiled, targets, mask)[0].isnan().flatten().tolist() == [
        *[False] * 2,
        True,
        *[False] * 2,
    ]


@pytest.mark.parametrize("lanes", [0, 4])
def test_images_are_gathered_as_they_are_read_on_a_cpu(lanes: int) -> None:
    torch.manual_seed(2)
    source = torch.randint(0, 256, (50, 3, 12, 10), dtype=torch.uint8, device=CUDA)
    where = torch.randint(-1, 50, (20,), dtype=torch.int32, device=CUDA)
    top, left = (torch.randint(0, 9, (20,), dtype=torch.int8, device=CUDA) for _ in range(2))
    mirror = torch.randint(0, 2, (20,), dtype=torch.int8, device=CUDA)
    shift, scale = drawn(3, 1, 1), drawn(3, 1, 1)
    examples = source[where.clamp_min(0).long()]
    moved = (augment(examples, Draws(top, left, mirror)).float() - shift) * scale
    torch.testing.assert_close(images.gather(source, where, (top, left, mirror), shift, scale, 4, lanes), moved)
    still = (examples.float() - shift) * scale
    torch.testing.assert_close(images.gather(source, where, None, shift, scale, 4, lanes), still)


def test_what_stands_around_a_convolution() -> None:
    torch.manual_seed(4)
    for high, wide in ((6, 8), (7, 5)):
        y, rows = drawn(2, 3, high, wide, 70), drawn(2, 75)
        bias = rows[:, 2:72]
        exact, exact_bias = y.clone().requires_grad_(), bias.clone().requires_grad_()
        plain = F.relu(exact + exact_bias[:, None, None, None])
        pooled = F.max_pool2d(plain.flatten(0, 1).movedim(-1, 1), 2).movedim(1, -1).unflatten(0, (2, 3))
        torch.testing.assert_close(relu_pool_dropout.bias_relu(y.clone(), bias), plain)
        ours, winner = relu_pool_dropout.bias_relu_pool(y, bias)
        torch.testing.assert_close(ours, pooled)
        for of_pool, outputs in ((False, plain), (True, pooled)):
            grad = drawn(*outputs.shape)
            expected, expected_bias = torch.autograd.grad(outputs, (exact, exact_bias), grad, retain_graph=True)
            if of_pool:
                back, parts = relu_pool_dropout.pool_back(grad, winner, high, wide)
            else:
                back, parts = relu_pool_dropout.relu_back(grad, plain.detach())
            torch.testing.assert_close(back, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(parts.sum(1), expected_bias, rtol=1e-4, atol=1e-4)


def test_a_kernel_drops_what_the_definition_drops() -> None:
    x = drawn(2, 5, 300)
    keys = torch.tensor([[123456789012345678], [2**63 - 7]], device=CUDA)
    steps = torch.tensor([[3.0], [70.0]], device=CUDA)
    expected = [torch.where(keep(keys[k], steps[k], 2, x[k].shape, 0.3), x[k] / 0.7, 0) for k in range(2)]
    torch.testing.assert_close(relu_pool_dropout.drop(x, keys, steps, 2, 0.3), torch.stack(expected))
