"""GHBM and FedHBM against plain transcriptions, and how far their momentum carries a client."""

from __future__ import annotations

import pytest
import torch
from paper_transcription import Federated, Weights, average, total_push, weights_of
from plain_rounds import add, compare, minus, trained
from test_against_transcription import PARTIAL, Case, by_library, by_paper, distance, every_case, with_settings
from test_quadratics import HALF, away, end, fixed_point
from torch import nn

from fedgg.algorithms import GHBM, FedAvg, FedAvgM, FedHBM
from fedgg.core.algorithm import Algorithm, Server
from fedgg.errors import UserError

BETA, TAU = 0.7, 2


def ghbm(given: Federated) -> list[Weights]:
    """With all models ever sent at hand."""
    models = [weights_of(given.module)]
    for round_, cohort in enumerate(given.cohorts):
        w, local = models[-1], {}
        mean = {n: (w[n] - models[-1 - TAU][n]) / TAU if round_ >= TAU else 0 * w[n] for n in w}
        for c in cohort:
            steps = total_push(len(given.batches(round_, c)), given.momentum)

            def pushed(model: nn.Module, mean: Weights = mean, reach: float = given.lr_at(round_) * steps) -> None:
                for name, parameter in model.named_parameters():
                    add(name, parameter, -BETA / reach * mean[name])

            local[c] = trained(given, round_, c, w, pushed)
        models.append(average(local, given))
    return models[1:]


def fedhbm(given: Federated) -> list[Weights]:
    w, history = weights_of(given.module), []
    last: dict[int, Weights] = {}
    for round_, cohort in enumerate(given.cohorts):
        local = {}
        for c in cohort:
            steps = total_push(len(given.batches(round_, c)), given.momentum)

            def pushed(model: nn.Module, own: int = c, reach: float = given.lr_at(round_) * steps) -> None:
                for name, parameter in model.named_parameters():
                    if own in last:
                        add(name, parameter, -BETA / (TAU * reach) * (parameter.detach() - last[own][name]))

            local[c] = trained(given, round_, c, w, pushed)
        last.update(local)
        w = average(local, given)
        history.append(w)
    return history


@every_case
def test_ghbm_as_transcribed(case: Case) -> None:
    compare("ghbm", with_settings(beta=BETA, tau=TAU), case, ghbm)


@every_case
def test_fedhbm_as_transcribed(case: Case) -> None:
    compare("fedhbm", with_settings(beta=BETA, tau=float(TAU)), case, fedhbm)


@pytest.mark.parametrize("tau", [1, 3])
def test_ghbm_is_fedavg_for_tau_rounds(tau: int) -> None:
    gaps = distance(by_library("ghbm", with_settings(tau=tau), PARTIAL), by_paper("fedavg", (), PARTIAL))
    assert max(gaps[:tau]) < 1e-10
    assert gaps[tau] > 1e-5


@pytest.mark.parametrize("kind", [GHBM(beta=0.6, tau=2), FedHBM(beta=0.6, tau=2.0)], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_rests_near_fedavg(kind: Algorithm, momentum: float) -> None:
    assert away(end(kind, momentum, steps=120), fixed_point(momentum)) < 0.01


def test_one_round_of_momentum_is_the_servers_on_a_flat_loss() -> None:
    """Whatever the local momentum: a round adds beta times the mean update, as FedAvgM's velocity does."""
    flat = [end(kind, 0.9, HALF, 10) for kind in (GHBM(beta=0.0, tau=1), FedAvgM(momentum=0.0), FedAvg())]
    assert torch.equal(flat[0], flat[2])
    torch.testing.assert_close(flat[1], flat[2])


@pytest.mark.parametrize("kind", [GHBM(), FedHBM()], ids=str)
def test_neutral_is_fedavg_bit_for_bit(kind: Algorithm) -> None:
    neutral = kind.neutral()
    assert neutral is not None
    for momentum in (0.0, 0.9):
        assert torch.equal(end(neutral, momentum, HALF, 30), end(FedAvg(), momentum, HALF, 30))


def test_tau_is_a_whole_number_above_zero() -> None:
    for tau in (0, 2.5):
        with pytest.raises(UserError, match="whole number"):
            GHBM(tau=tau)  # type: ignore[arg-type]


def test_the_server_keeps_the_models_of_the_last_rounds() -> None:
    kind, w = GHBM(tau=3), torch.zeros(1, 1)
    memory = kind.server_memory(w)
    for number in range(5):
        up = {"delta": torch.ones(1, 1)}
        w, memory = kind.aggregate(w, up, torch.ones(1, 1), Server(memory, 1, 1.0, number))
    assert memory["models"].flatten().tolist() == [4.0, 3.0, 2.0]
    assert minus({"w": w}, {"w": memory["models"][:, -1]})["w"].item() == 3.0
