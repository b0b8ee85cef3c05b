"""A module's parameters in a row and back: nested, shared, frozen, scalar, convolutional."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgg.core.layout import Layout
from fedgg.core.model import Net
from fedgg.core.tensor_rows import dot
from fedgg.errors import UserError


class Odd(nn.Module):
    """A scalar, an empty buffer, a convolution, a frozen and a shared parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.body = nn.ModuleDict({"conv": nn.Conv2d(1, 2, 3), "norm": nn.BatchNorm2d(2)})
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.fixed = nn.Linear(4, 3)
        self.fixed.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body["norm"](self.body["conv"](x)).mean((2, 3))
        x = torch.cat([x, x], 1) * self.scale
        return self.fixed(self.second(self.first(x).tanh()))  # type: ignore[no-any-return]


def test_odd_module_lies_in_a_row() -> None:
    module = Odd()
    layout = Layout.of(module)
    assert layout.names == (
        "scale",
        "body.conv.weight",
        "body.conv.bias",
        "body.norm.weight",
        "body.norm.bias",
        "first.weight",
        "first.bias",
        "second.bias",
        "fixed.bias",
    )
    assert layout.total == 1 + 18 + 2 + 2 + 2 + 16 + 4 + 4 + 3
    assert set(layout.buffers) == {
        "body.norm.running_mean",
        "body.norm.running_var",
        "body.norm.num_batches_tracked",
    }
    buffers = Net(module).start_buffers
    assert buffers["body.norm.num_batches_tracked"].shape == (1,)
    assert buffers["body.norm.running_var"].shape == (1, 2)


def test_odd_module_computes_the_same_from_rows() -> None:
    torch.manual_seed(0)
    module, x = Odd(), torch.randn(3, 1, 6, 6)
    net = Net(module)
    expected = module.eval()(x)
    got = net.bind(net.start_buffers, train=False)(net.start, x[None])[0]
    assert torch.equal(got, expected)


def test_shared_parameters_move_together_and_frozen_ones_never() -> None:
    torch.manual_seed(0)
    module, x = Odd().double(), torch.randn(3, 1, 6, 6, dtype=torch.float64)
    net = Net(module)
    w = net.start + 0.1 * torch.randn_like(net.start)
    with torch.no_grad():
        for name, tensor in net.layout.unflatten(w).items():
            dict(module.named_parameters())[name].copy_(tensor[0])
    expected = module.eval()(x)
    other = Net(Odd().double())
    with torch.no_grad():
        other.module.get_parameter("fixed.weight").copy_(module.fixed.weight)
    got = other.bind(net.start_buffers, train=False)(w, x[None])[0]
    assert torch.allclose(got, expected, rtol=0, atol=1e-14)


def test_gradient_of_a_shared_parameter_is_the_sum_over_its_uses() -> None:
    torch.manual_seed(0)
    module, x, y = Odd().double(), torch.randn(5, 1, 6, 6, dtype=torch.float64), torch.randint(3, (5,))
    net = Net(module)
    leaf = net.start.clone().requires_grad_()
    forward = net.bind(net.start_buffers, train=False)
    (got,) = torch.autograd.grad(forward.loss(leaf, x[None], y[None], torch.ones(1, 5).double()).sum(), leaf)
    nn.functional.cross_entropy(module.eval()(x), y).backward()
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    expected = torch.cat([p.grad.reshape(-1) for p in parameters.values() if p.grad is not None])
    assert torch.allclose(got[0], expected, rtol=0, atol=1e-14)


@settings(deadline=None, max_examples=40)
@given(
    shapes=st.lists(st.lists(st.integers(1, 3), max_size=4), min_size=1, max_size=6),
    clients=st.integers(1, 3),
)
def test_round_trip_for_any_shapes(shapes: list[list[int]], clients: int) -> None:
    module = nn.Module()
    for number, shape in enumerate(shapes):
        inner = nn.Module()
        inner.weight = nn.Parameter(torch.randn(tuple(shape)))
        module.add_module(f"part{number}", inner)
    layout = Layout.of(module)
    row = layout.flatten(dict(module.named_parameters()))
    assert row.shape == (1, layout.total)
    rows = torch.cat([row + k for k in range(clients)])
    for name, tensors in layout.unflatten(rows).items():
        assert tensors.shape == (clients, *module.get_parameter(name).shape)
        for k in range(clients):
            assert torch.equal(tensors[k], module.get_parameter(name).detach() + k)
    for k in range(clients):
        own = {name: tensors[k] for name, tensors in layout.unflatten(rows).items()}
        assert torch.equal(layout.flatten(own), rows[k : k + 1])


def test_layers_group_weight_and_bias() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)))
    assert layout.layers == ((0, 8), (8, 12), (12, 16))
    assert Layout.of(Odd()).layers == ((0, 1), (1, 21), (21, 25), (25, 45), (45, 49), (49, 52))


def test_layer_dot_by_hand() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False)))
    a, b = torch.randn(2, 12), torch.randn(2, 12)
    got = layout.layer_dot(a, b)
    assert got.shape == (2, 12)
    assert torch.equal(got[:, :8], dot(a[:, :8], b[:, :8]).expand(-1, 8))
    assert torch.equal(got[:, 8:], dot(a[:, 8:], b[:, 8:]).expand(-1, 4))


def test_a_module_without_trainable_parameters_is_refused() -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UserError, match="nothing to learn"):
        Layout.of(module)
    with pytest.raises(UserError):
        Layout.of(nn.ReLU())


def test_rows_are_copies_not_the_modules_own_memory() -> None:
    module = nn.Linear(2, 2)
    net = Net(module)
    before = net.start.clone()
    with torch.no_grad():
        module.weight.add_(1)
    assert torch.equal(net.start, before)
    one = nn.Linear(2, 1, bias=False)  # one parameter only: `cat` of one must still be a copy
    net = Net(one)
    before = net.start.clone()
    with torch.no_grad():
        one.weight.add_(1)
    assert torch.equal(net.start, before)
