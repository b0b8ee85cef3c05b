"""FedNova against a plain transcription, by hand, and where clients take different numbers of steps."""

from __future__ import annotations

import pytest
import torch
from paper_transcription import Federated, Weights, total_push, weights_of
from plain_rounds import compare, minus, shares, trained, weighted
from test_against_transcription import Case, every_case
from test_quadratics import HALF
from test_quadratics import end as after
from torch import Tensor

from fedgg.algorithms import FedAvg, FedNova
from fedgg.check.multi_round_properties import on_quadratics
from fedgg.check.toy_problems import Quadratics
from fedgg.core.algorithm import Server


def fednova(given: Federated) -> list[Weights]:
    w, history = weights_of(given.module), []
    for round_, cohort in enumerate(given.cohorts):
        share = shares(given, list(cohort))
        worth = {c: total_push(len(given.batches(round_, c)), given.momentum) for c in cohort}
        normalised = {
            c: {name: change / worth[c] for name, change in minus(trained(given, round_, c, w), w).items()}
            for c in cohort
        }
        reach = sum(share[c] * worth[c] for c in cohort)
        mean = weighted(normalised, share)
        w = {name: w[name] + reach * mean[name] for name in w}
        history.append(w)
    return history


@every_case
def test_as_transcribed(case: Case) -> None:
    compare("fednova", (), case, fednova)


def test_by_hand() -> None:
    """Three steps of 1 and one of 4, shares 1/4 and 3/4: on average a step and a half along (1/4 * 1, 3/4 * 4)."""
    up = {"delta": torch.tensor([[3.0, 0.0], [0.0, 4.0]]), "worth": torch.tensor([[3.0], [1.0]])}
    w, _ = FedNova().aggregate(torch.zeros(1, 2), up, torch.tensor([[0.25], [0.75]]), Server({}, 2, 1.0, 0))
    assert w.tolist() == [[1.5 * 0.25, 1.5 * 3.0]]


# Each client repeats one example, so that a batch of whatever examples has its full gradient.
EXAMPLES = (([1.0, 0.0], 2.0, 5), ([0.6, 0.8], -1.0, 10), ([0.0, 1.0], 1.0, 40))
BATCH, LR = 5, 0.01


def unequal() -> Quadratics:
    """1, 2 and 8 steps an epoch."""
    x = tuple(torch.tensor([row] * n, dtype=torch.float64) for row, _, n in EXAMPLES)
    y = tuple(torch.tensor([target] * n, dtype=torch.float64) for _, target, n in EXAMPLES)
    return Quadratics(x, y)


def rest(momentum: float, normalised: bool, lr: float) -> Tensor:
    """Where sum p_i (w_i(w) - w) / a_i = 0; w_i(w) = M w + c by running a client's steps on I and on 0."""
    left, right, eye = torch.zeros(2, 2).double(), torch.zeros(2, 1).double(), torch.eye(2).double()
    for row, target, n in EXAMPLES:
        x, steps = torch.tensor([row], dtype=torch.float64), 5 * n // BATCH
        ends = []
        for w, pull in ((eye, 0.0), (0 * eye[:, :1], target)):
            velocity = torch.zeros_like(w)
            for _ in range(steps):
                velocity = momentum * velocity + x.T @ (x @ w - pull)
                w = w - lr * velocity
            ends.append(w)
        weight = n / total_push(steps, momentum) if normalised else float(n)
        left, right = left + weight * (eye - ends[0]), right + weight * ends[1]
    solution: Tensor = torch.linalg.solve(left, right)
    return solution.T


def away(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_do_not_weigh(momentum: float) -> None:
    """FedNova ends next to the optimum by examples, FedAvg where the client of eight steps wants it."""
    world, lr = unequal(), LR * 5 / total_push(5, momentum)
    goal = world.optimum("examples")
    end = on_quadratics(FedNova(), world, steps=200, momentum=momentum, cohort=3, lr=LR, batch=BATCH)
    assert away(end, rest(momentum, True, lr)) < 0.01
    assert away(end, goal) < 0.2 * away(rest(momentum, False, lr), goal)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_where_all_take_the_same_number_of_steps_it_is_fedavg_but_for_rounding(momentum: float) -> None:
    assert away(after(FedNova(), momentum, HALF, 50), after(FedAvg(), momentum, HALF, 50)) < 1e-12
