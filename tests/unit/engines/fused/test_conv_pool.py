"""Faster layers compute what they stand for: against torch's own convolution, ReLU and max-pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fedgg
from fedgg.engines.fused.conv_pool import (
    ChannelsLastConvolution,
    FusedConvolutionPool,
    FusedPool,
    with_faster_layers,
)
from fedgg.engines.fused.net import fused_net
from fedgg.lab.build import build
from fedgg.models import MODELS as LIBRARY


class Skip(nn.Module):
    """A network that is not an `nn.Sequential`, with a max-pool and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(6 * 3 * 3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.pool(x + x.tanh())
        return self.head(x.flatten(1) * (2 if self.training else 1))  # type: ignore[no-any-return]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "own module": Skip,
    "narrow": lambda: LIBRARY["resnet20"]((3, 12, 12), 4, width=4),
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
    fused = with_faster_layers(plain)
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
    few, many, alone = (with_faster_layers(MODULES[name]()) for name in ("few channels", "many channels", "pool alone"))
    assert [type(part) for part in few.children()] == [FusedConvolutionPool, nn.Identity, nn.ReLU]
    assert [type(part) for part in many.children()] == [nn.Conv2d, FusedPool, nn.ReLU]
    assert [type(part) for part in alone.children()] == [nn.Conv2d, FusedPool, nn.Tanh]
    own = with_faster_layers(MODULES["own module"]())
    assert isinstance(own, Skip)
    assert isinstance(own.pool, FusedPool)
    assert isinstance(own.stem[0], FusedConvolutionPool)
    for name, count in (("resnet20", 19), ("resnet18", 0), ("vgg16", 0), ("cnn", 0)):
        parts = with_faster_layers(LIBRARY[name]((3, 32, 32), 10)).modules()
        assert sum(isinstance(part, ChannelsLastConvolution) for part in parts) == count
    hooked = MODULES["own module"]()
    hooked.register_forward_hook(lambda *_: None)
    assert with_faster_layers(hooked) is hooked
    other = MODULES["other windows"]()
    assert with_faster_layers(other) is other
    assert with_faster_layers(linear := nn.Linear(2, 2)) is linear


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


@pytest.mark.parametrize("statistics", ["average", "frozen"])
@pytest.mark.parametrize("name", ["own", "resnet20"])
def test_runs_are_those_of_the_reference_step(name: str, statistics: str) -> None:
    """In float64; modes of copied parts and of BatchNorm included."""
    x, y = torch.randn(60, 3, 12, 12, dtype=torch.float64), torch.arange(60) % 4
    experiment = fedgg.Experiment(
        rounds=2,
        split={"clients": 3, "scheme": "iid"},
        local={"epochs": 1, "batch": 10, "lr": 0.05},
        engine={"precision": "fp64"},
        model={"statistics": statistics},
    )
    model: Any = Skip if name == "own" else lambda: LIBRARY["resnet20"]((3, 12, 12), 4, width=4, norm="batch")
    data = (x, y, x[:20], y[:20])
    faster = fused_net(build(experiment, model=model, data=data).net)
    assert faster.row_module is not faster.module
    loop, fused = (
        fedgg.run(experiment.changed({"engine.name": engine}), model=model, data=data) for engine in ("loop", "fused")
    )
    for key, tensor in loop.weights.items():
        torch.testing.assert_close(fused.weights[key], tensor, rtol=1e-9, atol=1e-11)
    assert fused.test_accuracy == loop.test_accuracy
