"""FedCM against a plain transcription, with weight decay as part of the client's gradient, and where it rests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paper_transcription import Federated, Weights, total_push, weights_of
from plain_rounds import compare, minus, shares, trained, weighted, zeros
from test_against_transcription import Case, every_case, with_settings
from test_quadratics import HALF, away, end, fixed_point, world
from torch import nn

from fedgg.algorithms import FedAvg, FedCM

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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_rests_where_a_slower_fedavg_does(momentum: float) -> None:
    w = end(FedCM(alpha=0.5), momentum, steps=500)
    assert away(w, fixed_point(momentum, slower=0.5)) < 1e-5
    assert away(w, world().optimum()) < 0.7 * away(fixed_point(momentum), world().optimum())


def test_half_of_the_clients_at_the_default_stay_near() -> None:
    assert away(end(FedCM(), 0.9, HALF, steps=400), world().optimum()) < 0.5


def test_neutral_is_fedavg_bit_for_bit() -> None:
    for momentum in (0.0, 0.9):
        assert torch.equal(end(FedCM().neutral(), momentum, HALF, 50), end(FedAvg(), momentum, HALF, 50))
