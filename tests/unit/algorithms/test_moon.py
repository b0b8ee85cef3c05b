"""MOON by hand, against a transcription of its paper, where all clients agree, and with models it cannot take."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import neighbours_transcription as paper
import numpy as np
import pytest
import torch
from plain_rounds import compare
from test_against_transcription import Case, every_case, with_settings
from torch import Tensor, nn

from fedgg.algorithms import MOON, FedAvg
from fedgg.core.algorithm import Algorithm, Batch
from fedgg.core.local import LocalStart, open_round
from fedgg.core.model import Net, head_of
from fedgg.core.optimisers import SGD
from fedgg.engines import Engine, Loop, Stacked, Workers
from fedgg.engines.flops import CountedProducts
from fedgg.errors import UserError
from fedgg.lab.build import Federation, build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin
from fedgg.lab.runner import play_round

STRONG = {"mu": 3.0, "temperature": 0.4}


@every_case
def test_as_transcribed(case: Case) -> None:
    compare("moon", with_settings(**STRONG), case, lambda given: paper.moon(STRONG, given))


def test_the_first_round_is_fedavg_bit_for_bit() -> None:
    """The previous model is the one received: the contrast is log 2 for everybody, and has no gradient at all."""
    experiment = Experiment(rounds=1, split={"clients": 4}, model={"name": "mlp", "hidden": 8})
    ends = [played(build(experiment.changed({"algorithm.name": name})), 1) for name in ("moon", "fedavg")]
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1]["train_loss"] == pytest.approx(ends[1][1]["train_loss"] + math.log(2), rel=1e-6)


def played(federation: Federation, rounds: int, engine: Engine | None = None) -> tuple[Tensor, dict[str, Any]]:
    state, record = begin(federation), dict[str, Any]()
    for _ in range(rounds):
        state, record = play_round(federation, state, engine or Loop())
    return state.server.w, record


def test_the_contrast_by_hand() -> None:
    """z = W x with W = 1, received diag(1, 0), previous diag(0, 1) and x = (3, 4): cosines 0.6 and 0.8."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    net = Net(module)
    net.head = head_of(net, torch.ones(2, 2).double())
    w, received, previous = (torch.tensor([[*first, 0.0, 0.0, 0.0, 0.0]]).double() for first in IDENTITY_AND_HALVES)
    one = torch.ones(1, 1).double()
    start = LocalStart(received, {}, {"previous": previous}, {}, one, one, one, [])
    kind = MOON(mu=2.0, temperature=0.5)
    _, client = open_round(kind, net, SGD.of(0.1, 0.0, 0.0, w), start)
    batch = Batch(torch.tensor([[[3.0, 4.0], [9.0, 9.0]]]).double(), torch.zeros(1, 2).long(), torch.tensor([[1.0, 0]]))
    expected = math.log(2) - 2 * math.log(math.exp(1.2) / (math.exp(1.2) + math.exp(1.6)))
    assert float(kind.loss(w, batch, client)) == pytest.approx(expected, abs=1e-12)  # outputs are zero: log 2


IDENTITY_AND_HALVES = ([1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("cohort", "momentum"),
    [(2, 0.9), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 0.0), (4, 0.9), (2, 0.0)))],
)
def test_where_clients_agree_training_ends_at_the_common_optimum(momentum: float, cohort: int) -> None:
    """There the previous and the global model are one, and no contrast is left."""
    assert excess_loss(momentum, cohort, mu=0.1, rounds=60) < 1e-9


def test_a_strong_contrast_drives_clients_apart_that_agree() -> None:
    """Fleeing one's own last model overshoots: what was rounding grows until the loss holds it."""
    assert 1e-5 < excess_loss(0.0, 4, mu=1.0, rounds=60) < 1e-2


