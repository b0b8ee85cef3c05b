"""The library equals an independent transcription of the paper, parameter by parameter, after every round."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
import paper_transcription as paper
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.core import random_choices
from fedgg.engines import Loop
from fedgg.lab.build import Federation, build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin
from fedgg.lab.runner import play_round

TOLERANCE = 1e-10
CLIENTS, BATCH, SEED, CLASSES = 4, 8, 4, 4


@dataclass(frozen=True)
class Case:
    """Everything but the algorithm."""

    model: str = "mlp"
    momentum: float = 0.9
    weight_decay: float = 0.0
    cohort: int | None = 2
    lr_decay: float = 1.0
    rounds: int = 5
    epochs: int = 2
    split: str = "dirichlet"
    proxy: int = 0
    clip_norm: float | None = None


PARTIAL = Case()
FULL = Case(momentum=0.0, weight_decay=0.02, cohort=None, lr_decay=0.9, rounds=4)
CASES = {
    "partial, momentum": PARTIAL,
    "full, no momentum, weight decay, decaying lr": FULL,
    "full, momentum, weight decay": Case(weight_decay=0.05, cohort=None, rounds=4),
    "partial, no momentum": Case(momentum=0.0, rounds=6),
    "cnn, partial, momentum, decaying lr": Case(model="cnn", cohort=3, lr_decay=0.8, rounds=4),
    "one epoch: the smallest client takes one step": Case(cohort=None, rounds=4, epochs=1),
}
# One class to a client; the inputs of class 0 are zero, so its client never moves the first layer while the others do.
BLIND = Case(model="blind", cohort=None, rounds=4, split="shards")
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())

Frozen = tuple[tuple[str, Any], ...]  # an algorithm's settings, to be used as a key


def network(kind: str) -> nn.Module:
    """Two layers each; the CNN's sit in a submodule of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        if kind == "mlp":
            module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        elif kind == "blind":
            module = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, CLASSES))
        else:
            eyes = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            module = nn.Sequential(eyes, nn.Flatten(), nn.Linear(12, CLASSES))
        return module.double()


