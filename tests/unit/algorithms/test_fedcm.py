"""FedCM against a plain transcription, with weight decay as part of the client's gradient, and where it rests.

And in the form of FL-Simulator, whose printed values docs/literature.md compares with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from paper_transcription import Federated, Weights, total_push, weights_of
from plain_rounds import compare, minus, nothing, shares, trained, weighted, zeros
from test_against_transcription import FULL, Case, by_library, distance, every_case, flat, problem, with_settings
from test_fednova import BATCH, EXAMPLES, LR, unequal
from test_quadratics import HALF, away, end, fixed_point, world
from torch import Tensor, nn

from fedgg.algorithms import FedAvg, FedCM
from fedgg.check.multi_round_properties import on_quadratics
from fedgg.core.algorithm import Server

ALPHA = 0.3


def fedcm(given: Federated) -> list[Weights]:
    def own(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        return gradient + given.weight_decay * parameter.detach()

    return rounds_of_fedcm(given, replace(given, weight_decay=0.0), own)


def fl_simulators(given: Federated, clip_norm: float) -> list[Weights]:
    """alpha times the loss' gradient alone; the mixture is clipped, and then the optimiser adds weight decay."""

    def clipped(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)

    return rounds_of_fedcm(given, given, lambda _, gradient: gradient, clipped)


def rounds_of_fedcm(
    given: Federated,
    local: Federated,
    own: Callable[[nn.Parameter, Tensor], Tensor],
    then: Callable[[nn.Module], None] = nothing,
) -> list[Weights]:
    """`own`: the client's gradient, of which alpha is taken; `local`: with the weight decay of the optimiser."""
    w, history = weights_of(given.module), []
    pace = zeros(w)
    for round_, cohort in enumerate(given.cohorts):

        def mixed(model: nn.Module, pace: Weights = pace) -> None:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                parameter.grad = ALPHA * own(parameter, parameter.grad) + (1 - ALPHA) * pace[name]
            then(model)

        share, ends = shares(given, list(cohort)), {}
        for c in cohort:
            ends[c] = trained(local, round_, c, w, mixed)
        reach = {c: given.lr_at(round_) * total_push(len(given.batches(round_, c)), given.momentum) for c in cohort}
        pace = weighted({c: minus(w, ends[c]) for c in cohort}, {c: share[c] / reach[c] for c in cohort})
        w = weighted(ends, share)
        history.append(w)
    return history


@every_case
def test_as_transcribed(case: Case) -> None:
    compare("fedcm", with_settings(alpha=ALPHA), case, fedcm)


def test_as_fl_simulator_has_it() -> None:
    """With weight decay and clip_norm divided by alpha, but for the epsilon of the clipping."""
    theirs, alpha, clip_norm = replace(FULL, weight_decay=0.1), with_settings(alpha=ALPHA), 0.2
    expected = [flat(weights) for weights in fl_simulators(problem(theirs), clip_norm)]
    ours = replace(theirs, weight_decay=theirs.weight_decay / ALPHA, clip_norm=clip_norm / ALPHA)
    assert max(distance(by_library("fedcm", alpha, ours), expected)) < 1e-5
    for change in ({"weight_decay": theirs.weight_decay}, {"clip_norm": clip_norm}, {"clip_norm": None}):
        assert distance(by_library("fedcm", alpha, replace(ours, **change)), expected)[-1] > 1e-2


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_it_rests_where_a_slower_fedavg_does(momentum: float) -> None:
    w = end(FedCM(alpha=0.5), momentum, steps=200)
    assert away(w, fixed_point(momentum, slower=0.5)) < 1e-5
    assert away(w, world().optimum()) < 0.7 * away(fixed_point(momentum), world().optimum())


def test_by_hand() -> None:
    """Moves of -0.6 and 0.4 in reaches of 0.2 and 0.1: gradients 3 and -4, a pace of -1/2 by halves."""
    half, kind = torch.full((2, 1), 0.5), FedCM(alpha=0.25)
    up = {"delta": torch.tensor([[-0.6], [0.4]]), "reach": torch.tensor([[0.2], [0.1]])}
    server = Server(kind.server_memory(half[:1]), 2, 1.0, 0)
    w, memory = kind.aggregate(torch.ones(1, 1), up, half, server)
    assert float(w) == pytest.approx(0.9)
    assert float(memory["pace"]) == pytest.approx(-0.5)


def settled(alpha: float, momentum: float) -> Tensor:
    """Where neither the model nor the pace moves, on clients of 1, 2 and 8 steps an epoch: four linear equations."""
    steps, lr = [5 * n // BATCH for _, _, n in EXAMPLES], LR * 5 / total_push(5, momentum)
    shares = [n / sum(n for _, _, n in EXAMPLES) for _, _, n in EXAMPLES]

    def change(both: Tensor) -> Tensor:
        start, pace = both[:2], both[2:]
        delta, mean_pace = torch.zeros(2).double(), torch.zeros(2).double()
        for (row, target, _), count, share in zip(EXAMPLES, steps, shares, strict=True):
            x, w, velocity = torch.tensor(row).double(), start, torch.zeros(2).double()
            for _ in range(count):
                velocity = momentum * velocity + alpha * x * (x @ w - target) + (1 - alpha) * pace
                w = w - lr * velocity
            delta = delta + share * (w - start)
            mean_pace = mean_pace + share * (start - w) / (lr * total_push(count, momentum))
        return torch.cat([delta, mean_pace - pace])

    rest = change(torch.zeros(4).double())
    matrix = torch.stack([change(unit) - rest for unit in torch.eye(4).double()], 1)
    found: Tensor = torch.linalg.solve(matrix, -rest)[None, :2]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_unequal_steps_weigh_less_than_in_fedavg(momentum: float) -> None:
    given: dict[str, Any] = {"steps": 500, "momentum": momentum, "cohort": 3, "lr": LR, "batch": BATCH}
    goal = unequal().optimum("examples")
    found, fedavg = (on_quadratics(kind, unequal(), **given) for kind in (FedCM(alpha=0.3), FedAvg()))
    assert away(found, settled(0.3, momentum)) < 0.005
    assert away(found, goal) < 0.3 * away(fedavg, goal)


def test_half_of_the_clients_at_the_default_stay_near() -> None:
    assert away(end(FedCM(), 0.9, HALF, steps=200), world().optimum()) < 0.5


def test_neutral_is_fedavg_bit_for_bit() -> None:
    for momentum in (0.0, 0.9):
        assert torch.equal(end(FedCM().neutral(), momentum, HALF, 50), end(FedAvg(), momentum, HALF, 50))
