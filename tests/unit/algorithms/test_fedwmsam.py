"""FedWMSAM against a plain transcription, its weight by hand, and its parts switched off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moved_gradients import along, gradient_at, trained_elsewhere
from paper_transcription import Federated, Weights, average, total_push, weights_of
from plain_rounds import compare, minus, shares, weighted, zeros
from test_against_transcription import Case, every_case, with_settings
from test_quadratics import HALF, away, end, world
from torch import Tensor, nn

from fedgg.algorithms import FedAvg, FedCM, FedWMSAM
from fedgg.core.algorithm import Server

RHO, ALPHA, ADAPT = 0.3, 0.3, 0.2


def flattened(weights: Weights) -> Tensor:
    return torch.cat([weights[name].reshape(-1) for name in sorted(weights)])


def fedwmsam(given: Federated) -> list[Weights]:
    """As the docstring has it, with the server's variate as a mean over all clients and one correction each."""
    w, history = weights_of(given.module), []
    everybody = list(range(len(given.clients)))
    momentum, alpha = zeros(w), ALPHA
    variates, common = {client: zeros(w) for client in everybody}, zeros(w)
    undecayed = replace(given, weight_decay=0.0)  # it is added by hand, inside alpha
    for round_, cohort in enumerate(given.cohorts):
        local, share = {}, shares(given, list(cohort))
        for c in cohort:
            personal = {n: momentum[n] + alpha / (1 - alpha) * (common[n] - variates[c][n]) for n in w}

            def gradient(
                weights: Weights,
                number: int,
                batch: Tensor,
                client: int = c,
                personal: Weights = personal,
                anchor: Weights = w,
            ) -> Weights:
                ahead = {n: anchor[n] + number * personal[n] - weights[n] for n in weights}
                return gradient_at(along(weights, ahead, RHO), given, client, batch)

            def mixed(model: nn.Module, personal: Weights = personal, alpha: float = alpha) -> None:
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    own = parameter.grad + given.weight_decay * parameter.detach()
                    parameter.grad = alpha * own + (1 - alpha) * personal[name]

            local[c] = trained_elsewhere(undecayed, round_, c, w, gradient, mixed)
        reach = {c: given.lr_at(round_) * total_push(len(given.batches(round_, c)), given.momentum) for c in cohort}
        as_gradients = {c: {n: (w[n] - local[c][n]) / reach[c] for n in w} for c in cohort}
        cosines = {}
        for c in cohort:
            moved, old = flattened(minus(local[c], w)), flattened(momentum)
            cosines[c] = 1 + float(moved @ old / (moved.norm() * old.norm())) if float(old.norm()) > 0 else 0.0
        changes = {c: zeros(w) for c in everybody}
        for c in cohort:
            changes[c] = {n: as_gradients[c][n] - common[n] for n in w}
            variates[c] = {n: variates[c][n] + changes[c][n] for n in w}
        mean_change = weighted(changes, shares(given, everybody))
        common = {n: common[n] + mean_change[n] for n in w}
        momentum = weighted(as_gradients, share)
        disagreement = sum(share[c] * cosines[c] for c in cohort)
        alpha = (1 - ADAPT) * alpha + ADAPT * min(0.9, max(0.1, disagreement))
        w = average(local, given)
        history.append(w)
    return history


@every_case
def test_as_transcribed(case: Case) -> None:
    compare("fedwmsam", with_settings(rho=RHO, alpha=ALPHA, adapt=ADAPT), case, fedwmsam)


@pytest.mark.parametrize(
    ("momentum", "deltas", "expected"),
    [
        ([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], 0.1),  # the first round: no momentum, the least value
        ([2.0, 0.0], [[-1.0, 0.0], [-3.0, 0.0]], 0.1),  # updates follow the momentum, a gradient: cosines of -1
        ([2.0, 0.0], [[1.0, 0.0], [3.0, 0.0]], 0.9),  # against it: 2, cut to the largest value
        ([2.0, 0.0], [[-1.0, 0.0], [0.0, 1.0]], 0.25),  # 0.75 times 0 and 0.25 times 1
    ],
)
def test_the_weight_moves_towards_the_disagreement(
    momentum: list[float], deltas: list[list[float]], expected: float
) -> None:
    kind, w = FedWMSAM(alpha=0.5, adapt=1.0), torch.zeros(1, 2)
    memory = kind.server_memory(w) | {"momentum": torch.tensor([momentum])}
    up = {"delta": torch.tensor(deltas), "reach": torch.ones(2, 1)}
    share = torch.tensor([[0.75], [0.25]])
    _, after = kind.aggregate(w, up, share, Server(memory, 4, 0.5, 1))
    assert float(after["alpha"]) == pytest.approx(expected)
    torch.testing.assert_close(after["momentum"], -(share * up["delta"]).sum(0, keepdim=True))
    torch.testing.assert_close(after["variate"], 0.5 * after["momentum"])


def test_without_displacement_correction_and_adaptation_it_is_fedcm() -> None:
    plain = FedWMSAM(rho=0.0, alpha=0.4, adapt=0.0, correction=0.0)
    for momentum in (0.0, 0.9):
        ends = end(plain, momentum, HALF, 30), end(FedCM(alpha=0.4), momentum, HALF, 30)
        torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-13)


def test_neutral_is_fedavg_bit_for_bit() -> None:
    for momentum in (0.0, 0.9):
        assert torch.equal(end(FedWMSAM().neutral(), momentum, HALF, 30), end(FedAvg(), momentum, HALF, 30))


def test_it_rests_near_the_optimum() -> None:
    assert away(end(FedWMSAM(rho=0.01), steps=300), world().optimum()) < 0.03
