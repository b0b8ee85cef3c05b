"""FedAdam, FedYogi and FedAdagrad against a plain transcription, by hand, and where they come to rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paper_transcription import Federated, Weights, average, weights_of
from plain_rounds import compare, trained, zeros
from test_against_transcription import Case, every_case, with_settings
from test_quadratics import ZERO_SLOWLY, away, end, fixed_point

from fedgg.algorithms import FedAdagrad, FedAdam, FedYogi
from fedgg.core.algorithm import Algorithm, Server

KINDS: dict[str, dict[str, float]] = {
    "fedadam": {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 0.01},
    "fedyogi": {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 0.01},
    "fedadagrad": {"server_lr": 0.05, "beta1": 0.3, "tau": 0.01},
}


def fedopt(kind: str, s: dict[str, float], given: Federated) -> list[Weights]:
    """Number by number, as Algorithm 2 prints it."""
    w, history = weights_of(given.module), []
    m, v = zeros(w), {name: torch.full_like(value, s["tau"] ** 2) for name, value in w.items()}
    for round_, cohort in enumerate(given.cohorts):
        mean = average({c: trained(given, round_, c, w) for c in cohort}, given)
        w = {name: value.clone() for name, value in w.items()}
        for name in w:
            for i in range(w[name].numel()):
                x, old = w[name].view(-1), float(v[name].view(-1)[i])
                delta = float(mean[name].reshape(-1)[i] - x[i])
                if kind == "fedadagrad":
                    new = old + delta**2
                elif kind == "fedadam":
                    new = s["beta2"] * old + (1 - s["beta2"]) * delta**2
                else:
                    side = (old > delta**2) - (old < delta**2)
                    new = old - (1 - s["beta2"]) * delta**2 * side
                remembered = s["beta1"] * float(m[name].view(-1)[i]) + (1 - s["beta1"]) * delta
                m[name].view(-1)[i], v[name].view(-1)[i] = remembered, new
                x[i] += s["server_lr"] * remembered / (new**0.5 + s["tau"])
        history.append(w)
    return history


@every_case
@pytest.mark.parametrize("kind", KINDS)
def test_as_transcribed(kind: str, case: Case) -> None:
    compare(kind, with_settings(**KINDS[kind]), case, lambda given: fedopt(kind, KINDS[kind], given))


HALVES: dict[str, Any] = {"server_lr": 1.0, "beta1": 0.5, "tau": 1.0}
FROM_TWO = [  # v = 1 and delta = 2: what the first step is, m being 1
    (FedAdagrad(**HALVES), 1 / (5**0.5 + 1)),
    (FedAdam(**HALVES, beta2=0.75), 1 / (1.75**0.5 + 1)),
    (FedYogi(**HALVES, beta2=0.75), 1 / (2**0.5 + 1)),
]


@pytest.mark.parametrize(("algorithm", "step"), FROM_TWO)
def test_the_first_step_by_hand(algorithm: Algorithm, step: float) -> None:
    """Updates of 1 and 5 at shares 3/4 and 1/4 make a delta of 2; there is no bias correction."""
    w = torch.zeros(1, 1).double()
    up, share = {"delta": torch.tensor([[1.0], [5.0]]).double()}, torch.tensor([[0.75], [0.25]]).double()
    new, memory = algorithm.aggregate(w, up, share, Server(algorithm.server_memory(w), 2, 1.0, 0))
    assert float(new) == pytest.approx(step, rel=1e-15)
    assert float(memory["momentum"]) == 1


def test_squares_of_yogi_shrink_no_faster_than_they_grow() -> None:
    """From v = 1 with delta = 1/2: Adam forgets a quarter of v and adds a sixteenth, Yogi takes a sixteenth away."""
    w, up, share = torch.zeros(1, 1), {"delta": torch.tensor([[0.5]])}, torch.ones(1, 1)
    for kind, left in ((FedAdam, 0.75 + 0.25 * 0.25), (FedYogi, 1 - 0.25 * 0.25)):
        algorithm = kind(**HALVES, beta2=0.75)
        _, memory = algorithm.aggregate(w, up, share, Server(algorithm.server_memory(w), 1, 1.0, 0))
        assert float(memory["squares"]) == left


@pytest.mark.parametrize("momentum", [ZERO_SLOWLY, 0.9])
@pytest.mark.parametrize(
    "algorithm",
    [FedAdam(server_lr=0.05, beta1=0.5), FedYogi(server_lr=0.05, beta1=0.5), FedAdagrad(server_lr=0.5)],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_they_rest_where_fedavg_rests(algorithm: Algorithm, momentum: float) -> None:
    assert away(end(algorithm, momentum, steps=100), fixed_point(momentum)) < 0.02
