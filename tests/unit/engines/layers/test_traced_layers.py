"""Layers of traced modules: they compute what the modules do, on a CPU in torch operations, on a GPU by kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_cases import played
from torch import Tensor, nn

from fedgg.core.model import Net
from fedgg.data.user_arrays import from_arrays
from fedgg.engines import Loop, Stacked, Streams
from fedgg.engines.layers import program as programs
from fedgg.engines.layers.module_programs import layers_of, matches_module, program_of, runs_rows
from fedgg.engines.layers.program import Program
from fedgg.engines.layers.row_layers import MaxPool, RowConvolution, RowGroupNorm
from fedgg.engines.layers.stacked_layers import HERE
from fedgg.engines.layers.traced_layers import TracedLayers, traced_layers
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic
from fedgg.models import MODELS

CLASSES = 10
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


class UNet(nn.Module):
    """A skip connection, a transposed convolution, activations that are no ReLU, and ReLUs without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(2, 16)
        self.deep = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out, self.head = nn.Conv2d(32, 16, 3, padding=1), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = F.silu(self.norm(self.down(x)))
        both = torch.cat([first, self.up(F.gelu(self.deep(first)))], 1)
        y: Tensor = self.head(torch.relu(self.out(both)).mean((2, 3)))
        return y


class Depthwise(nn.Module):
    """A grouped convolution, a parameter of its own, dropout as a function, and sizes read from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.norm, self.scale = nn.GroupNorm(4, 16), nn.Parameter(torch.ones(16, 1, 1))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = F.relu(self.norm(self.depthwise(y)) * self.scale + y)
        y = F.dropout(F.adaptive_avg_pool2d(y, 2), 0.3, self.training)
        z: Tensor = self.head(y.view(x.size(0), -1))
        return z


class Encoder(nn.Module):
    """Patches by a convolution, attention, and layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 4, stride=4), nn.LayerNorm(16)
        self.queries, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        queries, keys, values = self.queries(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(queries @ keys.transpose(1, 2) / 4, -1)
        y: Tensor = self.head((x + self.out(weights @ values)).mean(1))
        return y


def two_convolutions() -> nn.Module:
    """As pfl-research's network: two convolutions before the pool."""
    parts = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * 36, CLASSES))


def named(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: MODELS[name]((3, 16, 16) if name != "resnet18" else (3, 32, 32), CLASSES, **settings)


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (named("resnet18", stem="imagenet", width=8), 32),
    "resnet20": (named("resnet20", width=8), 16),
    "two convolutions": (two_convolutions, 16),
    "U-Net": (UNet, 16),
    "depthwise": (Depthwise, 16),
    "encoder": (Encoder, 16),
}


def net_of(make: Callable[[], nn.Module], side: int, device: str = "cpu", products: torch.dtype | None = None) -> Net:
    torch.manual_seed(0)
    net = Net(make().to(device), products=products)
    net.examine(torch.randn(2, 3, side, side, device=device), CLASSES)
    return net.arranged()


def traced(net: Net) -> TracedLayers:
    found = traced_layers(net, "fp32")
    assert found is not None
    return found


def program(net: Net, layers: TracedLayers) -> Program:
    return Program(layers.layers, net.layout, None, layers.inputs)


@pytest.mark.parametrize("name", MODULES)
def test_traced_layers_compute_what_the_module_does(name: str) -> None:
    net = net_of(*MODULES[name])
    assert matches_module(program(net, traced(net)), net)


def test_activations_sums_and_pools_become_part_of_the_layer_before_them() -> None:
    layers = traced(net_of(*MODULES["resnet18"])).layers
    norms = [layer for layer in layers if isinstance(layer, RowGroupNorm)]
    assert [layer.shortcut for layer in norms].count(True) == 8  # one for each block
    assert [layer.relu for layer in norms].count(False) == 3  # those of the shortcuts
    assert sum(isinstance(layer, RowConvolution) for layer in layers) == 20
    assert sum(isinstance(layer, MaxPool) for layer in layers) == 1
    first, second, *_ = traced(net_of(two_convolutions, 16)).layers
    assert isinstance(first, RowConvolution)
    assert isinstance(second, RowConvolution)
    assert (first.relu, first.pool) == (True, False)
    assert (second.relu, second.pool) == (True, True)


class ReadTwice(nn.Module):
    """A convolution whose output is read before and behind its ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z: Tensor = self.head((F.relu(y) + y).mean((2, 3)))
        return z


def test_a_value_that_is_read_twice_stays() -> None:
    net = net_of(ReadTwice, 16)
    found = traced(net)
    first = found.layers[0]
    assert isinstance(first, RowConvolution)
    assert not first.relu
    assert matches_module(program(net, found), net)


class Broadcast(nn.Module):
    """A sum behind a normalisation with one number for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z: Tensor = self.head(F.relu(self.norm(y) + y.mean((2, 3), keepdim=True)).mean((2, 3)))
        return z


def test_a_sum_that_broadcasts_is_no_shortcut() -> None:
    net = net_of(Broadcast, 16)
    found = traced(net)
    assert not any(layer.shortcut for layer in found.layers if isinstance(layer, RowGroupNorm))
    assert matches_module(program(net, found), net)


def test_a_wrong_reading_is_found() -> None:
    net = net_of(*MODULES["resnet20"])
    found = traced(net)
    for number, layer in enumerate(found.layers):
        if isinstance(layer, RowGroupNorm) and number < 12:
            wrong = (*found.layers[:number], replace(layer, relu=not layer.relu), *found.layers[number + 1 :])
            assert not matches_module(program(net, replace(found, layers=wrong)), net)
    inputs = [(0,) if number == 5 else of_layer for number, of_layer in enumerate(found.inputs)]
    assert not matches_module(program(net, replace(found, inputs=tuple(inputs))), net)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y.relu() if float(y.mean()) > 0 else y.tanh()
        z: Tensor = self.head(y.mean((2, 3)))
        return z


