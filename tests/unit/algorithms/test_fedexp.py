"""FedExP against a plain transcription, by hand, and on clients that agree and that do not."""

from __future__ import annotations

import pytest
import torch
from paper_transcription import Federated, Weights, average, weights_of
from plain_rounds import compare, minus, shares, trained
from test_against_transcription import Case, every_case, flat, with_settings
from test_quadratics import HALF, away, end, fixed_point
from torch import Tensor

from fedgg.algorithms import FedAvg, FedExP
from fedgg.check.multi_round_properties import on_quadratics
from fedgg.check.toy_problems import Quadratics
from fedgg.core.algorithm import Algorithm, Server

EPSILON = 0.001


def fedexp(given: Federated) -> list[Weights]:
    w, history = weights_of(given.module), []
    for round_, cohort in enumerate(given.cohorts):
        local = {c: trained(given, round_, c, w) for c in cohort}
        share = shares(given, list(cohort))
        mean = minus(average(local, given), w)
        lengths = sum(share[c] * float(flat(minus(local[c], w)).norm()) ** 2 for c in cohort)
        step = max(1.0, lengths / (2 * (float(flat(mean).norm()) ** 2 + EPSILON)))
        w = {name: w[name] + step * mean[name] for name in w}
        history.append(w)
    return history


@every_case
def test_as_transcribed(case: Case) -> None:
    compare("fedexp", with_settings(epsilon=EPSILON), case, fedexp)


def next_model(first: list[float], second: list[float], epsilon: float) -> list[float]:
    up = {"delta": torch.tensor([first, second], dtype=torch.float64)}
    share = torch.full((2, 1), 0.5, dtype=torch.float64)
    w, _ = FedExP(epsilon).aggregate(torch.zeros(1, 2).double(), up, share, Server({}, 2, 1.0, 0))
    found: list[float] = w[0].tolist()
    return found


def test_by_hand() -> None:
    """Updates (4, 2) and (-2, 2): the mean is (1, 2) with 5, the lengths are 20 and 8, so 14 / (2 (5 + 0.6))."""
    assert next_model([4.0, 2.0], [-2.0, 2.0], 0.6) == pytest.approx([1.25, 2.5], rel=1e-15)
    assert next_model([1.0, 2.0], [1.0, 2.0], 0.6) == [1.0, 2.0]  # clients that agree: the mean itself
    assert next_model([0.0, 0.0], [0.0, 0.0], 0.6) == [0.0, 0.0]


def to_go(algorithm: Algorithm, momentum: float) -> float:
    """Clients of three examples in five dimensions: each has many optima, all share one."""
    drawn = Quadratics.draw(disagreement=0.0)
    few = Quadratics(tuple(x[:3] for x in drawn.x), tuple(y[:3] for y in drawn.y))
    w: Tensor = on_quadratics(algorithm, few, steps=100, momentum=momentum)
    return away(w, few.optimum())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_faster_where_one_model_fits_all_clients(momentum: float) -> None:
    assert to_go(FedExP(1e-9), momentum) < 0.7 * to_go(FedAvg(), momentum)


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_with_a_floor_it_rests_where_fedavg_rests_and_without_it_circles_nearby(momentum: float) -> None:
    assert away(end(FedExP(10.0), momentum, steps=150), fixed_point(momentum)) < 1e-4
    assert away(end(FedExP(), momentum, steps=100), fixed_point(momentum)) < 1


def test_neutral_is_fedavg_bit_for_bit() -> None:
    for momentum in (0.0, 0.9):
        assert torch.equal(end(FedExP().neutral(), momentum, HALF, 50), end(FedAvg(), momentum, HALF, 50))
