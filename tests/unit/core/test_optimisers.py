"""Local optimisers against torch.optim, gradient clipping against torch.nn.utils."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgg.core.optimisers import OPTIMISERS, SGD, Optimiser, OptimiserSettings, sgd

BETAS = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}


def values(**changes: float) -> dict[str, float]:
    return {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "clip_norm": math.inf, **BETAS, **changes}


def settings_of(name: str, **changes: float) -> OptimiserSettings:
    kind = OPTIMISERS[name]
    names = set(kind.__dataclass_fields__) - {"used"}
    return OptimiserSettings(kind, {key: value for key, value in values(**changes).items() if key in names})


def on(chosen: OptimiserSettings, like: Tensor) -> Optimiser:
    return chosen.kind.on_rows([chosen.values], like)


def torch_optimiser(name: str, parameter: Tensor, lr: float, momentum: float, decay: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD([parameter], lr=lr, momentum=momentum, weight_decay=decay)
    kind: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    optimiser: torch.optim.Optimizer = kind(
        [parameter], lr=lr, betas=(BETAS["beta1"], BETAS["beta2"]), eps=BETAS["epsilon"], weight_decay=decay
    )
    return optimiser


@pytest.mark.parametrize("name", list(OPTIMISERS))
@settings(deadline=None, max_examples=15)
@given(
    lr=st.sampled_from([0.003, 0.1]),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.05]),
    clip=st.sampled_from([math.inf, 0.5]),
    seed=st.integers(0, 3),
)
def test_equals_torch_over_many_steps(
    name: str, lr: float, momentum: float, decay: float, clip: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, targets = (torch.randn(1, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    w, theirs = start.clone(), start.clone().requires_grad_()
    reference = torch_optimiser(name, theirs, lr, momentum, decay)
    ours = on(settings_of(name, lr=lr, momentum=momentum, weight_decay=decay, clip_norm=clip), w)
    state = ours.start(w)
    for _ in range(40):
        move, state = ours.move(ours.clipped((w - targets).sin()), w, state)
        w = w + move
        theirs.grad = (theirs.detach() - targets).sin()
        if clip != math.inf:
            torch.nn.utils.clip_grad_norm_([theirs], clip)
        reference.step()
        assert torch.allclose(w, theirs.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", list(OPTIMISERS))
def test_rows_may_have_their_own_settings(name: str) -> None:
    each = [settings_of(name, lr=0.1, momentum=0.0, weight_decay=0.0), settings_of(name, lr=0.2, clip_norm=0.3)]
    w, grad = torch.randn(2, 3).double(), torch.randn(2, 3).double()
    together = each[0].kind.on_rows([one.values for one in each], w)
    moves, state = together.move(together.clipped(grad), w, together.start(w))
    moves, _ = together.move(together.clipped(grad), w + moves, state)
    for k, one in enumerate(each):
        row, alone = slice(k, k + 1), on(one, w[k : k + 1])
        move, own = alone.move(alone.clipped(grad[row]), w[row], alone.start(w[row]))
        move, _ = alone.move(alone.clipped(grad[row]), w[row] + move, own)
        assert torch.allclose(moves[row], move, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 37])
def test_effective_steps_against_the_sum(momentum: float, steps: int) -> None:
    like = torch.zeros(1, 4, dtype=torch.float64)
    ours = SGD.of(0.1, momentum, 0.0, like)
    got = float(ours.effective_steps(torch.full((1, 1), float(steps), dtype=torch.float64)))
    velocity = total = 0.0
    for _ in range(steps):  # a constant gradient of one
        velocity = momentum * velocity + 1
        total += velocity
    assert got == pytest.approx(total, rel=1e-9, abs=1e-12)


def test_effective_steps_are_a_column_per_row() -> None:
    ours = SGD.of(0.1, 0.5, 0.0, torch.zeros(3, 2, dtype=torch.float64))
    steps = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    assert ours.effective_steps(steps).flatten().tolist() == pytest.approx([1.0, 2.5, 6.125])


def test_settings_without_effect_are_known() -> None:
    like = torch.zeros(2, 3)
    assert on(sgd(0.1, 0.0, 0.0), like).used == {"lr"}
    assert on(sgd(0.1, 0.9, 0.1), like).used == {"lr", "momentum", "weight_decay"}
    with pytest.raises(NotImplementedError):
        Optimiser.on_rows([{"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": math.inf}], like).move(
            like, like, {}
        )