class Recording(nn.Module):
    """A module that keeps an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.kept = [y]
        z: Tensor = self.head(y.mean((2, 3)))
        return z


def test_tracing_leaves_the_module_alone() -> None:
    net = net_of(Recording, 16)
    assert isinstance(net.module, Recording)
    net.module.kept, training = [], net.module.training
    found = traced(net)
    assert net.module.kept == []
    assert net.module.training == training
    assert matches_module(program(net, found), net)


class Recurrent(nn.Module):
    """One convolution that is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z: Tensor = self.head(self.again(F.relu(self.again(y))).mean((2, 3)))
        return z


class Detached(nn.Module):
    """A layer whose parameters get no gradient, and a result that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) + self.beside(x).detach()
        self.head(y.mean((2, 3)) * 2)
        z: Tensor = self.head(y.mean((2, 3)))
        return z


def test_a_layer_without_a_gradient() -> None:
    net = net_of(Detached, 16)
    assert matches_module(program(net, traced(net)), net)


def frozen() -> nn.Module:
    module = two_convolutions()
    next(module.parameters()).requires_grad_(False)
    return module


@pytest.mark.parametrize("make", [Branching, Recurrent, frozen, named("resnet20", norm="batch")])
def test_modules_without_traced_layers(make: Callable[[], nn.Module]) -> None:
    assert traced_layers(net_of(make, 16), "fp32") is None


def test_spans_are_complete_when_they_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SPAN", 30)
    torch.manual_seed(0)
    parts = [nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 4)]
    net = Net(nn.Sequential(*parts).double())
    layers = layers_of(net, lambda prefix, parts: None)
    assert layers is not None
    plain = Program(layers, net.layout)
    assert plain.spans(stepped=False) == ((0, 54), (54, 89), (89, net.layout.total))
    w, x = torch.randn(3, net.layout.total, dtype=torch.float64).requires_grad_(), torch.randn(3, 7, 8).double()
    reported: dict[int, Tensor] = {}

    def written(grad: Tensor, number: int) -> None:
        begin, end = plain.spans(stepped=False)[number]
        reported[number] = grad[:, begin:end].clone()

    with plain.stepping(None, HERE, written, None):
        (grad,) = torch.autograd.grad(plain(w, x).square().sum(), w)
    assert list(reported) == [2, 1, 0]
    torch.testing.assert_close(torch.cat([reported[number] for number in range(3)], 1), grad)


def test_spans_leave_out_weights_that_are_stepped_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SPAN", 30)
    parts = [nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 4)]
    net = Net(nn.Sequential(*parts))
    layers = layers_of(net, lambda prefix, parts: None)
    assert layers is not None
    first, second, third, _ = (name for name in net.layout.names if name.endswith("weight"))
    assert Program(layers, net.layout, stepped=[second]).spans(stepped=True) == ((0, 54), (84, 89), (89, 143))
    some = Program(layers, net.layout, stepped=[first, third])
    assert (some.stepped, some.spans(stepped=True)) == ({first: 0, third: 89}, ((48, 54), (54, 89), (114, 143)))
    whole = sum(end - begin for begin, end in some.spans(stepped=True)) + 48 + 25
    assert whole == net.layout.total


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("name", MODULES)
def test_kernels_pass_their_trial(name: str, precision: Any) -> None:
    make, side = MODULES[name]
    chosen = Experiment(engine={"precision": precision, "device": "cuda"})
    with arithmetic(chosen):
        net = net_of(make, side, "cuda", torch.bfloat16 if precision == "bf16" else None)
        assert program_of(net, precision) is not None


RULES: list[dict[str, Any]] = [{"name": "fedavg"}, {"name": "fedgg", "mu": 0.1}, {"name": "scaffold"}]


@needs_gpu
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["name"])
@pytest.mark.parametrize("name", MODULES)
def test_a_stack_ends_where_the_loop_does(name: str, rule: dict[str, Any]) -> None:
    make, side = MODULES[name]
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(120, 3, side, side, generator=generator), torch.randint(0, CLASSES, (120,), generator=generator)
    dataset = from_arrays(x, y, x[:20], y[:20]).to(torch.device("cuda"))

    def ended(engine: Any, precision: str) -> Tensor:
        chosen = Experiment(
            algorithm=rule,
            split={"clients": 4, "scheme": "dirichlet", "beta": 0.5, "min_examples": 8},
            local={"epochs": 1, "batch": 16, "lr": 0.01, "weight_decay": 0.001},
            engine={"precision": precision, "device": "cuda", "name": "loop"},
        )
        with arithmetic(chosen):
            federation = build(chosen, data=dataset, model=make)
            if isinstance(engine, Stacked):
                assert runs_rows(federation.net, precision)  # type: ignore[arg-type]
            w: Tensor = played(federation, engine, 2).server.w.double()
            return w

    exact = ended(Loop(), "fp64")
    stacked = ended(Stacked("fp32"), "fp32")
    assert float((stacked - exact).norm() / exact.norm()) < 1e-5
    assert torch.equal(stacked, ended(Stacked("fp32"), "fp32"))  # to the bit
    if rule["name"] == "fedavg":
        short = ended(Stacked("bf16"), "bf16")
        assert float((short - exact).norm() / exact.norm()) < 0.02
        assert float((ended(Streams(), "bf16") - exact).norm() / exact.norm()) < 0.02
