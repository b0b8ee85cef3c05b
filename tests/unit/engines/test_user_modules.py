"""Modules as people write them train as plain PyTorch trains them: in every engine, alone and in a study.

Modules are composed at random from what has gone wrong or might: parts used twice, subclasses with a forward of their
own, hooks, weight norm, frozen layers and random buffers, layers that mix the examples of a batch, odd pools, nested
containers, unprinted settings. The reference is written here, in plain PyTorch, and shares no code with the library but
the order of the batches and the division of the data.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import fedgg
from fedgg.core import random_choices
from fedgg.core.evaluation import Probe
from fedgg.core.local import LocalEnd
from fedgg.core.model import Net
from fedgg.core.random_choices import torch_stream
from fedgg.engines import Fused, Workers
from fedgg.engines.base import Precision
from fedgg.engines.layers.module_programs import (
    _large_convolution,
    large_program_of,
    layers_of,
    matches_module,
    program_of,
)
from fedgg.engines.layers.program import Program
from fedgg.engines.layers.stacked_layers import Dense, Dropout
from fedgg.engines.module_equivalence import is_stackable
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.one_round import begin, next_job
from fedgg.lab.study_folder import place_of
from fedgg.models import MODELS

CLASSES, SIDE, EXAMPLES, BATCH = 3, 8, 53, 12  # batches of 12, 12 and 2, 3: short ones are padded by `stacked`
LR, MOMENTUM = 0.05, 0.9


class StandardisedConv(nn.Conv2d):
    """Weight standardisation: a subclass that torch prints like any other convolution."""

    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = centred / (centred.std((1, 2, 3), keepdim=True) + 1e-2)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * super().forward(x)


class Leak(nn.Module):
    """A setting, drawn when it is made, that is neither printed nor a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = float(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


class RandomMask(nn.Module):
    """A tensor drawn when it is made: a plain attribute, or a buffer."""

    def __init__(self, shape: tuple[int, ...], buffer: bool):
        super().__init__()
        mask = 0.5 + torch.rand(shape)
        if buffer:
            self.register_buffer("mask", mask)
        else:
            self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class LessBatchMean(nn.Module):
    """Mixes the examples of a batch, and is in nobody's list of layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.5 * x.mean(0, keepdim=True)


class LessBatchMeanInTraining(LessBatchMean):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x


class AssignedMean(nn.Module):
    """A running mean that is a new tensor after every batch, not the old one moved in place."""

    mean: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().mean(0)
        return x - self.mean


class Tied(nn.Module):
    """One weight in two layers, and one buffer in two modules."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(size, size), nn.Linear(size, size)
        self.outer.weight = self.inner.weight
        shift = torch.ones(size)
        for part in (self.inner, self.outer):
            part.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x + self.inner.get_buffer("shift"))
        return self.outer(torch.tanh(y)) + self.outer.get_buffer("shift")  # type: ignore[no-any-return]


def doubling(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def halved(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] / 2,)


