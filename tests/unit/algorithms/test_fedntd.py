"""FedNTD and FedLC against plain transcriptions of their losses, by hand, and with tasks they cannot take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paper_transcription import Federated, Weights, average, model_with, weights_of
from plain_rounds import compare
from test_against_transcription import Case, every_case, with_settings
from torch import Tensor, nn

from fedgg.algorithms import FedLC, FedNTD
from fedgg.core.algorithm import Batch
from fedgg.core.evaluation import Probe
from fedgg.core.local import LocalStart, open_round
from fedgg.core.model import Net
from fedgg.core.optimisers import SGD
from fedgg.engines import Loop, Stacked
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin
from fedgg.lab.runner import play_round

BETA, TAU = 2.0, 1.7


def fedntd(given: Federated) -> list[Weights]:
    """Example by example, with probabilities and logarithms as the paper writes them."""
    w, history = weights_of(given.module), []
    for round_, cohort in enumerate(given.cohorts):
        local = {}
        for c in cohort:
            model, received = model_with(w, given.module), model_with(w, given.module)
            optimiser = given.optimiser(model, round_)
            x, y = given.clients[c]
            for batch in given.batches(round_, c):
                optimiser.zero_grad()
                outputs, kept = model(x[batch]), received(x[batch]).detach()
                divergences = []
                for own, before, label in zip(outputs, kept, y[batch], strict=True):
                    others = [number for number in range(len(own)) if number != int(label)]
                    p = torch.softmax(before[others] / TAU, 0)
                    q = torch.softmax(own[others] / TAU, 0)
                    divergences.append((p * torch.log(p / q)).sum())
                distillation = TAU**2 * torch.stack(divergences).mean()
                torch.autograd.backward(F.cross_entropy(outputs, y[batch]) + BETA * distillation)
                optimiser.step()
            local[c] = weights_of(model)
        w = average(local, given)
        history.append(w)
    return history


def fedlc(given: Federated) -> list[Weights]:
    w, history = weights_of(given.module), []
    for round_, cohort in enumerate(given.cohorts):
        local = {}
        for c in cohort:
            model = model_with(w, given.module)
            optimiser = given.optimiser(model, round_)
            x, y = given.clients[c]
            for batch in given.batches(round_, c):
                optimiser.zero_grad()
                outputs = model(x[batch])
                losses = []
                for own, label in zip(outputs, y[batch], strict=True):
                    counts = [max(int((y == number).sum()), 1e-8) for number in range(len(own))]
                    lowered = torch.stack([o - 0.5 * n**-0.25 for o, n in zip(own, counts, strict=True)])
                    losses.append(-torch.log(torch.exp(lowered[label]) / torch.exp(lowered).sum()))
                torch.autograd.backward(torch.stack(losses).mean())
                optimiser.step()
            local[c] = weights_of(model)
        w = average(local, given)
        history.append(w)
    return history


@every_case
def test_fedntd_as_transcribed(case: Case) -> None:
    compare("fedntd", with_settings(beta=BETA, tau=TAU), case, fedntd)


@every_case
def test_fedlc_as_transcribed(case: Case) -> None:
    compare("fedlc", with_settings(tau=0.5), case, fedlc)


def opened(kind: Any, w: Tensor, labels: list[int]) -> tuple[Any, Batch]:
    """A model of three outputs, which are its inputs times w, one client with these labels, and a batch of one."""
    net = Net(nn.Linear(1, 3, bias=False).double())
    one = torch.ones(1, 1).double()
    examples = [(torch.ones(len(labels), 1).double(), torch.tensor(labels))]
    start = LocalStart(w, {}, {}, {}, one, one, one, [], probe=Probe(net, {}, lambda row: examples))
    _, client = open_round(kind, net, SGD.of(0.1, 0.0, 0.0, w), start)
    return client, Batch(one[None], torch.tensor([[0]]), one)


def test_the_distillation_by_hand() -> None:
    """Received: equal outputs for the other classes, 1/2 each; now 0 and log 3, so 1/4 and 3/4."""
    received, w = torch.zeros(1, 3).double(), torch.tensor([[5.0, 0.0, math.log(3)]], dtype=torch.float64)
    kind = FedNTD(beta=2.0)
    client, batch = opened(kind, received, [0])
    supervised = math.log(math.exp(5.0) + 1 + 3) - 5.0
    divergence = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert float(kind.loss(w, batch, client)) == pytest.approx(supervised + 2 * divergence, abs=1e-12)


def test_the_margins_by_hand() -> None:
    """16 examples of class 0 and one of class 1: margins of 1/2 and 1; class 2 is left out."""
    w = torch.zeros(1, 3).double()
    kind = FedLC(tau=1.0)
    client, batch = opened(kind, w, [0] * 16 + [1])
    expected = math.log(math.exp(-0.5) + math.exp(-1.0)) + 0.5
    assert float(kind.loss(w, batch, client)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["fedntd", "fedlc"])
def test_tasks_without_classes_are_refused_by_name(name: str) -> None:
    split = {"scheme": "iid", "clients": 2}
    experiment = Experiment(task={"name": "regression"}, split=split, local={"batch": 8}, algorithm={"name": name})
    x = torch.randn(40, 3).numpy()
    with pytest.raises(UserError, match=r"needs a class for each example, and the task regression has none"):
        build(experiment, model=nn.Linear(3, 1), data=(x, x[:, 0], x, x[:, 0]))


@pytest.mark.parametrize("name", ["fedntd", "fedlc"])
def test_clients_with_held_out_examples_in_a_stack(name: str) -> None:
    experiment = Experiment(
        data={"holdout": 0.3},
        split={"clients": 5, "beta": 0.2},
        model={"name": "mlp", "hidden": 8},
        engine={"precision": "fp64"},
        algorithm={"name": name},
    )
    ends = []
    for engine in (Loop(), Stacked("fp64")):
        federation = build(experiment)
        state = begin(federation)
        for _ in range(2):
            state, _ = play_round(federation, state, engine)
        ends.append(state.server.w)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-10)


def test_labels_are_counted_on_the_training_examples_alone() -> None:
    federation = build(Experiment(data={"holdout": 0.3}, split={"clients": 4, "beta": 0.3}))
    probe = Probe(federation.net, {}, federation.feed.client_chunks)
    counts = probe.class_counts(federation.net.start.expand(4, -1))
    assert counts.shape == (4, 10)
    assert counts.sum(1).tolist() == [len(own) for own in federation.feed.clients]
