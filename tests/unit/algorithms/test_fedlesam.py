"""FedLESAM against a plain transcription in both directions, its first rounds, and beside FedGG's direction."""

from __future__ import annotations

import pytest
import torch
from moved_gradients import along, gradient_at, trained_elsewhere
from paper_transcription import Federated, Weights, average, weights_of
from plain_rounds import compare, minus, zeros
from test_against_transcription import PARTIAL, Case, by_library, by_paper, distance, every_case, with_settings
from torch import Tensor, nn

from fedgg.algorithms import FedGG, FedLESAM
from fedgg.core.local import LocalStart, open_round
from fedgg.core.model import Net
from fedgg.core.optimisers import SGD
from fedgg.engines import Fused
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin
from fedgg.lab.runner import play_round

RHO = 0.4


def fedlesam(direction: str, given: Federated) -> list[Weights]:
    w, history = weights_of(given.module), []
    received: dict[int, Weights] = {}
    update = zeros(w)
    for round_, cohort in enumerate(given.cohorts):
        local = {}
        for c in cohort:
            back = minus(received.get(c, w), w) if direction == "received" else minus(zeros(w), update)

            def gradient(
                weights: Weights, number: int, batch: Tensor, client: int = c, back: Weights = back
            ) -> Weights:
                return gradient_at(along(weights, back, RHO), given, client, batch)

            local[c] = trained_elsewhere(given, round_, c, w, gradient)
            received[c] = w
        new = average(local, given)
        update, w = minus(new, w), new
        history.append(w)
    return history


@every_case
@pytest.mark.parametrize("direction", ["received", "sent"])
def test_as_transcribed(direction: str, case: Case) -> None:
    compare("fedlesam", with_settings(rho=RHO, direction=direction), case, lambda given: fedlesam(direction, given))


def test_the_first_round_is_fedavg() -> None:
    found = by_library("fedlesam", with_settings(rho=RHO), PARTIAL)
    gaps = distance(found, by_paper("fedavg", (), PARTIAL))
    assert gaps[0] < 1e-10
    assert gaps[-1] > 1e-4


def test_it_looks_back_along_the_direction_of_fedgg() -> None:
    """The client state of both is the model received; the displacement is against FedGG's direction."""
    w, received = torch.tensor([[3.0, 4.0, 1.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    one = torch.ones(1, 1)
    start = LocalStart(w, {}, {"received": received}, {}, one, one, one, [])
    net, sgd = Net(nn.Linear(3, 1, bias=False)), SGD.of(0.1, 0.0, 0.0, w)
    notes = [open_round(kind, net, sgd, start)[1].notes for kind in (FedLESAM(), FedGG())]
    assert torch.equal(notes[0]["uphill"], -notes[1]["direction"])


def test_sent_costs_bytes_and_no_client_state() -> None:
    records, states = {}, {}
    for direction in ("received", "sent"):
        experiment = Experiment(split={"clients": 4}, model={"name": "mlp", "hidden": 8})
        federation = build(experiment, algorithm=FedLESAM(direction=direction))
        states[direction], records[direction] = play_round(federation, begin(federation), Fused())
    assert records["sent"]["bytes_down"] == 2 * records["received"]["bytes_down"]
    assert states["sent"].memory == {}
    assert list(states["received"].memory[0]) == ["received"]