IMAGE_PARTS: dict[str, Callable[[int], nn.Module]] = {  # of so many channels, which they keep
    "conv": lambda c: nn.Conv2d(c, c, 3, padding=1),
    "conv bias": lambda c: nn.Conv2d(c, c, 3, padding=1, bias=False),
    "subclass": lambda c: StandardisedConv(c, c, 3, padding=1),
    "weight norm": lambda c: nn.utils.parametrizations.weight_norm(nn.Conv2d(c, c, 3, padding=1)),
    "old weight norm": lambda c: old_weight_norm(nn.Conv2d(c, c, 3, padding=1)),
    "circular": lambda c: nn.Conv2d(c, c, 3, padding=1, padding_mode="circular"),
    "frozen": lambda c: nn.Conv2d(c, c, 3, padding=1).requires_grad_(False),
    "relu": lambda c: nn.ReLU(),
    "relu in place": lambda c: nn.ReLU(inplace=True),
    "pool": lambda c: nn.MaxPool2d(2),
    "pool of three": lambda c: nn.MaxPool2d(3, 2, 1),
    "pool rounded up": lambda c: nn.MaxPool2d(2, ceil_mode=True),
    "group norm": lambda c: nn.GroupNorm(1, c),
    "batch norm": lambda c: nn.BatchNorm2d(c),
    "batch norm without statistics": lambda c: nn.BatchNorm2d(c, track_running_stats=False),
    "leak": lambda c: Leak(),
}
FLAT_PARTS: dict[str, Callable[[int], nn.Module]] = {  # of so many features
    "linear": lambda n: nn.Linear(n, n),
    "linear subclass": lambda n: ScaledLinear(n, n),
    "linear weight norm": lambda n: nn.utils.parametrizations.weight_norm(nn.Linear(n, n)),
    "linear frozen": lambda n: nn.Linear(n, n).requires_grad_(False),
    "tanh": lambda n: nn.Tanh(),
    "relu flat": lambda n: nn.ReLU(),
    "layer norm": lambda n: nn.LayerNorm(n),
    "leak flat": lambda n: Leak(),
    "mask": lambda n: RandomMask((n,), buffer=False),
    "mask buffer": lambda n: RandomMask((n,), buffer=True),
    "assigned mean": lambda n: AssignedMean(n),
    "tied": lambda n: Tied(n),
    "dropped": lambda n: nn.Dropout(0.0),
    "less mean": lambda n: LessBatchMean(),
    "less mean in training": lambda n: LessBatchMeanInTraining(),
}
HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "forward hook": lambda part: part.register_forward_hook(doubling),
    "forward pre-hook": lambda part: part.register_forward_pre_hook(halved),
    "forward set on the instance": lambda part: setattr(part, "forward", Shifted(part.forward)),
}


class Shifted:
    def __init__(self, forward: Callable[[Tensor], Tensor]):
        self.inner = forward

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.1


def old_weight_norm(part: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        return nn.utils.weight_norm(part)


class Recipe:
    """Makes a module from a list of words; can be pickled, printed by hypothesis, and made again with another seed.

    A word is a part; ("again", n) is the part n before it, once more; ("hook", kind, n) hooks onto it; "(" and ")"
    nest, and ("hook", kind, 0) behind a ")" hooks onto the container.
    """

    def __init__(self, images: Sequence[Any], flat: Sequence[Any], channels: int = 4):
        self.images, self.flat, self.channels = list(images), list(flat), channels

    def __repr__(self) -> str:
        return f"Recipe({self.images}, {self.flat}, {self.channels})"

    def __call__(self) -> nn.Module:
        first = nn.Conv2d(1, self.channels, 3, padding=1)
        before = nn.Sequential(first, *self._parts(self.images, IMAGE_PARTS, self.channels), nn.AdaptiveAvgPool2d(2))
        width = 4 * self.channels
        behind = [nn.Flatten(), *self._parts(self.flat, FLAT_PARTS, width), nn.Linear(width, CLASSES)]
        return nn.Sequential(*before, *behind) if self.channels % 2 else nn.Sequential(before, *behind)

    def _parts(self, words: Sequence[Any], known: dict[str, Callable[[int], nn.Module]], size: int) -> list[nn.Module]:
        stack: list[list[nn.Module]] = [[]]
        for word in words:
            here = stack[-1]
            if word == "(":
                stack.append([])
            elif word == ")":
                if len(stack) > 1:
                    inner = stack.pop()
                    stack[-1].append(nn.Sequential(*inner))
            elif isinstance(word, str):
                here.append(known[word](size))
            elif here and word[0] == "again":
                here.append(here[-1 - word[1] % len(here)])
            elif here:
                HOOKS[word[1]](here[-1 - word[2] % len(here)])
        while len(stack) > 1:
            inner = stack.pop()
            stack[-1].append(nn.Sequential(*inner))
        return stack[0]


def words(parts: Sequence[str], most: int) -> st.SearchStrategy[list[Any]]:
    place = st.integers(0, 2)
    word = st.one_of(
        st.sampled_from(parts),
        st.sampled_from(parts),
        st.tuples(st.just("again"), place),
        st.tuples(st.just("hook"), st.sampled_from(list(HOOKS)), place),
        st.sampled_from(["(", ")"]),
    )
    return st.lists(word, max_size=most)


recipes = st.builds(
    Recipe, words([*IMAGE_PARTS, "pool", "relu"], 6), words(list(FLAT_PARTS), 5), st.sampled_from([3, 4, 9])
)

KNOWN = [
    Recipe([], ["linear", "tanh", "linear", ("again", 1)]),  # one activation in two places
    Recipe([], ["linear", "tanh", ("again", 1), "relu flat"]),  # one linear layer in two places
    Recipe(["subclass", "relu", "pool"], [], 3),
    Recipe(["weight norm", "relu", "pool"], [], 3),
    Recipe(["old weight norm", "relu", "pool"], [], 3),
    Recipe(["conv", ("hook", "forward hook", 0), "relu", "pool"], [], 3),
    Recipe(["(", "conv", "relu", ")", ("hook", "forward hook", 0), "pool"], []),
    Recipe(["conv", ("hook", "forward set on the instance", 0), "relu", "pool"], [], 3),
    Recipe(["conv", "relu", "pool", "conv", "relu", ("again", 2)], ["linear"]),  # one max-pool in two places
    Recipe([], ["linear frozen", "tanh"]),
    Recipe([], ["mask buffer", "tanh"]),
    Recipe([], ["mask", "tanh"]),
    Recipe([], ["linear", "leak flat", "linear"]),
    Recipe(["batch norm without statistics", "relu"], []),
    Recipe([], ["linear", "less mean"]),
    Recipe([], ["linear", "less mean in training"]),
    Recipe(["batch norm", "relu"], []),
    Recipe([], ["assigned mean", "tanh"]),
    Recipe([], ["tied"]),
    Recipe(["(", "conv", "relu", "pool", ")", ("again", 0)], ["linear", "relu flat"], 9),
]


# The reference --------------------------------------------------------------------------------------------------------


def data() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(EXAMPLES, 1, SIDE, SIDE)), rng.integers(0, CLASSES, EXAMPLES)


