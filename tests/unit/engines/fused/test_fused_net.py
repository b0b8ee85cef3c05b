"""Squared gradients of single examples from one pass are those of the examples one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.core.evaluation import Probe
from fedgg.core.model import Net
from fedgg.core.random_choices import torch_stream
from fedgg.engines.fused.net import (
    examples_at_once,
    fused_net,
    layers_of,
    regrouped,
    squares_by_vmap,
    squares_in_one_pass,
)

EXAMPLES = 7


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * 64, 6), nn.Tanh(), nn.Linear(6, 4))
        self[1].requires_grad_(False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 64, 4)
        self.again = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.again.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(torch.tanh(self.again(torch.tanh(self.first(x.flatten(1))))))
        return hidden


class Twice(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.last = self.again


class Unused(Tied):
    def forward(self, x: Tensor) -> Tensor:
        used: Tensor = self.first(x.flatten(1))
        return used


SIMPLE: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 5, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(5, 4, (2, 3), dilation=(1, 1), bias=False),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 4),
    ),
    "dilated": lambda: nn.Sequential(
        nn.Conv2d(3, 2, 3, stride=(1, 2), padding=(2, 1), dilation=(2, 1)), nn.Flatten(), nn.Linear(64, 4)
    ),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 6, bias=False), nn.ReLU(), nn.Linear(6, 4)),
    "frozen": Frozen,
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "normalised": lambda: nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 4)),
    "groups": lambda: nn.Sequential(nn.Conv2d(3, 6, 8, groups=3), nn.Flatten(), nn.Linear(6, 4)),
    "tied": Tied,
    "called twice": Twice,
    "not called": Unused,
    "more than a batch": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(64, 3), nn.Flatten(), nn.Linear(9, 4)),
}


def probe_of(module: nn.Module) -> tuple[Probe, Tensor, Tensor]:
    with torch_stream(1, "squares"):
        net = fused_net(Net(module.double()))
        x, y = torch.randn(EXAMPLES, 3, 8, 8).double(), torch.randint(4, (EXAMPLES,))
    return Probe(net, net.start_buffers, lambda row: [(x[:4], y[:4]), (x[4:], y[4:])]), x, y


def one_by_one(net: Net, x: Tensor, y: Tensor) -> Tensor:
    net.set_mode(False)
    total = torch.zeros_like(net.start)
    for example, target in zip(x, y, strict=True):
        row = net.start.detach().clone().requires_grad_()
        outputs = net.call(net.layout.unflatten(row[0]), {}, example[None])
        total += torch.autograd.grad(F.cross_entropy(outputs, target[None]), row)[0].square()
    return total / len(x)


@pytest.mark.parametrize("name", [*SIMPLE, *OTHERS])
def test_fisher_is_the_mean_of_squares_one_by_one(name: str) -> None:
    probe, x, y = probe_of((SIMPLE | OTHERS)[name]())
    with torch.no_grad():  # as when a client finishes
        found = probe.fisher(probe.net.start)
    torch.testing.assert_close(found, one_by_one(probe.net, x, y), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", SIMPLE)
def test_these_take_one_pass(name: str) -> None:
    probe, x, y = probe_of(SIMPLE[name]())
    layers = layers_of(probe.net.module, probe.net.layout)
    assert layers is not None
    found = squares_in_one_pass(probe.net, layers, probe.net.start, {}, x, y)
    assert found is not None
    torch.testing.assert_close(found, squares_by_vmap(probe.net, probe.net.start, {}, x, y), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", OTHERS)
def test_these_do_not(name: str) -> None:
    probe, x, y = probe_of(OTHERS[name]())
    layers = layers_of(probe.net.module, probe.net.layout)
    assert layers is None or squares_in_one_pass(probe.net, layers, probe.net.start, {}, x, y) is None


def test_rows_that_lie_pixelwise() -> None:
    probe, x, y = probe_of(SIMPLE["convolutions"]())
    plain = probe.fisher(probe.net.start)
    turned = Probe(probe.net.arranged(), {}, lambda row: [(x, y)])
    torch.testing.assert_close(probe.net.layout.restored(turned.fisher(turned.net.start)), plain)


def test_few_examples_at_once_where_each_is_large() -> None:
    net = Net(nn.Sequential(nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5), nn.Flatten(), nn.Linear(16 * 24 * 24, 10)))
    layers = layers_of(net.module, net.layout)
    assert layers is not None
    x = torch.zeros(2, 3, 32, 32)
    assert examples_at_once(layers, x, 1 << 20) == (1 << 20) // (150 * 32 * 32)  # the second's patches, unpooled
    assert examples_at_once(layers, x, 1) == 1


def _any(most: int, x: Tensor) -> int:
    return most


def test_chunks_are_regrouped_and_nothing_is_lost() -> None:
    x = torch.arange(20.0).view(10, 2)
    chunks = [(x[a:b], torch.arange(a, b)) for a, b in ((0, 3), (3, 6), (6, 9), (9, 10))]
    for most, sizes in ((6, [6, 4]), (9, [9, 1]), (100, [10]), (1, [3, 3, 3, 1])):
        larger = list(regrouped(chunks, partial(_any, most)))
        assert [len(y) for _, y in larger] == sizes
        assert torch.equal(torch.cat([some for some, _ in larger]), x)
        assert torch.equal(torch.cat([y for _, y in larger]), torch.arange(10))
    assert list(regrouped([], partial(_any, 5))) == []
