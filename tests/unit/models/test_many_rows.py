"""The built-in models as functions of rows: many at once are those one by one, in torch and in every engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from step_cases import played
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedgg.core.forward import mask_keys
from fedgg.core.model import Net, rows_around
from fedgg.engines import Engine, Fused, Loop, Stacked, Streams, Workers
from fedgg.engines.module_equivalence import is_stackable
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.models import MODELS

CLASSES = 3
IMAGE, TEXT = (2, 8, 8), (5,)


@dataclass(frozen=True)
class Tiny:
    name: str
    settings: dict[str, Any]
    algorithm: str  # between them they look at gradients of single examples and at representations

    @property
    def shape(self) -> tuple[int, ...]:
        return TEXT if self.name in ("char_lstm", "transformer") else IMAGE

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return MODELS[self.name](self.shape, CLASSES, **self.settings).double()

    def inputs(self, *lead: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        if self.shape == TEXT:
            return torch.randint(CLASSES, (*lead, *TEXT), generator=generator)
        return torch.randn(*lead, *IMAGE, generator=generator, dtype=torch.float64)

    def __str__(self) -> str:
        return "-".join(map(str, [self.name, *self.settings.values()]))


BLOCKS = {"layers": 2, "width": 8, "heads": 2}
WITHOUT_STATISTICS = [
    Tiny("resnet18", {"width": 2}, "fedgg"),
    Tiny("resnet20", {"width": 2}, "moon"),
    Tiny("resnet20", {"width": 2, "shortcut": "B", "groups": 1}, "fedprox"),
    Tiny("vit", {"patch": 4, "dropout": 0.3, **BLOCKS}, "moon"),
    Tiny("vit", {"patch": 4, "pool": "token", **BLOCKS}, "fedcurv"),
    Tiny("char_lstm", {"predict": "last", "hidden": 6}, "fedcurv"),
    Tiny("transformer", {"predict": "last", **BLOCKS}, "fedgg"),
    Tiny("transformer", {"predict": "last", "tied": True, "dropout": 0.3, **BLOCKS}, "moon"),
]
EVERY_TOKEN = [Tiny("char_lstm", {"hidden": 6}, "fedavg"), Tiny("transformer", BLOCKS, "fedavg")]
WITH_STATISTICS = Tiny("resnet20", {"width": 2, "norm": "batch"}, "fedgg")


def loss(module: nn.Module, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    outputs = functional_call(module, weights, (x,))
    return outputs.square().sum(), outputs


@pytest.mark.parametrize("tiny", [*WITHOUT_STATISTICS, *EVERY_TOKEN], ids=str)
def test_many_by_vmap_are_those_one_by_one(tiny: Tiny) -> None:
    """In plain torch, without anything of an engine."""
    module = tiny.module().eval()
    start = dict(module.named_parameters())
    rows = {
        name: torch.stack([p.detach() + 0.1 * k * torch.randn_like(p) for k in range(3)]) for name, p in start.items()
    }
    x = tiny.inputs(3, 4)
    gradients, outputs = vmap(torch.func.grad(partial(loss, module), has_aux=True))(rows, x)
    for k in range(3):
        alone = copy.deepcopy(module)
        for name, parameter in alone.named_parameters():
            parameter.data.copy_(rows[name][k])
        expected = alone(x[k])
        torch.testing.assert_close(outputs[k], expected, rtol=1e-10, atol=1e-10)
        wanted = torch.autograd.grad(expected.square().sum(), list(alone.parameters()))
        for name, gradient in zip(start, wanted, strict=True):
            torch.testing.assert_close(gradients[name][k], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tiny", WITHOUT_STATISTICS, ids=str)
def test_many_rows_of_a_net_have_their_own_dropout_masks(tiny: Tiny) -> None:
    net = Net(tiny.module())
    net.examine(tiny.inputs(2), CLASSES)
    assert not net.draws_random_numbers
    assert not net.keeps_statistics
    assert not net.mixes_in_evaluation
    assert net.drops is bool(tiny.settings.get("dropout"))
    assert is_stackable(net)
    w, x, keys = rows_around(net, 3), tiny.inputs(3, 4), mask_keys([(0, 0, k) for k in range(3)], torch.device("cpu"))
    together = net.bind(net.start_buffers, train=True, keys=keys)(w, x)
    for k in range(3):
        alone = net.bind(net.start_buffers, train=True, keys=keys[k : k + 1])(w[k : k + 1], x[k : k + 1])
        torch.testing.assert_close(together[k : k + 1], alone, rtol=1e-10, atol=1e-10)
    same_inputs = net.bind(net.start_buffers, train=True, keys=keys)(w[:1].expand(3, -1), x[:1].expand_as(x))
    assert torch.allclose(same_inputs[0], same_inputs[1]) is not net.drops


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2, notice=lambda sentence: pytest.fail(sentence)) as engine:
        yield engine


def check_engines(tiny: Tiny, device: str, engines: list[Engine]) -> None:
    """Two rounds of two clients, from the same start to the same model."""
    x, y = tiny.inputs(18), torch.arange(18) % CLASSES
    experiment = Experiment(
        rounds=2,
        algorithm={"name": tiny.algorithm},
        model={"name": tiny.name, **tiny.settings},
        split={"clients": 2, "scheme": "iid", "min_examples": 5},
        local={"epochs": 1, "batch": 5, "lr": 0.05},
        data={"normalise": "none"},
        engine={"name": "loop", "precision": "fp64", "device": device},
    )
    federation = build(experiment, data=(x, y, x, y))
    expected = played(federation, Loop(), rounds=2).server.w
    assert not torch.allclose(expected, federation.net.start)
    for engine in engines:
        reached = played(build(experiment, data=(x, y, x, y)), engine, rounds=2).server.w
        torch.testing.assert_close(reached, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("tiny", [*WITHOUT_STATISTICS, WITH_STATISTICS], ids=str)
def test_engines_agree(tiny: Tiny, workers: Workers) -> None:
    check_engines(tiny, "cpu", [Fused(), Stacked("fp64"), workers])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("tiny", [*WITHOUT_STATISTICS, WITH_STATISTICS], ids=str)
def test_engines_agree_on_a_gpu(tiny: Tiny) -> None:
    check_engines(tiny, "cuda", [Fused(), Stacked("fp64"), Streams(lanes=2)])
