"""A program of our own layers gives what goes into the last one, and goes back from there as torch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedgg.core.model import Net
from fedgg.engines.layers.module_programs import layers_of
from fedgg.engines.layers.program import Program

CLIENTS, EXAMPLES = 3, 5


def net(*, ending: nn.Module | None = None) -> Net:
    torch.manual_seed(0)
    parts = [nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)]
    return Net(nn.Sequential(*parts, *([ending] if ending else [])).double())


def program(model: Net) -> Program:
    layers = layers_of(model, lambda prefix, parts: None)
    assert layers is not None
    return Program(layers, model.layout)


def rows(model: Net) -> tuple[Tensor, Tensor]:
    w = torch.randn(CLIENTS, model.layout.total, dtype=torch.float64).requires_grad_()
    return w, torch.randn(CLIENTS, EXAMPLES, 2, 4, dtype=torch.float64)


def by_hand(model: Net, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    made = []
    for row, inputs in zip(w, x, strict=True):
        p = model.layout.unflatten(row)
        hidden = inputs.flatten(1)
        for name in ("1", "3"):
            hidden = (hidden @ p[f"{name}.weight"].T + p[f"{name}.bias"]).relu()
        made.append((hidden @ p["5.weight"].T + p["5.bias"], hidden))
    outputs, representation = zip(*made, strict=True)
    return torch.stack(outputs), torch.stack(representation)


@pytest.mark.parametrize("outputs_count", [True, False])
def test_both_ways_back(outputs_count: bool) -> None:
    model = net()
    (w, x), own = rows(model), program(model)
    pull = torch.randn(CLIENTS, EXAMPLES, 5, dtype=torch.float64)

    def slope(outputs: Tensor, representation: Tensor) -> Tensor:
        loss = (representation * pull).sum() + (outputs.square().sum() if outputs_count else 0)
        return torch.autograd.grad(loss, w)[0]

    found, wanted = own.seen(w, x), by_hand(model, w, x)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1])
    torch.testing.assert_close(slope(*found), slope(*wanted))


def test_what_can_be_had_is_the_input_of_the_last_layer_by_its_name() -> None:
    assert program(net()).offers("5")
    assert not program(net()).offers("3")
    assert not program(net(ending=nn.Dropout(0.5))).offers("5")


def test_outputs_do_not_hold_what_the_pass_has_kept() -> None:
    """Such a circle would keep every step's activations alive until Python looks for circles."""
    import gc
    import weakref

    model = net()
    (w, x), own = rows(model), program(model)
    gc.collect()
    gc.disable()
    try:
        outputs, representation = own.seen(w, x)
        gone = weakref.ref(representation)
        del outputs, representation
        assert gone() is None
    finally:
        gc.enable()
