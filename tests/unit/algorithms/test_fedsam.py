"""FedSAM, MoFedSAM and FedSpeed against plain transcriptions, by hand on a parabola, and in their neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moved_gradients import sharp_gradient, trained_elsewhere
from paper_transcription import Federated, Weights, average, total_push, weights_of
from plain_rounds import add, compare, minus, shares, weighted, zeros
from test_against_transcription import Case, every_case, with_settings
from test_quadratics import HALF, away, end, fixed_point, world
from torch import nn

from fedgg.algorithms import FedAvg, FedCM, FedDyn, FedSAM, FedSpeed, MoFedSAM
from fedgg.check.toy_problems import Quadratics
from fedgg.core.algorithm import Algorithm, Batch
from fedgg.core.local import LocalStart, local_step, open_round
from fedgg.core.optimisers import SGD

RHO, ALPHA = 0.3, 0.3


def fedsam(given: Federated) -> list[Weights]:
    w, history = weights_of(given.module), []
    for round_, cohort in enumerate(given.cohorts):
        local = {c: trained_elsewhere(given, round_, c, w, sharp_gradient(given, c, RHO)) for c in cohort}
        w = average(local, given)
        history.append(w)
    return history


def mofedsam(given: Federated) -> list[Weights]:
    w, history = weights_of(given.module), []
    pace = zeros(w)
    undecayed = replace(given, weight_decay=0.0)  # it is added by hand, inside alpha
    for round_, cohort in enumerate(given.cohorts):

        def mixed(model: nn.Module, pace: Weights = pace) -> None:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                own = parameter.grad + given.weight_decay * parameter.detach()
                parameter.grad = ALPHA * own + (1 - ALPHA) * pace[name]

        local = {}
        for c in cohort:
            local[c] = trained_elsewhere(undecayed, round_, c, w, sharp_gradient(given, c, RHO), mixed)
        share = shares(given, list(cohort))
        reach = {c: given.lr_at(round_) * total_push(len(given.batches(round_, c)), given.momentum) for c in cohort}
        pace = weighted({c: minus(w, local[c]) for c in cohort}, {c: share[c] / reach[c] for c in cohort})
        w = weighted(local, share)
        history.append(w)
    return history


def fedspeed(given: Federated) -> list[Weights]:
    """With the correction as a gradient, as the paper keeps it; the mean over all clients, by their examples."""
    w, history = weights_of(given.module), []
    everybody = list(range(len(given.clients)))
    corrections = {client: zeros(w) for client in everybody}
    for round_, cohort in enumerate(given.cohorts):
        local = {}
        for c in cohort:

            def corrected(model: nn.Module, correction: Weights = corrections[c], anchor: Weights = w) -> None:
                for name, parameter in model.named_parameters():
                    add(name, parameter, ALPHA * (parameter.detach() - anchor[name]) - correction[name])

            local[c] = trained_elsewhere(given, round_, c, w, sharp_gradient(given, c, RHO), corrected)
        for c in cohort:
            moved = minus(local[c], w)
            corrections[c] = {name: corrections[c][name] - ALPHA * moved[name] for name in w}
        mean = weighted(corrections, shares(given, everybody))
        middle = average(local, given)
        w = {name: middle[name] - mean[name] / ALPHA for name in w}
        history.append(w)
    return history


@every_case
def test_fedsam_as_transcribed(case: Case) -> None:
    compare("fedsam", with_settings(rho=RHO), case, fedsam)


@every_case
def test_mofedsam_as_transcribed(case: Case) -> None:
    compare("mofedsam", with_settings(rho=RHO, alpha=ALPHA), case, mofedsam)


@every_case
def test_fedspeed_as_transcribed(case: Case) -> None:
    compare("fedspeed", with_settings(rho=RHO, alpha=ALPHA), case, fedspeed)


def test_a_step_by_hand() -> None:
    """On w^2 / 2 at w = 2 with rho 0.5 the second gradient is 2.5; a step of 0.1 ends at 1.75."""
    one = torch.ones(1, 1).double()
    net = Quadratics((one,), (0 * one[0],)).net()
    start = LocalStart(2 * one, {}, {}, {}, one, one, one, [])
    sgd = SGD.of(0.1, 0.0, 0.0, one)
    running, client = open_round(FedSAM(rho=0.5), net, sgd, start)
    after = local_step(FedSAM(rho=0.5), sgd, running, client, Batch(one[None], 0 * one, one))
    assert float(after.w) == pytest.approx(2 - 0.1 * 2.5)
    assert float(after.loss_sum) == pytest.approx(2.0)  # the loss at w itself


@pytest.mark.parametrize(
    ("sharp", "plain"),
    [(FedSAM(rho=0.0), FedAvg()), (MoFedSAM(rho=0.0), FedCM()), (FedSpeed(rho=0.0, alpha=0.2), FedDyn(alpha=0.2))],
    ids=str,
)
def test_without_a_displacement_it_is_its_neighbour(sharp: Algorithm, plain: Algorithm) -> None:
    """To rounding: the neighbour's step is fused."""
    for momentum in (0.0, 0.9):
        ends = end(sharp, momentum, HALF, 30), end(plain, momentum, HALF, 30)
        torch.testing.assert_close(*ends, rtol=0, atol=1e-13)


def test_it_rests_near_fedavg() -> None:
    near, far = (away(end(FedSAM(rho=rho), steps=120), fixed_point()) for rho in (0.01, 0.1))
    assert 0 < near < 0.01
    assert near < 0.2 * far


def test_fedspeed_is_nearer_the_optimum_than_fedsam() -> None:
    goal = world().optimum()
    fedspeed_end = end(FedSpeed(rho=0.001, alpha=1.0), steps=100)
    assert away(fedspeed_end, goal) < 0.1 * away(end(FedSAM(rho=0.001), steps=100), goal)
