"""FedCM against a plain transcription, with weight decay as part of the client's gradient, and where it rests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from paper_transcription import Federated, Weights, total_push, weights_of
from plain_rounds import compare, minus, shares, trained, weighted, zeros
from test_against_transcription import Case, every_case, with_settings
from test_fednova import BATCH, EXAMPLES, LR, unequal
from test_quadratics import HALF, away, end, fixed_point, world
from torch import Tensor, nn

from fedgg.algorithms import FedAvg, FedCM
from fedgg.check.multi_round_properties import on_quadratics
from fedgg.core.algorithm import Server

ALPHA = 0.3


def fedcm(given: Federated) -> list[Weights]:
    w, history = weights_of(given.module), []
    pace = zeros(w)
    undecayed = replace(given, weight_decay=0.0)  # it is added by hand, inside alpha
    for round_, cohort in enumerate(given.cohorts):

        def mixed(model: nn.Module, pace: Weights = pace) -> None:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                own = parameter.grad + given.weight_decay * parameter.detach()
                parameter.grad = ALPHA * own + (1 - ALPHA) * pace[name]

        share, local = shares(given, list(cohort)), {}
        for c in cohort:
            local[c] = trained(undecayed, round_, c, w, mixed)
        reach = {c: given.lr_at(round_) * total_push(len(given.batches(round_, c)), given.momentum) for c in cohort}
        pace = weighted({c: minus(w, local[c]) for c in cohort}, {c: share[c] / reach[c] for c in cohort})
        w = weighted(local, share)
        history.append(w)
    return history


@every_case
def test_as_transcribed(case: Case) -> None:
    compare("fedcm", with_settings(alpha=ALPHA), case, fedcm)


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
