"""What counts as torch's own layer, what a trial finds, and that a trial leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.core.model import Net
from fedgg.engines.fused.conv_pool import FusedPool
from fedgg.engines.fused.net import fused_net
from fedgg.engines.module_equivalence import is_plain, is_stackable, mixes_examples, parts_in_order
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.name_resolution import build_model

CLASSES = 3


def net_of(module: nn.Module, shape: tuple[int, ...] = (12,), dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    net = Net(module)
    net.examine(torch.randn(2, *shape, dtype=dtype), CLASSES)
    return net


# Structure ------------------------------------------------------------------------------------------------------------


class Subclass(nn.Linear):
    pass


def with_(change: Callable[[nn.Linear], object]) -> nn.Linear:
    layer = nn.Linear(2, 2)
    change(layer)
    return layer


def without_parameter() -> nn.Linear:
    layer = nn.Linear(2, 2)
    del layer.weight
    vars(layer)["weight"] = torch.ones(2, 2)
    return layer


@pytest.mark.parametrize(
    "part",
    [
        Subclass(2, 2),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
        with_(lambda layer: layer.register_forward_hook(print)),
        with_(lambda layer: layer.register_forward_pre_hook(print)),
        with_(lambda layer: layer.register_full_backward_hook(print)),
        with_(lambda layer: layer.register_full_backward_pre_hook(print)),
        with_(lambda layer: setattr(layer, "forward", print)),
        without_parameter(),
    ],
    ids=range(9),
)
def test_these_are_not_plain(part: nn.Module) -> None:
    assert not is_plain(part, nn.Linear)
    assert is_plain(nn.Linear(2, 2), nn.Linear)


def test_a_hook_on_all_modules_rules_out_everything() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        assert not is_plain(nn.Linear(2, 2), nn.Linear)
    finally:
        handle.remove()


def test_a_part_that_stands_in_two_places_runs_twice() -> None:
    act = nn.Tanh()
    module = nn.Sequential(nn.Linear(2, 2), act, nn.Sequential(act, nn.Linear(2, 2)), act)
    kinds = [(prefix, type(part)) for prefix, part in parts_in_order(module)]
    assert kinds == [("0.", nn.Linear), ("1.", nn.Tanh), ("2.0.", nn.Tanh), ("2.1.", nn.Linear), ("3.", nn.Tanh)]


# Fused pooling --------------------------------------------------------------------------------------------------------


class Keeps(nn.Module):
    """Keeps what it has given, which a ReLU in place then changes."""

    def __init__(self) -> None:
        super().__init__()
        self.last = [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        self.last[0] = 2 * x
        return self.last[0]


class Adds(nn.Module):
    def __init__(self, keeps: Keeps):
        super().__init__()
        self.last = keeps.last

    def forward(self, x: Tensor) -> Tensor:
        return x + F.avg_pool2d(self.last[0], 2)


def test_what_structure_does_not_show_is_found_by_numbers() -> None:
    """All parts that would be replaced are torch's own; a trial sees that another part saw a ReLU's work in place."""

    def model(inplace: bool) -> nn.Module:
        keeps = Keeps()
        parts = [keeps, nn.ReLU(inplace=inplace), nn.MaxPool2d(2), Adds(keeps)]
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(12, CLASSES))

    quick, left_alone = net_of(model(False), (3, 4, 4)), net_of(model(True), (3, 4, 4))
    assert any(isinstance(part, FusedPool) for part in fused_net(quick).row_module.modules())
    assert fused_net(left_alone).row_module is left_alone.module


def test_layers_that_start_at_zero_hide_nothing() -> None:
    """Under a last layer of zeros, outputs and gradients of everything before it are zero at the start."""
    keeps = Keeps()
    last = nn.Linear(12, CLASSES)
    nn.init.zeros_(last.weight)
    net = net_of(
        nn.Sequential(keeps, nn.ReLU(inplace=True), nn.MaxPool2d(2), Adds(keeps), nn.Flatten(), last), (3, 4, 4)
    )
    assert fused_net(net).row_module is net.module


def test_a_trial_leaves_no_trace() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.5),
        nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip
    before = {name: value.clone() for name, value in module.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    net = Net(module)
    net.examine(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)), CLASSES)
    assert mixes_examples(net)
    assert not is_stackable(net)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.dtype == torch.float32 and parameter.grad is None for parameter in module.parameters())


# Mixing ---------------------------------------------------------------------------------------------------------------


class Written(nn.Module):
    """A function of a layer's outputs, as somebody writes it."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.inner, self.outer, self.function = nn.Linear(12, 8), nn.Linear(8, CLASSES), function

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.function(self.inner(x)))  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """Notes the smallest and the largest token of each batch, where these are numbers (within vmap they are not)."""

    def __init__(self, limits: list[int], converts: bool) -> None:
        super().__init__()
        self.words, self.outer = nn.Embedding(5, 4), nn.Linear(4, CLASSES)
        self.limits, self.converts = limits, converts

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokens:
        twin = Tokens(self.limits, self.converts)
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: Tensor) -> Tensor:
        x = x.long() if self.converts else x
        with suppress(RuntimeError):
            self.limits += [int(x.min()), int(x.max())]
        return self.outer(self.words(x).mean(1))  # type: ignore[no-any-return]


