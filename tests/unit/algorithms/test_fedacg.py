"""FedACG against a plain transcription, what travels, and where it rests."""

from __future__ import annotations

import pytest
import torch
from paper_transcription import Federated, Weights, average, weights_of
from plain_rounds import add, compare, minus, trained, zeros
from test_against_transcription import Case, every_case, with_settings
from test_quadratics import HALF, away, end, fixed_point
from torch import nn

from fedgg.algorithms import FedACG, FedAvg
from fedgg.core.algorithm import Server
from fedgg.engines import Loop
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin, next_job
from fedgg.lab.runner import play_round

LOOK_AHEAD, MU = 0.6, 0.4


def fedacg(given: Federated) -> list[Weights]:
    w, history = weights_of(given.module), []
    m = zeros(w)
    for round_, cohort in enumerate(given.cohorts):
        sent = {name: w[name] + LOOK_AHEAD * m[name] for name in w}

        def proximal(model: nn.Module, sent: Weights = sent) -> None:
            for name, parameter in model.named_parameters():
                add(name, parameter, MU * (parameter.detach() - sent[name]))

        mean = average({c: trained(given, round_, c, sent, proximal) for c in cohort}, given)
        change = minus(mean, sent)
        m = {name: LOOK_AHEAD * m[name] + change[name] for name in w}
        w = {name: w[name] + m[name] for name in w}
        history.append(w)
    return history


@every_case
def test_as_transcribed(case: Case) -> None:
    compare("fedacg", with_settings(momentum=LOOK_AHEAD, mu=MU), case, fedacg)


def test_by_hand() -> None:
    """From w = 1 with m = 2, clients start at 2 and come back at 3 and 7, by 3/4 and 1/4: their mean is the model."""
    kind, w, server = FedACG(momentum=0.5), torch.ones(1, 1), Server({"velocity": torch.full((1, 1), 2.0)}, 2, 1.0, 0)
    assert kind.broadcast(w, server).tolist() == [[2.0]]
    up, share = {"delta": torch.tensor([[1.0], [5.0]])}, torch.tensor([[0.75], [0.25]])
    new, memory = kind.aggregate(w, up, share, server)
    assert new.tolist() == [[0.75 * 3 + 0.25 * 7]]
    assert memory["velocity"].tolist() == [[3.0]]


def test_the_model_that_travels_is_ahead_of_the_one_that_is_evaluated() -> None:
    settings = {"split": {"clients": 3, "beta": 1.0}, "model": {"name": "linear"}, "rounds": 3}
    federation = build(Experiment(**settings, algorithm={"name": "fedacg"}))
    state = begin(federation)
    assert torch.equal(next_job(federation, state).w, state.server.w)
    state, record = play_round(federation, state, Loop())
    job = next_job(federation, state)
    torch.testing.assert_close(job.w, state.server.w + 0.85 * state.server.memory["velocity"])
    assert not torch.equal(job.w, state.server.w)
    assert record["bytes_down"] == record["bytes_up"] == 3 * 4 * state.server.w.numel()  # FedAvg's


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_it_rests_where_fedprox_does(momentum: float) -> None:
    assert away(end(FedACG(0.5, mu=1.0), momentum, steps=150), fixed_point(momentum, mu=1.0)) < 1e-5


def test_neutral_is_fedavg_bit_for_bit() -> None:
    for momentum in (0.0, 0.9):
        assert torch.equal(end(FedACG().neutral(), momentum, HALF, 50), end(FedAvg(), momentum, HALF, 50))
