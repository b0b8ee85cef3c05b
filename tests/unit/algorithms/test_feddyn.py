"""FedDyn against a plain transcription that keeps gradients and h as the paper does, and which optimum it reaches."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from paper_transcription import Federated, Weights, weights_of
from plain_rounds import add, compare, minus, shares, trained, weighted, zeros
from test_against_transcription import Case, every_case, with_settings
from test_quadratics import EVERYBODY_SLOWLY, HALF, away, end, world
from torch import nn

from fedgg.algorithms import FedDyn
from fedgg.check.multi_round_properties import on_quadratics
from fedgg.check.toy_problems import Quadratics
from fedgg.core.algorithm import Server

ALPHA = 0.2


def feddyn(mean: str, given: Federated) -> list[Weights]:
    w, history = weights_of(given.module), []
    h, everybody = zeros(w), range(len(given.clients))
    gradients = {client: zeros(w) for client in everybody}
    by_examples = shares(given, list(everybody))
    of_all = by_examples if mean == "share" else {client: 1 / len(everybody) for client in everybody}
    for round_, cohort in enumerate(given.cohorts):
        local = {}
        for c in cohort:

            def regularised(model: nn.Module, own: Weights = gradients[c], anchor: Weights = w) -> None:
                for name, parameter in model.named_parameters():
                    add(name, parameter, -own[name] + ALPHA * (parameter.detach() - anchor[name]))

            local[c] = trained(given, round_, c, w, regularised)
        moved = {c: minus(local[c], w) for c in cohort}
        for c in cohort:
            gradients[c] = {name: gradients[c][name] - ALPHA * moved[c][name] for name in w}
        change = weighted(moved, of_all)
        h = {name: h[name] - ALPHA * change[name] for name in w}
        of_round = shares(given, list(cohort)) if mean == "share" else {c: 1 / len(cohort) for c in cohort}
        middle = weighted(local, of_round)
        w = {name: middle[name] - h[name] / ALPHA for name in w}
        history.append(w)
    return history


@every_case
@pytest.mark.parametrize("mean", ["share", "uniform"])
def test_as_transcribed(mean: str, case: Case) -> None:
    compare("feddyn", with_settings(alpha=ALPHA, mean=mean), case, lambda given: feddyn(mean, given))


@pytest.mark.parametrize(
    ("mean", "moved", "model"),
    [
        ("share", 2.0, 4.0),  # delta 3/4 * 1 + 1/4 * 5 = 2, of which half of all examples make 1; 0 + 2 + 2
        ("uniform", 2.5, 5.5),  # delta (1 + 5) / 2 = 3, of which two of four clients make 1.5; 0 + 3 + 2.5
    ],
)
def test_the_server_by_hand(mean: Literal["share", "uniform"], moved: float, model: float) -> None:
    """Updates of 1 and 5 from two of four clients, which hold half of all examples; s was 1."""
    up, share = {"delta": torch.tensor([[1.0], [5.0]])}, torch.tensor([[0.75], [0.25]])
    server = Server({"moved": torch.ones(1, 1)}, clients=4, coverage=0.5, round=3)
    w, memory = FedDyn(mean=mean).aggregate(torch.zeros(1, 1), up, share, server)
    assert memory["moved"].tolist() == [[moved]]
    assert w.tolist() == [[model]]


def test_one_client_by_hand() -> None:
    """L = w^2 / 2 - 2 w, alpha 1, lr 1/2, one step a round: 0 to 1, s = 1, w = 2; then grad 0 + s: to 1.5, s = 1/2."""
    one = torch.ones(1, 1, dtype=torch.float64)
    alone = Quadratics((one,), (2 * one[0],))
    found = [
        float(on_quadratics(FedDyn(alpha=1.0), alone, steps=n, momentum=0.0, cohort=1, lr=0.5, epochs=1))
        for n in (1, 2, 3)
    ]
    # third: w = 1.5 + 1/2 = 2, grad 0 + 1/2: to 1.75, s = 1/4
    assert found == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("cohort", [EVERYBODY_SLOWLY, HALF])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_share_reaches_the_optimum_by_examples(momentum: float, cohort: int) -> None:
    w = end(FedDyn(alpha=2.0), momentum, cohort, steps=250)
    assert away(w, world().optimum("examples")) < 1e-4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_uniform_reaches_the_optimum_by_clients(momentum: float) -> None:
    w = end(FedDyn(alpha=2.0, mean="uniform"), momentum, HALF, steps=250)
    assert away(w, world().optimum("clients")) < 1e-4
    assert away(w, world().optimum("examples")) > 0.01