class HookedGradient(nn.Module):
    """Outputs that mix nothing, and gradients that do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad - grad.mean(0))
        return self.outer(hidden)  # type: ignore[no-any-return]


def transposed_dropout(x: Tensor) -> Tensor:
    """Which units are dropped depends on how many examples there are."""
    return F.dropout(x.T, 0.5, training=True).T


def started_at_zero() -> nn.Module:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    nn.init.zeros_(norm.weight)
    return Written(norm)


MIXING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Written(nn.BatchNorm1d(8)),
    "batch norm without statistics": lambda: Written(nn.BatchNorm1d(8, track_running_stats=False)),
    "batch norm that starts at zero": started_at_zero,
    "mean": lambda: Written(lambda x: x - x.mean(0)),
    "a little of the mean": lambda: Written(lambda x: x + 1e-5 * x.mean(0)),
    "mean behind a wide dead zone": lambda: Written(lambda x: x + F.relu(x.mean(0) - 1e3)),
    "maximum": lambda: Written(lambda x: x - x.amax(0)),
    "softmax": lambda: Written(lambda x: x.softmax(0)),
    "sum so far": lambda: Written(lambda x: x.cumsum(0)),
    "neighbour": lambda: Written(lambda x: x + x.roll(1, 0)),
    "number of examples": lambda: Written(lambda x: x / len(x)),
    "long batches only": lambda: Written(lambda x: x - x.mean(0) if len(x) > 20 else x),
    "transposed dropout": lambda: Written(transposed_dropout),
    "gradients only": HookedGradient,
}
NOT_MIXING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: Written(torch.tanh), (12,)),
    "layer norm": (lambda: Written(nn.LayerNorm(8)), (12,)),
    "dropout": (lambda: Written(nn.Dropout(0.5)), (12,)),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, CLASSES)),
        (3, 4, 4),
    ),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(16, CLASSES)),
        (3, 4, 4),
    ),
    "attention": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(12, CLASSES)
        ),
        (3, 4),
    ),
    "frozen batch norm": (lambda: Written(nn.BatchNorm1d(8)), (12,)),
}


@pytest.mark.parametrize("kind", MIXING)
def test_these_mix_the_examples_of_a_batch(kind: str) -> None:
    if kind == "transposed dropout":  # random in evaluation too, which `examine` refuses
        net = Net(MIXING[kind]())
        net.sample, net.draws_random_numbers = torch.randn(2, 12), False
    else:
        net = net_of(MIXING[kind]())
    assert mixes_examples(net)
    assert not is_stackable(net)


@pytest.mark.parametrize("kind", NOT_MIXING)
def test_these_do_not(kind: str) -> None:
    make, shape = NOT_MIXING[kind]
    net = Net(make(), frozen_statistics=kind == "frozen batch norm")
    net.examine(torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)), CLASSES)
    assert not mixes_examples(net)
    assert not net.mixes_in_evaluation


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_tokens_are_tried_as_tokens(dtype: torch.dtype) -> None:
    """An index beyond an Embedding is an error on a CPU; on a GPU it ends every further use of the device."""
    limits: list[int] = []
    net = Net(Tokens(limits, converts=dtype == torch.float32))
    net.examine(torch.tensor([[0, 1, 4], [2, 2, 3]], dtype=dtype), CLASSES)
    assert not mixes_examples(net)
    assert is_stackable(net)
    assert len(limits) > 20
    assert (min(limits), max(limits)) == (0, 4)


def test_a_mean_in_evaluation_mode_is_announced_and_has_no_fisher_information() -> None:
    x, y = torch.randn(40, 12), torch.arange(40) % CLASSES
    chosen = Experiment(split={"clients": 2, "scheme": "iid"}, local={"batch": 8}, algorithm={"name": "fedcurv"})
    federation = build(chosen, model=MIXING["mean"], data=(x, y, x, y))
    assert any("mixes the examples of a batch in evaluation mode" in notice for notice in federation.notices)
    from fedgg.lab.runner import run

    with pytest.raises(UserError, match="a single example has no gradient of its own") as caught:
        run(chosen, model=MIXING["mean"], data=(x, y, x, y))
    assert "\n" not in str(caught.value)


def test_a_model_that_takes_no_single_example_is_refused_in_one_line() -> None:
    """Batch statistics that are kept nowhere need two examples as well."""
    x, y = torch.randn(34, 12), torch.arange(34) % CLASSES
    chosen = Experiment(split={"clients": 2, "scheme": "iid"}, local={"batch": 8})
    with pytest.raises(UserError, match="its last batch has one"):
        build(chosen, model=MIXING["batch norm without statistics"], data=(x, y, x, y))


def test_without_short_batches_it_is_trained() -> None:
    x, y = torch.randn(34, 12), torch.arange(34) % CLASSES
    chosen = Experiment(split={"clients": 2, "scheme": "iid"}, local={"batch": 8, "drop_last": True})
    from fedgg.lab.runner import run

    done = run(chosen.changed({"rounds": 1}), model=MIXING["batch norm without statistics"], data=(x, y, x, y))
    assert [client["steps"] for client in done.rounds[0]["clients"]] == 2 * [2 * chosen.local.epochs]


def test_a_tensor_of_another_precision_is_named_in_one_line() -> None:
    module: Any = nn.Linear(12, CLASSES)
    module.projection = torch.eye(12)
    module.register_forward_pre_hook(lambda layer, inputs: (inputs[0] @ layer.projection,))
    with pytest.raises(UserError, match=r"register_buffer\(\) them"):
        net_of(module.double(), dtype=torch.float64)


def test_a_single_example_to_be_scored_is_refused_in_one_line() -> None:
    x, y = torch.randn(1001, 12), torch.arange(1001) % CLASSES
    chosen = Experiment(split={"clients": 2, "scheme": "iid"}, local={"batch": 8})
    with pytest.raises(UserError, match="the test set has 1001 examples and is scored 1000 at a time"):
        build(chosen, model=MIXING["batch norm without statistics"], data=(x[:36], y[:36], x, y))


def test_hooks_on_parameters_are_refused() -> None:
    layer = nn.Linear(12, CLASSES)
    layer.weight.register_hook(lambda grad: 0 * grad)
    with pytest.raises(UserError, match="hook on its parameter weight"):
        net_of(layer)


def test_a_module_that_cannot_be_copied_is_refused_in_one_line() -> None:
    module: Any = nn.Linear(12, CLASSES)
    module.cached = module.weight * 2
    with pytest.raises(UserError, match="hand in a function that makes it") as caught:
        build_model(module, {}, (12,), CLASSES, 0)
    assert "\n" not in str(caught.value)
