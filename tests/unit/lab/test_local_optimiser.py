"""The learning rate of a round against torch.optim.lr_scheduler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.local_optimiser import optimiser_of
from fedgg.lab.trusted_code import trust


@pytest.mark.parametrize("end", [0.0, 0.1])
@pytest.mark.parametrize("name", ["cosine", "linear", "exponential", "step"])
def test_schedules_against_torch(name: str, end: float) -> None:
    rounds, lr, decay = 12, 0.3, 0.9
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    schedulers: Any = torch.optim.lr_scheduler
    reference = {
        "cosine": lambda: schedulers.CosineAnnealingLR(optimiser, rounds, eta_min=end * lr),
        "linear": lambda: schedulers.LinearLR(optimiser, 1.0, end, rounds),
        "exponential": lambda: schedulers.ExponentialLR(optimiser, decay),
        "step": lambda: schedulers.StepLR(optimiser, 5, decay),
    }[name]()
    settings: dict[str, dict[str, Any]] = {"cosine": {"end": end}, "linear": {"end": end}, "step": {"every": 5}}
    schedule = {"name": name, **settings.get(name, {})}
    experiment = Experiment(rounds=rounds, local={"lr": lr, "lr_decay": decay}, schedule=schedule)
    for number in range(rounds):
        ours = optimiser_of(experiment, number).values["lr"]
        assert ours == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-9)
        optimiser.step()
        reference.step()


def test_warmup() -> None:
    experiment = Experiment(rounds=6, local={"lr": 0.8}, schedule={"name": "constant", "warmup": 3})
    rates = [optimiser_of(experiment, number).values["lr"] for number in range(6)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"optimiser": {"name": "adam", "beta2": 2.0}}, "optimiser.beta2 = 2: give a number from 0 to below 1"),
        ({"optimiser": {"name": "adamw", "epsilon": 0.0}}, "optimiser.epsilon = 0"),
        ({"optimiser": {"name": "adam", "beta1": "much"}}, "needs a number for 'beta1'"),
        ({"schedule": {"name": "step", "every": 0}}, "every = 0: it fails in round 1: ZeroDivisionError"),
        ({"schedule": {"name": "step", "every": "x"}}, "schedule.every = 'x': must be a whole number"),
        ({"schedule": {"name": "step", "every": 2.5}}, "schedule.every = 2.5: must be a whole number"),
        ({"server_schedule": {"name": "cosine", "end": True}}, "server_schedule.end = True: must be a number"),
        ({"schedule": {"name": "linear", "end": -2.0}}, "the learning rate of round 3 is -"),
        (
            {"schedule": {"name": "cosine"}, "local": {"lr_decay": 0.5}},
            "local.lr_decay = 0.5 has no effect with schedule.name = 'cosine': leave one of them out",
        ),
        (
            {"server_schedule": {"name": "linear"}, "server": {"lr_decay": 0.5}},
            "server.lr_decay = 0.5 has no effect with server_schedule.name = 'linear'",
        ),
    ],
)
def test_settings_out_of_range_before_anything_trains(sections: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=re.escape(complaint)):
        build(Experiment(rounds=4, algorithm={"name": "fedavg"}, **sections))


OWN = """
from dataclasses import dataclass
from fedgg.core.optimisers import Optimiser

def power(round_: int, rounds: int, exponent: float = -0.5) -> float:
    return (round_ + 1) ** exponent

def table(round_: int) -> float:
    return [1.0, 0.5][round_]

@dataclass(frozen=True)
class Signs(Optimiser):
    scale: float = 0.1

    def move(self, grad, w, state):
        return -self.scale * grad.sign(), state
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    trust("own.py")
    return Experiment(rounds=4, algorithm={"name": "fedavg"})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"name": "own.py:power", "exponnent": -1.0}, "schedule own.py:power has no setting 'exponnent': did you mean"),
        ({"name": "own.py:power", "exponent": "x"}, "schedule.exponent = 'x': must be a number"),
        ({"name": "own.py:power", "rounds": 3}, "schedule own.py:power has no setting 'rounds'"),
        ({"name": "own.py:table"}, "schedule.name = own.py:table: it fails in round 3: IndexError: list index"),
    ],
)
def test_settings_of_a_schedule_of_ones_own(own: Experiment, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=re.escape(complaint)):
        build(own.changed({"schedule": settings}))


def test_settings_of_a_schedule_of_ones_own_may_be_negative(own: Experiment) -> None:
    build(own.changed({"schedule": {"name": "own.py:power", "exponent": -1.0}}))


def test_defaults_of_an_optimiser_of_ones_own(own: Experiment) -> None:
    """A default as dataclasses have them, beside `defaults`."""
    settings = [{"name": "own.py:Signs"}, {"name": "own.py:Signs", "scale": 0.3}]
    assert [optimiser_of(own.changed({"optimiser": one}), 0).values["scale"] for one in settings] == [0.1, 0.3]