X, Y = data()


def experiment(seed: int, engine: str = "loop") -> fedgg.Experiment:
    return fedgg.Experiment(
        rounds=2,
        seed=seed,
        data={"normalise": "none"},
        split={"clients": 2, "scheme": "iid"},
        local={"epochs": 1, "batch": BATCH, "lr": LR, "momentum": MOMENTUM},
        engine={"precision": "fp64", "name": engine},
        algorithm={"name": "fedavg"},
    )


Averaged = tuple[dict[str, Tensor], float]


@cache
def federated(seed: int, make: Callable[[], nn.Module]) -> Averaged:
    """Two rounds of FedAvg with `module(x)`, `loss.backward()` and `torch.optim.SGD`: weights, and the test loss."""
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    server = started(seed, make)
    for round_ in range(2):
        states, shares = [], []
        for client, positions in enumerate(clients_of(seed)):
            module = started(seed, make)
            module.load_state_dict(server.state_dict())
            module.train()
            trained = [p for p in module.parameters() if p.requires_grad]
            optimiser = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM)
            for row in random_choices.schedule(seed, round_, client, len(positions), random_choices.Work(1, BATCH)):
                where = torch.from_numpy(positions[row[row >= 0]])
                optimiser.zero_grad()
                F.cross_entropy(module(x[where]), y[where]).backward()
                optimiser.step()
            states.append(module.state_dict())
            shares.append(len(positions) / EXAMPLES)
        server.load_state_dict({name: averaged([state[name] for state in states], shares) for name in states[0]})
    server.eval()
    with torch.no_grad():
        return server.state_dict(), float(F.cross_entropy(server(x), y))


def averaged(values: list[Tensor], shares: list[float]) -> Tensor:
    if not values[0].is_floating_point():
        return torch.stack(values).amax(0)
    return torch.stack([share * value for share, value in zip(shares, values, strict=True)]).sum(0)


@cache
def clients_of(seed: int) -> tuple[Any, ...]:
    return build(experiment(seed), model=Recipe([], []), data=(X, Y, X, Y)).feed.clients