@cache
def data(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    y = np.arange(90) % CLASSES if kind == "blind" else random.integers(0, CLASSES, 90)
    shape = (2, 4, 4) if kind == "cnn" else (6,)
    x = random.normal(size=(90, *shape)) + random.normal(size=(CLASSES, *shape))[y]
    if kind == "blind":
        x[y == 0] = 0
    return x[:80], y[:80], x[80:], y[80:]


def federation(name: str, settings: Frozen, case: Case) -> Federation:
    experiment = Experiment(
        seed=SEED,
        rounds=case.rounds,
        engine={"precision": "fp64"},
        data={"normalise": "none", "proxy": case.proxy},
        split={"scheme": case.split, "clients": CLIENTS, "beta": 0.5, "min_examples": 3, "shards_per_client": 1},
        local={
            "epochs": case.epochs,
            "batch": BATCH,
            "lr": 0.05,
            "lr_decay": case.lr_decay,
            "momentum": case.momentum,
            "weight_decay": case.weight_decay,
        },
        optimiser={} if case.clip_norm is None else {"clip_norm": case.clip_norm},
        server={"cohort": case.cohort} if case.cohort else {},
        algorithm={"name": name, **dict(settings)},
    )
    return build(experiment, model=network(case.model), data=data(case.model))


def by_library(name: str, settings: Frozen, case: Case) -> list[Tensor]:
    """The global model after each round, flat."""
    built, engine = federation(name, settings, case), Loop()
    state, history = begin(built), []
    for _ in range(case.rounds):
        state, record = play_round(built, state, engine)
        assert record["lost"] == []
        named = built.net.layout.unflatten(state.server.w)
        history.append(flat({key: rows[0] for key, rows in named.items()}))
    return history


@cache
def problem(case: Case) -> paper.Federated:
    """What both are given. Only the split, the cohorts and the order of the examples come from the library."""
    built = federation("fedavg", (), case)
    x, y = torch.from_numpy(data(case.model)[0]), torch.from_numpy(data(case.model)[1])
    owned = [(x[own], y[own]) for own in built.feed.clients]

    def batches(round_: int, client: int) -> list[Tensor]:
        rows = random_choices.schedule(SEED, round_, client, len(owned[client][1]), built.work)
        return [torch.from_numpy(row[row >= 0]) for row in rows]

    return paper.Federated(
        module=network(case.model),
        clients=owned,
        cohorts=[random_choices.cohort(SEED, r, CLIENTS, case.cohort or CLIENTS) for r in range(case.rounds)],
        batches=batches,
        lr=0.05,
        momentum=case.momentum,
        weight_decay=case.weight_decay,
        lr_decay=case.lr_decay,
    )


@cache
def by_paper(name: str, settings: Frozen, case: Case) -> list[Tensor]:
    return [flat(weights) for weights in paper.train(name, dict(settings), problem(case))]


def flat(weights: paper.Weights) -> Tensor:
    return torch.cat([weights[name].reshape(-1) for name in sorted(weights)])


def distance(a: list[Tensor], b: list[Tensor]) -> list[float]:
    """Largest difference of a parameter, round by round."""
    assert len(a) == len(b)
    return [float((one - other).abs().max()) for one, other in zip(a, b, strict=True)]


def agree(name: str, settings: Frozen, case: Case, matters: float = 1e-4) -> None:
    """They agree after each round, on something that is not just FedAvg."""
    found, expected = by_library(name, settings, case), by_paper(name, settings, case)
    assert len(found) == case.rounds >= 4
    assert max(distance(found, expected)) < TOLERANCE
    if name != "fedavg":
        assert distance(expected, by_paper("fedavg", (), case))[-1] > matters


def with_settings(**settings: Any) -> Frozen:
    return tuple(sorted(settings.items()))


# ---------------------------------------------------------------------------------------------------------------------
# What is compared


@every_case
def test_the_problem_is_worth_comparing_on(case: Case) -> None:
    given = problem(case)
    sizes = [given.examples(client) for client in range(CLIENTS)]
    assert sum(sizes) == 80
    assert len(set(sizes)) > 2
    assert min(sizes) < BATCH < max(sizes)
    assert any(size % BATCH for size in sizes if size > BATCH)
    assert {client for cohort in given.cohorts for client in cohort} == set(range(CLIENTS))
    if case.cohort == 2:  # a client returns after rounds without it, and one is met late
        taking = [{r for r, cohort in enumerate(given.cohorts) if c in cohort} for c in range(CLIENTS)]
        assert any(max(rounds) - min(rounds) >= len(rounds) > 1 for rounds in taking)
        assert any(min(rounds) > 0 for rounds in taking)
    moved = by_paper("fedavg", (), case)[-1] - flat(paper.weights_of(network(case.model)))
    assert float(moved.abs().max()) > 0.05


# ---------------------------------------------------------------------------------------------------------------------
# Everyone but FedGG


@every_case
def test_fedavg(case: Case) -> None:
    agree("fedavg", (), case)


@every_case
def test_fedprox(case: Case) -> None:
    agree("fedprox", with_settings(mu=0.7), case)


@every_case
@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_fedavgm(case: Case, server_lr: float) -> None:
    agree("fedavgm", with_settings(momentum=0.5, server_lr=server_lr), case)


@every_case
def test_fedsgd(case: Case) -> None:
    agree("fedsgd", (), case)


@every_case
@pytest.mark.parametrize("variate_mean", ["share", "uniform"])
@pytest.mark.parametrize("correction", ["plain", "exact", "after"])
def test_scaffold(case: Case, correction: str, variate_mean: str) -> None:
    agree("scaffold", with_settings(correction=correction, variate_mean=variate_mean), case)


def test_the_readings_of_scaffold_can_be_told_apart() -> None:
    kinds = [
        with_settings(correction=c, variate_mean=m) for c in ("plain", "exact", "after") for m in ("share", "uniform")
    ]
    for one, other in combinations(kinds, 2):
        assert distance(by_paper("scaffold", one, PARTIAL), by_paper("scaffold", other, PARTIAL))[-1] > 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# FedGG in all its readings


def reading(weight: str, gradient: str, first_step: str, scope: str, direction: str) -> Frozen:
    """Strengths at which the term moves the model about as much as the data do."""
    strength: dict[str, float] = {"mu": 1.0} if weight == "adaptive" else {"lam": 0.02}
    if weight == "fixed" and first_step == "epsilon":
        strength = {"lam": 2e-9}  # 0.2 in the gradient of the first step
    if first_step in ("push", "relative_push"):
        strength["push"] = 0.1 if first_step == "push" else 0.4
    if first_step == "relative_push":
        strength["push_decay"] = 0.8
    return with_settings(
        weight=weight, gradient=gradient, first_step=first_step, scope=scope, direction=direction, **strength
    )


AXES: dict[str, tuple[str, ...]] = {
    "weight": ("adaptive", "fixed"),
    "gradient": ("exact", "printed"),
    "first_step": ("skip", "epsilon", "push", "relative_push"),
    "scope": ("model", "layer"),
    "direction": ("received", "sent"),
}
READINGS = [reading(*choice) for choice in product(*AXES.values())]


def _in_selection(settings: Frozen) -> bool:
    """Sixteen of the 64, in which every two choices meet."""
    weight, gradient, first, scope, direction = (AXES[axis].index(dict(settings)[axis]) for axis in AXES)
    return (weight + gradient + scope + direction) % 2 == 0 and (first + weight + scope) % 2 == 0


SELECTION = [settings for settings in READINGS if _in_selection(settings)]
RECEIVED = [settings for settings in SELECTION if dict(settings)["direction"] == "received"]


def label(settings: Frozen) -> str:
    chosen = dict(settings)
    return "-".join(chosen[axis] for axis in AXES)


@pytest.mark.parametrize("settings", READINGS, ids=label)
def test_fedgg_partial_participation(settings: Frozen) -> None:
    agree("fedgg", settings, PARTIAL)


def test_every_two_choices_meet_in_the_selection() -> None:
    for one, other in combinations(AXES, 2):
        assert {(dict(s)[one], dict(s)[other]) for s in SELECTION} == set(product(AXES[one], AXES[other]))


@pytest.mark.parametrize("settings", SELECTION, ids=label)
def test_fedgg_full_participation_without_momentum(settings: Frozen) -> None:
    agree("fedgg", settings, FULL)


@pytest.mark.parametrize("case", list(CASES.values())[2:], ids=list(CASES)[2:])
@pytest.mark.parametrize("settings", RECEIVED, ids=label)
def test_fedgg_elsewhere(settings: Frozen, case: Case) -> None:
    agree("fedgg", settings, case)


@pytest.mark.parametrize(
    "settings",
    [s for s in READINGS if dict(s)["direction"] == "received" and (dict(s)["scope"] == "layer" or s in SELECTION)],
    ids=label,
)
def test_fedgg_where_a_client_cannot_move_a_layer(settings: Frozen) -> None:
    """u = 0 in that layer at every step, though g is not: nothing is divided by zero."""
    given = problem(BLIND)
    assert [bool((x == 0).all()) for x, _ in given.clients].count(True) == 1
    agree("fedgg", settings, BLIND)


def test_the_readings_of_fedgg_can_be_told_apart() -> None:
    """So that agreeing with one of them means something."""
    for one, other in combinations(READINGS, 2):
        apart = distance(by_paper("fedgg", one, PARTIAL), by_paper("fedgg", other, PARTIAL))[-1]
        first, second = dict(one), dict(other)
        differ = {axis for axis in AXES if first[axis] != second[axis]}
        pair = {first["first_step"], second["first_step"]}
        if differ == {"first_step"} and first["weight"] == "adaptive" and pair == {"skip", "epsilon"}:
            assert apart < TOLERANCE  # the adaptive weight is zero where u is
        elif pair == {"epsilon"} and first["weight"] == second["weight"] == "fixed" and differ == {"gradient"}:
            assert apart > 10 * TOLERANCE  # after the first step so small a weight hardly acts
        else:
            assert apart > 1e-5, (label(one), label(other))


@pytest.mark.parametrize("direction", ["received", "sent"])
def test_fedgg_is_fedavg_in_the_first_round_and_without_its_weight(direction: str) -> None:
    strong = reading("adaptive", "exact", "push", "model", direction)
    assert distance(by_library("fedgg", strong, PARTIAL), by_paper("fedavg", (), PARTIAL))[0] < TOLERANCE
    off = with_settings(weight="adaptive", mu=0.0, first_step="skip", direction=direction)
    assert max(distance(by_library("fedgg", off, PARTIAL), by_paper("fedavg", (), PARTIAL))) < TOLERANCE


def test_sent_and_received_are_one_under_full_participation() -> None:
    a, b = (by_library("fedgg", reading("adaptive", "exact", "skip", "layer", d), FULL) for d in AXES["direction"])
    assert max(distance(a, b)) < TOLERANCE


# ---------------------------------------------------------------------------------------------------------------------
# The transcription itself, on facts that can be had otherwise


def test_autograd_at_u_zero_is_a_push_along_g_over_epsilon() -> None:
    g = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    torch.autograd.backward(1 - F.cosine_similarity(u, g, dim=0))
    assert u.grad is not None
    torch.testing.assert_close(u.grad, -g / g.norm() / 1e-8, rtol=1e-12, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 17])
def test_playing_momentum_through_gives_the_published_a_k(steps: int, momentum: float) -> None:
    published = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    assert paper.total_push(steps, momentum) == pytest.approx(published, rel=1e-12)


def test_a_push_carries_the_client_by_its_length() -> None:
    """On a loss that is flat, over a round long enough for momentum to fade."""
    model = nn.Linear(3, 1, bias=False).double()
    start = copy.deepcopy(model)
    given = replace(problem(PARTIAL), module=model)
    g = torch.tensor([0.3, -0.4, 1.2], dtype=torch.float64)
    push = paper._push({"push": 0.25, "first_step": "push"}, given, 0, g, 1)
    optimiser = given.optimiser(model, 0)
    for step in range(400):
        model.weight.grad = push.view(1, 3).clone() if step == 0 else torch.zeros_like(model.weight)
        optimiser.step()
    moved = (model.weight - start.weight).detach().flatten()
    torch.testing.assert_close(moved, 0.25 * g / g.norm(), rtol=1e-10, atol=1e-12)
