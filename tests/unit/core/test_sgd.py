"""The optimiser on rows equals PyTorch's, and effective steps equal their brute-force sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgg.core.optimisers import SGD


@settings(deadline=None, max_examples=30)
@given(
    lr=st.floats(1e-3, 0.5),
    momentum=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    decay=st.sampled_from([0.0, 1e-4, 0.1]),
    seed=st.integers(0, 1000),
)
def test_equals_torch_over_many_steps(lr: float, momentum: float, decay: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, targets = (torch.randn(3, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    w, velocity = start.clone(), torch.zeros_like(start)
    theirs = start.clone().requires_grad_()
    optimiser = torch.optim.SGD([theirs], lr=lr, momentum=momentum, weight_decay=decay)
    sgd = SGD.of(lr, momentum, decay, w)
    for _ in range(40):
        move, velocity = sgd.move((w - targets).sin(), w, velocity)
        w = w + move
        theirs.grad = (theirs.detach() - targets).sin()
        optimiser.step()
        assert torch.allclose(w, theirs.detach(), rtol=1e-12, atol=1e-13)


def test_rows_may_have_their_own_settings() -> None:
    lr, momentum = torch.tensor([[0.1], [0.2]]), torch.tensor([[0.0], [0.9]])
    together = SGD(lr, momentum, torch.tensor([[0.0], [0.3]]), True, True)
    w, v, grad = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    move, velocity = together.move(grad, w, v)
    for k, (rate, b, decay) in enumerate(((0.1, 0.0, 0.0), (0.2, 0.9, 0.3))):
        one = SGD.of(rate, b, decay, w[k : k + 1])
        alone, own = one.move(grad[k : k + 1], w[k : k + 1], v[k : k + 1])
        assert torch.allclose(move[k], alone[0], rtol=0, atol=1e-7)
        if b:
            assert torch.allclose(velocity[k], own[0], rtol=0, atol=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 37])
def test_effective_steps_against_the_sum(momentum: float, steps: int) -> None:
    like = torch.zeros(1, 4, dtype=torch.float64)
    sgd = SGD.of(0.1, momentum, 0.0, like)
    got = float(sgd.effective_steps(torch.full((1, 1), float(steps), dtype=torch.float64)))
    velocity = total = 0.0
    for _ in range(steps):  # a constant gradient of one
        velocity = momentum * velocity + 1
        total += velocity
    assert got == pytest.approx(total, rel=1e-9, abs=1e-12)


def test_effective_steps_row_by_row() -> None:
    sgd = SGD.of(0.1, 0.5, 0.0, torch.zeros(3, 2, dtype=torch.float64))
    assert sgd.effective_steps(torch.tensor([[1.0], [2.0], [3.0]])).tolist() == [[1.0], [2.5], [4.25]]
