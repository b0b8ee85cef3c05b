"""The server's learning rate and its schedules: against plain torch, for every algorithm, and in run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedgg
from fedgg.algorithms import ALGORITHMS
from fedgg.lab.build import build
from fedgg.lab.runner import run

SMALL: dict[str, Any] = {
    "rounds": 3,
    "split": {"clients": 4, "beta": 0.5, "min_examples": 5},
    "model": {"name": "mlp", "hidden": 8},
    "local": {"epochs": 1, "batch": 32, "lr": 0.05, "momentum": 0.5},
    "engine": {"precision": "fp64"},
}


def moved(chosen: fedgg.Experiment) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in run(chosen).weights.values()])


@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "cosine", "end": 0.1},
        {"name": "linear"},
        {"name": "step", "every": 2},
        {"name": "exponential"},
        {"name": "constant"},
    ],
    ids=lambda schedule: str(schedule["name"]),
)
def test_fedsgd_is_gradient_descent_under_torchs_schedulers(schedule: dict[str, Any]) -> None:
    """One full-batch step a client, averaged by examples, is one step of torch.optim.SGD on all examples."""
    rounds, lr, server_lr, decay = 6, 0.1, 1.5, 0.8
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)), rng.integers(0, 3, 60)
    chosen = fedgg.Experiment(
        rounds=rounds,
        split={"scheme": "iid", "clients": 3, "min_examples": 1},
        model={"name": "linear"},
        algorithm={"name": "fedsgd"},
        local={"lr": lr, "momentum": 0.0, "batch": 20},
        server={"lr": server_lr, "lr_decay": decay if schedule["name"] in ("step", "exponential") else 1.0},
        server_schedule=schedule,
        engine={"precision": "fp64"},
    )
    ours = fedgg.run(chosen, data=(x, y, x, y))
    module = torch.nn.Linear(5, 3).double()
    start = build(chosen, data=(x, y, x, y)).net.start
    torch.nn.utils.vector_to_parameters(start[0], module.parameters())
    optimiser = torch.optim.SGD(module.parameters(), lr=lr * server_lr)
    schedulers: Any = torch.optim.lr_scheduler
    reference: Any = {
        "cosine": lambda: schedulers.CosineAnnealingLR(optimiser, rounds, eta_min=0.1 * lr * server_lr),
        "linear": lambda: schedulers.LinearLR(optimiser, 1.0, 0.0, rounds),
        "step": lambda: schedulers.StepLR(optimiser, 2, decay),
        "exponential": lambda: schedulers.ExponentialLR(optimiser, decay),
        "constant": lambda: schedulers.ConstantLR(optimiser, 1.0),
    }[schedule["name"]]()
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    for record in ours.rounds:
        assert record["server_lr"] * lr == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-9)
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs), targets).backward()
        optimiser.step()
        reference.step()
    for tensor, parameter in zip(ours.weights.values(), module.parameters(), strict=True):
        assert torch.allclose(tensor, parameter, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_scales_its_step_or_refuses_by_name(name: str) -> None:
    chosen = fedgg.Experiment(**{**SMALL, "rounds": 1}, algorithm={"name": name}, data={"proxy": 50})
    half = chosen.changed({"server.lr": 0.5})
    if ALGORITHMS[name]().fixes_server_step():
        with pytest.raises(fedgg.UserError, match=f"{ALGORITHMS[name].__name__} has a server step of its own"):
            build(half)
        build(chosen.changed({"server_schedule.name": "constant"}))  # a rate of 1 is the algorithm's own
        return
    start = build(chosen).net.start[0]
    assert torch.allclose(moved(half) - start, 0.5 * (moved(chosen) - start), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_a_factor_on_the_rate_that_an_algorithm_has(name: str) -> None:
    chosen = fedgg.Experiment(**SMALL, algorithm={"name": name, "server_lr": 0.02})
    double = chosen.changed({"server.lr": 2.0})
    assert torch.allclose(moved(double), moved(chosen.changed({"algorithm.server_lr": 0.04})), rtol=1e-10, atol=1e-12)


def test_fedgg_sends_the_update_that_the_model_has_made() -> None:
    """With all clients in every round, the direction sent is the difference of the models received."""
    settings = {"name": "fedgg", "first_step": "relative_push", "push": 0.5}
    received = fedgg.Experiment(**SMALL, algorithm=settings, server={"lr": 0.4})
    sent = received.changed({"algorithm.direction": "sent"})
    assert torch.allclose(moved(received), moved(sent), rtol=1e-9, atol=1e-11)
    assert not torch.allclose(moved(received), moved(received.changed({"server.lr": 1.0})), rtol=1e-3)


def test_identity_record_and_resume(tmp_path: Path) -> None:
    base = fedgg.Experiment(**SMALL, algorithm={"name": "scaffold"})
    content = base._identity(path=True)
    assert "server_schedule" not in content
    assert not {"lr", "lr_decay"} & content["server"].keys()
    assert "server_lr" not in run(base.changed({"rounds": 1})).rounds[0]
    warm = base.changed({"server_schedule.warmup": 2, "server.lr": 0.9})
    assert warm.changed({"rounds": 9}).trajectory() == warm.trajectory() != base.trajectory()
    cosine = base.changed({"server_schedule.name": "cosine"})
    assert cosine.changed({"rounds": 9}).trajectory() != cosine.trajectory()
    whole = run(warm)
    assert [record["server_lr"] for record in whole.rounds] == pytest.approx([0.3, 0.6, 0.9])
    run(warm.changed({"rounds": 1}), out=tmp_path)
    resumed = run(warm, out=tmp_path)
    assert all(torch.equal(tensor, resumed.weights[name]) for name, tensor in whole.weights.items())
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [line["server_lr"] for line in lines] == [record["server_lr"] for record in whole.rounds]


def test_settings_that_fail_are_refused_before_anything_trains() -> None:
    base = fedgg.Experiment(**SMALL, algorithm={"name": "fedavg"})
    wrong: dict[str, Any] = {"server_schedule.name": "linear", "server_schedule.end": -9.0}
    with pytest.raises(
        fedgg.UserError, match=r"server_schedule\.name = linear, end = -9\.0: the learning rate of round 2"
    ):
        build(base.changed(wrong))
    with pytest.raises(fedgg.UserError, match=r"server_schedule\.name.*did you mean 'cosine'"):
        base.changed({"server_schedule.name": "cosin"})
    with pytest.raises(fedgg.UserError, match=r"server\.lr"):
        base.changed({"server.lr": 0.0})
