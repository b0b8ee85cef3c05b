"""ResNet-18 and ResNet-20: published sizes, torchvision's names, and the forward pass written out in plain torch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedgg
from fedgg.data.dataset import load
from fedgg.errors import UserError
from fedgg.models.resnet import resnet18, resnet20


@pytest.mark.parametrize(
    ("settings", "classes", "parameters"),
    [
        ({"norm": "batch", "stem": "imagenet"}, 1000, 11_689_512),  # torchvision's resnet18
        ({"norm": "batch"}, 10, 11_173_962),  # the usual network for CIFAR-10: a smaller stem and classifier
        ({}, 10, 11_173_962),  # GroupNorm has BatchNorm's weights and biases
    ],
)
def test_size_of_resnet18(settings: dict[str, Any], classes: int, parameters: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in resnet18((3, 32, 32), classes, **settings).parameters()) == parameters


def test_size_of_resnet20() -> None:
    """He et al. 2016, Table 6: 0.27 million parameters, with 19 convolutions and a linear layer."""
    convolutions = 3 * 16 + 6 * 16 * 16 + (16 + 5 * 32) * 32 + (32 + 5 * 64) * 64
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    for settings, projections in ({"norm": "batch"}, 0), ({}, 0), ({"shortcut": "B"}, 16 * 32 + 32 * 64 + 2 * 96):
        module = resnet20((3, 32, 32), 10, **settings)  # type: ignore[arg-type]
        size = sum(p.numel() for p in module.parameters())
        assert size == 9 * convolutions + norms + projections + 650
        assert round(size / 1e6, 2) == 0.27


def test_names_are_those_of_torchvision() -> None:
    blocks = [
        f"layer{stage}.{block}.{part}"
        for stage, block, part in itertools.product((1, 2, 3, 4), (0, 1), ("conv1", "bn1", "conv2", "bn2"))
    ]
    shortcuts = [f"layer{stage}.0.downsample.{part}" for stage, part in itertools.product((2, 3, 4), (0, 1))]
    norms = [name for name in ("bn1", *blocks, *shortcuts) if "bn" in name or name.endswith("downsample.1")]
    parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {f"{name}.weight" for name in ("conv1", *blocks, *shortcuts)} | {"fc.weight", "fc.bias"}
    expected |= {f"{name}.{part}" for name, part in itertools.product(norms, parts)}
    with torch.device("meta"):
        assert set(resnet18((3, 32, 32), 10, norm="batch").state_dict()) == expected


def plain_resnet(
    weights: dict[str, Tensor], x: Tensor, *, stages: int, blocks: int, groups: int | None, imagenet: bool, train: bool
) -> Tensor:
    """The network by torch.nn.functional alone; `groups` None: BatchNorm."""

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        if groups is None:
            mean, variance = weights[f"{name}.running_mean"].clone(), weights[f"{name}.running_var"].clone()
            return F.batch_norm(x, mean, variance, weight, bias, training=train)
        grouped = x.reshape(len(x), groups, -1)
        deviation = (grouped.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
        x = ((grouped - grouped.mean(2, keepdim=True)) / deviation).view_as(x)
        return x * weight[:, None, None] + bias[:, None, None]

    def convolved(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = weights[f"{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    x = F.relu(norm(convolved(x, "conv1", 2 if imagenet else 1), "bn1"))
    x = F.max_pool2d(x, 3, 2, 1) if imagenet else x
    for stage, block in itertools.product(range(1, stages + 1), range(blocks)):
        name = f"layer{stage}.{block}"
        stride = 2 if stage > 1 and block == 0 else 1
        y = F.relu(norm(convolved(x, f"{name}.conv1", stride), f"{name}.bn1"))
        y = norm(convolved(y, f"{name}.conv2"), f"{name}.bn2")
        if f"{name}.downsample.0.weight" in weights:
            x = norm(convolved(x, f"{name}.downsample.0", 2), f"{name}.downsample.1")
        elif stride == 2:
            x = torch.cat([x[:, :, ::2, ::2], torch.zeros_like(y[:, x.shape[1] :])], 1)
        x = F.relu(x + y)
    return F.linear(x.mean((2, 3)), weights["fc.weight"], weights["fc.bias"])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("maker", "settings"),
    [
        (resnet18, {"groups": 4}),
        (resnet18, {"norm": "batch", "stem": "imagenet"}),
        (resnet20, {}),
        (resnet20, {"norm": "batch", "shortcut": "B"}),
        (resnet20, {"stem": "imagenet", "groups": 1}),
    ],
)
def test_the_forward_pass_is_that_of_plain_torch(maker: Any, settings: dict[str, Any], train: bool) -> None:
    stem = settings.get("stem", "cifar")
    shape = (3, 8, 11) if stem == "cifar" else (3, 32, 33)
    module = maker(shape, 5, width=4, **settings).double().train(train)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) * 0.5 + 0.1)  # none at its start, where norms hide mistakes
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(3, *shape, dtype=torch.float64)
    expected = plain_resnet(
        weights,
        x,
        stages=4 if maker is resnet18 else 3,
        blocks=2 if maker is resnet18 else 3,
        groups=None if settings.get("norm") == "batch" else settings.get("groups", 2),
        imagenet=stem == "imagenet",
        train=train,
    )
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-10)


def test_convolutions_start_as_he_proposed() -> None:
    layers = [part for part in resnet20((3, 8, 8), 10).modules() if isinstance(part, torch.nn.Conv2d)]
    for layer in layers[-3:]:
        assert float(layer.weight.detach().std()) == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.02)


@pytest.mark.parametrize(
    ("settings", "shape", "words"),
    [
        ({}, (1, 7, 8), "8 x 8"),
        ({}, (12,), r"8 x 8.*\(12,\)"),
        ({}, (32, 32, 3), "channels first"),
        ({"stem": "imagenet"}, (3, 28, 28), "32 x 32"),
        ({"groups": 3}, (3, 8, 8), "groups = 3 needs a width that 3 divides, got 16"),
        ({"groups": 0}, (3, 8, 8), "groups = 0"),
        ({"width": 0}, (3, 8, 8), "width = 0"),
        ({"norm": "layer"}, (3, 8, 8), "no norm 'layer': choose group or batch"),
        ({"stem": "big"}, (3, 8, 8), "no stem 'big'"),
        ({"shortcut": "C"}, (3, 8, 8), "no shortcut 'C'"),
    ],
)
def test_what_cannot_be_built(settings: dict[str, Any], shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        resnet20(shape, 10, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "examples", "accuracy"), [("digits", 1500, 0.9), ("cifar10", 2000, 0.3)])
def test_resnet20_with_group_norm_learns(source: str, examples: int, accuracy: float) -> None:
    """FedAvg with two clients that have the same distribution, ten rounds of two epochs; chance is 0.1."""
    try:
        data = load(source)
    except UserError:
        pytest.skip(f"{source} is not on this machine")
    settings = {
        "rounds": 10,
        "algorithm": {"name": "fedavg"},
        "model": {"name": "resnet20"},
        "split": {"clients": 2, "scheme": "iid"},
        "local": {"epochs": 2, "batch": 16, "lr": 0.02},
        "data": {"normalise": "standard"},
    }
    train, test = slice(examples), slice(1000)
    arrays = (data.x_train[train], data.y_train[train], data.x_test[test], data.y_test[test])
    assert fedgg.run(settings, data=arrays).test_accuracy[-1] > accuracy
