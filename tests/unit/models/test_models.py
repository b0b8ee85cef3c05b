"""The models: as large as their papers say, started by the seed, and clear about inputs they cannot take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedgg.core.model import Net
from fedgg.errors import UserError
from fedgg.lab.name_resolution import build_model
from fedgg.models import MODELS

IMAGE = (3, 32, 32)
CONVOLUTIONS_OF_VGG16 = 14_714_688


@pytest.mark.parametrize(
    ("name", "settings", "classes", "parameters"),
    [
        ("linear", {}, 10, 3072 * 10 + 10),
        ("mlp", {}, 10, 3072 * 512 + 512 + 512 * 10 + 10),
        ("cnn", {}, 10, 62_006),  # 456 + 2,416 + 48,120 + 10,164 + 850
        ("vgg16", {"classifier": "linear"}, 100, CONVOLUTIONS_OF_VGG16 + 512 * 100 + 100),
        ("vgg16", {}, 100, CONVOLUTIONS_OF_VGG16 + 2 * (512 * 512 + 512) + 512 * 100 + 100),
        ("vgg16", {"batch_norm": True, "classifier": "linear"}, 100, CONVOLUTIONS_OF_VGG16 + 2 * 4224 + 51_300),
    ],
)
def test_sizes(name: str, settings: dict[str, Any], classes: int, parameters: int) -> None:
    module = build_model(name, settings, IMAGE, classes, seed=0)
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert module.eval()(torch.randn(2, *IMAGE)).shape == (2, classes)


@pytest.mark.parametrize("name", MODELS)
def test_the_start_is_a_function_of_the_seed(name: str) -> None:
    shape = (6,) if name in ("char_lstm", "transformer") else IMAGE
    first, again, other = (Net(build_model(name, {}, shape, 10, seed)).start for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_a_model_leaves_the_users_generator_alone() -> None:
    before = torch.get_rng_state()
    build_model("mlp", {}, IMAGE, 10, seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_convolutions_of_vgg_start_as_he_proposed() -> None:
    module = build_model("vgg16", {}, IMAGE, 10, seed=0)
    wide = [part for part in module.modules() if isinstance(part, nn.Conv2d) and part.out_channels == 512]
    for convolution in wide:
        assert float(convolution.weight.detach().std()) == pytest.approx(math.sqrt(2 / (9 * 512)), rel=0.01)
        assert convolution.bias is not None
        assert not convolution.bias.any()


def test_dropout_and_statistics_are_noticed() -> None:
    x = torch.randn(2, *IMAGE)
    seen = {}
    for name, settings in {"hidden": {}, "bn": {"batch_norm": True, "classifier": "linear"}}.items():
        net = Net(build_model("vgg16", settings, IMAGE, 10, seed=0))
        net.examine(x, 10)
        seen[name] = (net.drops, net.keeps_statistics)
    assert seen == {"hidden": (True, False), "bn": (False, True)}


@pytest.mark.parametrize(
    ("name", "settings", "shape", "word"),
    [
        ("cnn", {}, (1, 8, 8), "16 x 16"),
        ("cnn", {}, (30,), "16 x 16"),
        ("vgg16", {}, (64, 64, 3), "channels first"),
        ("vgg16", {}, (3, 16, 16), "32 x 32"),
        ("vgg16", {"classifier": "wide"}, IMAGE, "classifier"),
        ("vgg16", {"dropout": 1.0}, IMAGE, "dropout"),
        ("mlp", {"hidden": 0}, IMAGE, "hidden"),
    ],
)
def test_what_cannot_be_built(name: str, settings: dict[str, Any], shape: tuple[int, ...], word: str) -> None:
    with pytest.raises(UserError, match=word):
        build_model(name, settings, shape, 10, seed=0)
