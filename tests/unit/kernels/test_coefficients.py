"""A program on single numbers in one kernel is what the algorithm's own words compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("kernels need a GPU", allow_module_level=True)

from fedgg.algorithms import FedAvg, FedGG, FedProx
from fedgg.core.algorithm import Algorithm, Client, Number
from fedgg.engines.fused.term_analysis import StepTerms, trace_terms
from fedgg.engines.fused.term_coefficients import split_trace

CUDA = torch.device("cuda")
PAIRS, PLACES = ("drift.drift", "direction.drift", "step.step"), ("drift", "direction", "")
ROWS = 7


class Words(Algorithm):
    """Every word the kernel knows, of numbers that change in every step and of such that do not."""

    def terms(self, client: Client) -> dict[str, Number]:
        a, b = client.inner("drift", "drift") + client.step, client.inner("step", "step") * client.lr
        mixed = (2 - a) / 3 + 1 / (1 + b) - a.sqrt() + abs(-a) + (-b).exp() + torch.minimum(a, b) * torch.maximum(a, b)
        chosen = torch.where(a >= b, torch.where(a != 2, a, 1), torch.where(b <= 3, b, client.lr**0.5))
        equal = torch.where(a == b, 1, 2) + torch.where(a < 1, 1, 0) + torch.where(b > 1, torch.zeros_like(b), 5)
        return {"direction": mixed + chosen + equal, "drift": a.clamp_min(1.5) + client.lr.sqrt()}


def column(*values: float) -> Tensor:
    rows = values if len(values) > 1 else values * ROWS
    return torch.tensor(rows, dtype=torch.float64, device=CUDA)[:, None]


def client(**changed: Any) -> Client:
    numbers = {name: column(*(0.1 * (k + at) for k in range(ROWS))) for at, name in enumerate(("lr", "examples"), 1)}
    rest = {name: column(2.0) for name in ("steps", "effective_steps", "round")} | {"momentum": column(0.9)}
    fixed: dict[str, Any] = {"net": None, "probe": None, "down": {}, "memory": {}, "last_step": None, "sums": {}}
    notes = {"reach": column(0.7), "anchor": torch.zeros(ROWS, 9, device=CUDA)}
    w = torch.zeros(ROWS, 9, dtype=torch.float64, device=CUDA)
    return Client(**({**fixed, **numbers, **rest, "w": w, "step": column(0.0), "notes": notes} | changed))


@pytest.mark.parametrize("blocks", [1, 31, 700])
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize(
    "algorithm",
    [
        FedGG(mu=0.3),
        FedGG(gradient="printed", weight="fixed", lam=0.2),
        FedGG(weight="fixed", lam=0.2, first_step="epsilon"),
        FedGG(mu=0.0, first_step="push", push_decay=0.9),
        FedGG(mu=0.1, first_step="relative_push"),
        FedProx(mu=0.2),
        FedAvg(),
        Words(),
    ],
    ids=str,
)
def test_factors(algorithm: Algorithm, step: int, blocks: int) -> None:
    torch.manual_seed(0)
    if isinstance(algorithm, FedGG):
        algorithm = replace(algorithm, mu=algorithm.mu * column(*range(1, ROWS + 1)))  # a sweep
    parts = torch.rand(ROWS, len(PAIRS), blocks, dtype=torch.float64, device=CUDA)
    parts[0] = 0.0  # a client that has not moved
    sums = {both: parts.sum(2)[:, number : number + 1] for number, both in enumerate(PAIRS)}
    wanted = algorithm.terms(client(step=column(step), sums=sums))
    trace = trace_terms(algorithm, client(), StepTerms((), PAIRS))
    assert trace is not None
    split = split_trace(trace, PLACES)
    assert split is not None
    found = split.of(algorithm, client()).at(column(step), parts)
    assert found.shape == (ROWS, len(PLACES))
    for number, name in enumerate(PLACES):
        if name in wanted:
            exact = wanted[name] * torch.ones_like(found[:, :1])
            torch.testing.assert_close(found[:, number : number + 1], exact, rtol=1e-13, atol=0)