def excess_loss(momentum: float, cohort: int, mu: float, rounds: int) -> float:
    """Beyond the least there is, where all clients have the same examples and the model is a logistic regression."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(30, 3)), random.integers(0, 2, 30)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    experiment = Experiment(
        seed=1,
        split={"clients": 4, "scheme": "iid"},
        data={"normalise": "none"},
        local={"epochs": 4, "batch": 30, "lr": 0.5 if momentum == 0 else 0.1, "momentum": momentum},
        server={"cohort": cohort},
        engine={"precision": "fp64"},
        algorithm={"name": "moon", "mu": mu},
    )
    federation = build(experiment, model=module, data=(np.tile(x, (4, 1)), np.tile(y, 4), x, y))
    same = replace(federation.feed, clients=tuple(np.arange(30) for _ in range(4)))
    _, record = played(replace(federation, feed=same), rounds)
    return float(record["test_loss"]) - least_loss(x, y)


def least_loss(x: np.ndarray, y: np.ndarray) -> float:
    """Of a logistic regression, by Newton's method."""
    inputs, labels = np.c_[x, np.ones(len(x))], y.astype(float)
    w = np.zeros(4)
    for _ in range(50):
        p = 1 / (1 + np.exp(-inputs @ w))
        w -= np.linalg.solve(inputs.T @ (inputs * (p * (1 - p))[:, None]), inputs.T @ (p - labels))
    p = 1 / (1 + np.exp(-inputs @ w))
    return float(-np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p)))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 10))


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


class Branches(nn.Module):
    """Not a sequence, with a layer defined after the one that makes the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 10)
        self.body = nn.Linear(64, 12)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.body(x.flatten(1))))
        return outputs


@pytest.mark.parametrize("model", [with_dropout, with_statistics, Branches])
def test_engines_agree_on_models_with_dropout_statistics_and_branches(model: Any) -> None:
    experiment = Experiment(
        split={"clients": 5, "beta": 0.3},
        local={"epochs": 1, "batch": 30, "lr": 0.05},
        server={"cohort": 3},
        engine={"precision": "fp64"},
        algorithm={"name": "moon", "mu": 5.0},
    )
    loop, _ = played(build(experiment, model=model), 4)
    stacked, _ = played(build(experiment, model=model), 4, Stacked("fp64"))
    torch.testing.assert_close(stacked, loop, rtol=0, atol=1e-10)
    with Workers(2) as workers:
        assert torch.equal(played(build(experiment, model=model), 4, workers)[0], loop)


class Softmax(nn.Module):
    """Its outputs come out of no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.body(x.flatten(1)))).log_softmax(1)  # type: ignore[no-any-return]


def test_models_without_a_representation_are_refused_by_name() -> None:
    moon = Experiment(algorithm={"name": "moon"})
    with pytest.raises(UserError, match=r"Softmax offers no representation.*nn\.Linear"):
        build(moon, model=Softmax)
    with pytest.raises(UserError, match=r"sees the inputs themselves.*hidden layer"):
        build(moon.changed({"model.name": "linear"}))
    build(moon.changed({"model.name": "linear", "algorithm.name": "fedavg"}))


def test_the_projection_head_belongs_to_the_model() -> None:
    experiment = Experiment(model={"name": "mlp", "hidden": 8, "projection": 6}, algorithm={"name": "moon"})
    federation = build(experiment)
    assert [tuple(shape) for shape in federation.net.layout.shapes[::2]] == [(8, 64), (8, 8), (6, 8), (10, 6)]
    assert federation.net.head == "6"
    with pytest.raises(UserError, match="projection = -1"):
        build(experiment.changed({"model.projection": -1}))


def test_nothing_more_travels_and_the_arithmetic_is_said() -> None:
    records = {}
    for name in ("fedavg", "moon"):
        federation = build(
            Experiment(split={"clients": 4}, model={"name": "mlp", "hidden": 8}, algorithm={"name": name})
        )
        assert any("1.67 times FedAvg's arithmetic" in notice for notice in federation.notices) == (name == "moon")
        _, records[name] = played(federation, 1)
    for way in ("bytes_up", "bytes_down"):
        assert records["moon"][way] == records["fedavg"][way]


def test_a_step_makes_the_forward_passes_it_says() -> None:
    federation = build(Experiment(split={"clients": 2}, model={"name": "mlp", "hidden": 8}, algorithm={"name": "moon"}))
    x, y = next(iter(federation.feed.client_chunks(0)))
    w, one = federation.net.start, torch.ones(1, 1)
    batch = Batch(x[None], y[None], torch.ones(1, len(y)))

    def products(kind: Algorithm) -> int:
        start = LocalStart(w, {}, {"previous": w}, {}, one, one, one, [])
        _, client = open_round(kind, federation.net, SGD.of(0.1, 0.0, 0.0, w), start)
        with CountedProducts() as counted:
            kind.loss(w, batch, client)
        return int(counted.multiply_adds)

    assert products(MOON()) == (1 + MOON.step_passes) * products(FedAvg())
