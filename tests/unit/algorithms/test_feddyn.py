"""FedDyn against a plain transcription that keeps gradients and h as the paper does, and which optimum it reaches."""

from __future__ import annotations

import pytest
from paper_transcription import Federated, Weights, weights_of
from plain_rounds import add, compare, minus, shares, trained, weighted, zeros
from test_against_transcription import Case, every_case, with_settings
from test_quadratics import EVERYBODY_SLOWLY, HALF, away, end, world
from torch import nn

from fedgg.algorithms import FedDyn

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


@pytest.mark.parametrize("cohort", [EVERYBODY_SLOWLY, HALF])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_share_reaches_the_optimum_by_examples(momentum: float, cohort: int) -> None:
    w = end(FedDyn(alpha=2.0), momentum, cohort, steps=500)
    assert away(w, world().optimum("examples")) < 1e-4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_uniform_reaches_the_optimum_by_clients(momentum: float) -> None:
    w = end(FedDyn(alpha=2.0, mean="uniform"), momentum, HALF, steps=500)
    assert away(w, world().optimum("clients")) < 1e-4
    assert away(w, world().optimum("examples")) > 0.01
