"""Fused pooling computes what it stands for: against torch's own convolution, ReLU and max-pool."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedgg.engines.fused.conv_pool import FusedConvolutionPool, FusedPool, with_fused_pooling

MODULES = {
    "few channels": lambda: nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
    "few channels, padded": lambda: nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    "few channels, no bias": lambda: nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
    "many channels": lambda: nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
    "pool alone": lambda: nn.Sequential(nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.Tanh()),
    "odd sides": lambda: nn.Sequential(nn.Conv2d(3, 6, 4), nn.ReLU(), nn.MaxPool2d(2)),
    "other windows": lambda: nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(3)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU()), nn.MaxPool2d(2)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_are_torchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = MODULES[name]().to(dtype)
    fused = with_fused_pooling(plain)
    first = next(part for part in plain.modules() if isinstance(part, nn.Conv2d))
    x = torch.randn(5, first.in_channels, 12, 12, dtype=dtype, requires_grad=True)
    assert dict(fused.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    outputs = plain(x), fused(x)
    grad = torch.randn_like(outputs[0])
    gradients = [
        torch.autograd.grad(y, [x, *module.parameters()], grad)
        for y, module in zip(outputs, (plain, fused), strict=True)
    ]
    close = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(outputs[1], outputs[0], rtol=close, atol=close)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=close, atol=close)


def test_what_is_replaced() -> None:
    few, many, alone = (with_fused_pooling(MODULES[name]()) for name in ("few channels", "many channels", "pool alone"))
    assert [type(part) for part in few.children()] == [FusedConvolutionPool, nn.Identity, nn.ReLU]
    assert [type(part) for part in many.children()] == [nn.Conv2d, FusedPool, nn.ReLU]
    assert [type(part) for part in alone.children()] == [nn.Conv2d, FusedPool, nn.Tanh]
    other = MODULES["other windows"]()
    assert [type(part) for part in with_fused_pooling(other).children()] == [type(part) for part in other.children()]
    assert with_fused_pooling(linear := nn.Linear(2, 2)) is linear


def test_of_equals_the_first_counts() -> None:
    x = torch.zeros(1, 1, 4, 4).fill_(0.5).requires_grad_()
    plain, fused = nn.MaxPool2d(2), FusedPool()
    for module in (plain, fused):
        (grad,) = torch.autograd.grad(module(x).sum(), x)
        assert grad[0, 0].tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]


def test_a_nan_stays_a_nan_and_transforms_go_through() -> None:
    x = torch.randn(3, 2, 4, 4)
    mapped = torch.func.vmap(FusedPool())(x[None].expand(2, -1, -1, -1, -1))
    torch.testing.assert_close(mapped[1], nn.MaxPool2d(2)(x))
    x[0, 0, 0, 0] = float("nan")
    assert bool(FusedPool()(x)[0, 0, 0, 0].isnan())
