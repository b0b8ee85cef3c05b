"""A run records which code it ran: the commit of the repository, or the one that the environment names; and user code.

User code that computes something else is refused when a run is resumed, also where its source is the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedgg
from fedgg.lab.provenance import COMMIT_VARIABLE, commit


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    commit.cache_clear()
    yield
    commit.cache_clear()


def test_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "abc1234")
    assert commit() == {"commit": "abc1234", "changed": None}


def test_of_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    found = commit()["commit"]
    if (Path(fedgg.__file__).parents[2] / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}", found)
    else:
        assert found is None


def test_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(fedgg, "__file__", str(tmp_path / "a" / "b" / "__init__.py"))
    assert commit() == {"commit": None, "changed": None}


RNG = np.random.default_rng(0)
DATA = (RNG.normal(size=(90, 5)), RNG.integers(0, 3, 90), RNG.normal(size=(30, 5)), RNG.integers(0, 3, 30))


def closure(gamma: float) -> Callable[..., Tensor]:
    return lambda outputs, targets: gamma * F.cross_entropy(outputs, targets, reduction="none")


def scaled(outputs: Tensor, targets: Tensor, gamma: float) -> Tensor:
    return gamma * F.cross_entropy(outputs, targets, reduction="none")


class ModuleLoss(nn.Module):
    def __init__(self, gamma: float):
        super().__init__()
        self.gamma = gamma

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return scaled(outputs, targets, self.gamma)


class Scaled(nn.Module):
    """torch prints the layer, not the factor."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor, self.layer = factor, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.factor * self.layer(x)
        return outputs


def start_and_continue(out: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    experiment = {"rounds": 1, "split": {"scheme": "iid", "clients": 3}, "local": {"batch": 10}}
    fedgg.run(experiment, **{"model": lambda: nn.Linear(5, 3), **before}, data=DATA, out=out)
    fedgg.run({**experiment, "rounds": 2}, **{"model": lambda: nn.Linear(5, 3), **after}, data=DATA, out=out)


OTHER_VALUES: list[tuple[str, Callable[[float], dict[str, Any]]]] = [
    ("the loss of the run", lambda gamma: {"loss": closure(gamma)}),
    ("the loss of the run", lambda gamma: {"loss": functools.partial(scaled, gamma=gamma)}),
    ("the loss of the run", lambda gamma: {"loss": ModuleLoss(gamma)}),
    (
        "the loss of the run",
        lambda gamma: {"loss": nn.CrossEntropyLoss(reduction="none", label_smoothing=gamma / 10)},
    ),
    ("the metrics of the run", lambda gamma: {"metrics": [functools.partial(scaled, gamma=gamma)]}),
    ("a model that gives other outputs", lambda gamma: {"model": lambda: Scaled(gamma)}),
]


@pytest.mark.parametrize(("complaint", "parts"), OTHER_VALUES)
def test_user_code_with_other_values_is_refused_in_a_resume(
    complaint: str, parts: Callable[[float], dict[str, Any]], tmp_path: Path
) -> None:
    start_and_continue(tmp_path / "same", parts(2.0), parts(2.0))
    with pytest.raises(fedgg.UserError, match=complaint):
        start_and_continue(tmp_path / "other", parts(2.0), parts(3.0))


def test_a_loss_that_draws_random_numbers_can_be_resumed(tmp_path: Path) -> None:
    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs + 0.1 * torch.randn_like(outputs), targets, reduction="none")

    start_and_continue(tmp_path / "run", {"loss": noisy}, {"loss": noisy})


def test_constants_of_a_file_of_user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of the named function stays the same; what its file defines beside it changes."""
    monkeypatch.chdir(tmp_path)
    code = (
        "import torch.nn.functional as F\nGAMMA = {}\n\n"
        "def factor(ce):\n    return (1 - (-ce).exp()) ** GAMMA\n\n"
        "def focal(outputs, targets):\n    ce = F.cross_entropy(outputs, targets, reduction='none')\n"
        "    return factor(ce) * ce\n"
    )
    experiment = {"split": {"clients": 3}, "task": {"loss": "focal.py:focal"}, "local": {"epochs": 1}}
    Path("focal.py").write_text(code.format(1.0))
    fedgg.trust("focal.py")
    fedgg.run({**experiment, "rounds": 1}, out="run")
    Path("focal.py").write_text(code.format(5.0))
    with pytest.raises(fedgg.UserError, match="the loss of the run in run had other values"):
        fedgg.run({**experiment, "rounds": 2}, out="run")