def started(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch_stream(seed, "model"):
        return make().double()


def trains(make: Recipe, seeds: Sequence[int]) -> bool:
    """Whether plain PyTorch trains it, to finite numbers: not everything that is composed at random does."""
    try:
        ends = [federated(seed, make) for seed in seeds]
    except (RuntimeError, ValueError):
        return False
    return all(np.isfinite(loss) and loss < 50 for _, loss in ends)


def check(weights: dict[str, Tensor], loss: float, seed: int, make: Recipe, what: str) -> None:
    wanted, wanted_loss = federated(seed, make)
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        gap = float((weights[name].double().cpu() - value.double()).abs().max())
        assert gap < 1e-8 * max(1.0, float(value.double().abs().max())), f"{what}: {name} differs by {gap:.1e}"
    assert loss == pytest.approx(wanted_loss, rel=1e-8), what


# In every engine, alone and in a study ------------------------------------------------------------------------------


def check_alone(make: Recipe, engine: str) -> None:
    found = fedgg.run(experiment(0, engine), model=make, data=(X, Y, X, Y))
    check(found.weights, found.rounds[-1]["test_loss"], 0, make, engine)


def check_study(make: Recipe, engine: str, seeds: Sequence[int]) -> None:
    """Each seed has another start, another frozen layer, another mask, and trains as if it were alone."""
    with tempfile.TemporaryDirectory() as folder:
        study = fedgg.compare(
            [fedgg.FedAvg()], experiment(0, engine), seeds=seeds, model=make, data=(X, Y, X, Y), out=folder
        )
        for seed in seeds:
            home = Path(folder) / place_of("FedAvg", seed)
            losses = study.record.runs["FedAvg"][seed].rounds
            weights = load_file(home / "model.safetensors")
            check(weights, losses[-1]["test_loss"], seed, make, f"{engine}, seed {seed} of {len(seeds)}")


@pytest.mark.parametrize("make", KNOWN, ids=str)
def test_modules_as_people_write_them(make: Recipe) -> None:
    assert trains(make, (0, 1))
    check_alone(make, "fused")
    check_study(make, "stacked", (0, 1))


def test_workers_train_them_too() -> None:
    """One pool for all: with the bits of `fused`, whether a module can travel to other processes or not."""
    notices: list[str] = []
    with Workers(2, notice=notices.append) as workers:
        for make in KNOWN:
            federation = build(experiment(0), model=make, data=(X, Y, X, Y))
            job = next_job(federation, begin(federation))
            alone = dict(Fused().train(job))
            for client, end in workers.train(job):
                assert isinstance(end, LocalEnd)
                for name, rows in alone[client].up.items():
                    assert torch.equal(end.up[name], rows), (make, name)
    assert len(notices) == 1, "only parametrized modules cannot be pickled"


@settings(deadline=None, max_examples=6, derandomize=True, suppress_health_check=list(HealthCheck))
@given(recipes)
def test_any_module_trains_as_in_plain_pytorch(make: Recipe) -> None:
    assume(trains(make, (0, 1)))
    check_alone(make, "fused")
    check_study(make, "stacked", (0, 1))


@pytest.mark.slow
@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(recipes)
def test_many_modules_train_as_in_plain_pytorch(make: Recipe) -> None:
    assume(trains(make, (0, 1, 2)))
    for engine in ("loop", "fused", "stacked"):
        check_alone(make, engine)
        check_study(make, engine, (0, 1, 2))


@pytest.mark.slow
@settings(deadline=None, max_examples=10, suppress_health_check=list(HealthCheck))
@given(recipes)
def test_many_modules_train_in_workers(make: Recipe) -> None:
    assume(trains(make, (0, 1)))
    check_alone(make, "workers")
    check_study(make, "workers", (0, 1))


# Squares of single examples' gradients --------------------------------------------------------------------------------


def check_fisher(make: Recipe) -> None:
    federation = build(experiment(0), model=make, data=(X, Y, X, Y))
    net, x, y = federation.net, torch.from_numpy(X[:9]), torch.from_numpy(Y[:9])
    probe = Probe(net, net.start_buffers, lambda row: [(x[:5], y[:5]), (x[5:], y[5:])])
    if net.mixes_in_evaluation:
        with pytest.raises(UserError, match="mixes the examples of a batch in evaluation mode"):
            probe.fisher(net.start)
        return
    module = started(0, make).eval()
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    total: dict[str, Tensor] = {}
    for example, target in zip(x, y, strict=True):
        module.zero_grad()
        F.cross_entropy(module(example[None]), target[None]).backward()
        for name in names:
            grad = module.get_parameter(name).grad
            square = torch.zeros_like(module.get_parameter(name)) if grad is None else grad.square()
            total[name] = total.get(name, 0) + square / len(x)
    torch.testing.assert_close(probe.fisher(net.start), net.layout.flatten(total), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", KNOWN, ids=str)
def test_fisher_information_is_of_the_module_itself(make: Recipe) -> None:
    check_fisher(make)


@pytest.mark.slow
@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(recipes)
def test_fisher_information_of_many_modules(make: Recipe) -> None:
    assume(trains(make, (0,)))
    check_fisher(make)


# Programs of our own layers -------------------------------------------------------------------------------------------


def check_program(make: Recipe) -> bool:
    """What the layers stand for is held against the module itself; whether there are any."""
    module = started(0, make)
    net = Net(module)
    net.examine(torch.from_numpy(X[:2]), CLASSES)
    layers = layers_of(net, _large_convolution)
    if layers is None:
        return False
    program = Program(layers, net.layout)
    assert matches_module(program, net)
    x = torch.from_numpy(X[:5])
    torch.testing.assert_close(program.by_torch(net.start, x[None])[0], module.eval()(x))
    return True


class Plain(Recipe):
    """Nothing but what there are layers for, but for the words that are given."""

    def __call__(self) -> nn.Module:
        first = [nn.Conv2d(1, self.channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        parts = self._parts(self.flat, FLAT_PARTS, 16 * self.channels)
        return nn.Sequential(*first, nn.Flatten(), *parts, nn.Linear(16 * self.channels, CLASSES))


def test_layers_stand_for_plain_modules_alone() -> None:
    assert check_program(Plain([], []))
    assert check_program(Plain([], ["linear", "relu flat", "linear", ("again", 1)]))  # one ReLU in two places
    for word in ("linear subclass", "linear weight norm", "linear frozen", "tanh", "leak flat", "tied"):
        assert not check_program(Plain([], [word]))
    for kind in HOOKS:
        assert not check_program(Plain([], ["linear", ("hook", kind, 0)]))
        assert not check_program(Plain([], ["linear", "relu flat", ("hook", kind, 0)]))
    assert not check_program(Plain([], ["linear", ("again", 0)]))


def test_a_wrong_reading_of_a_module_is_found() -> None:
    """A program without one of the module's ReLUs, with another dropout, or with layers exchanged."""
    with torch_stream(0, "model"):
        parts = [nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 9), nn.Linear(9, CLASSES)]
        net = Net(nn.Sequential(*parts).double())
    net.examine(torch.from_numpy(X[:2]), CLASSES)
    layers = layers_of(net, lambda prefix, parts: None)
    assert layers is not None
    assert matches_module(Program(layers, net.layout), net)
    for at, wrong in ((1, Dense("1.weight", "1.bias", False)), (2, Dropout(2, 0.5)), (2, Dropout(1, 0.4))):
        assert not matches_module(Program([*layers[:at], wrong, *layers[at + 1 :]], net.layout), net)
    assert not matches_module(Program([*layers[:3], layers[3], layers[3], layers[4]], net.layout), net)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "vgg16"])
def test_kernels_pass_their_trial(name: str, precision: Precision) -> None:
    """The library's models keep their programs on a GPU, in every precision."""
    chosen = experiment(0).changed({"engine.precision": precision, "engine.device": "cuda"})
    with torch_stream(0, "model"), arithmetic(chosen):
        net = Net(MODELS[name]((3, 32, 32), 10).cuda(), products=torch.bfloat16 if precision == "bf16" else None)
        net.examine(torch.randn(2, 3, 32, 32).cuda(), 10)
        if name == "vgg16":
            net.channels_last = True
            assert precision == "fp32" or large_program_of(net.arranged()) is not None
        else:
            assert program_of(net, precision) is not None
            assert is_stackable(net)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("make", [one for one in KNOWN if "mask" not in one.flat], ids=str)  # it stays on the CPU
def test_modules_as_people_write_them_on_a_gpu(make: Recipe) -> None:
    for engine in ("loop", "fused", "stacked", "streams"):
        chosen = experiment(0).changed({"engine.device": "cuda", "engine.name": engine})
        found = fedgg.run(chosen, model=make, data=(X, Y, X, Y))
        check(found.weights, found.rounds[-1]["test_loss"], 0, make, engine)
