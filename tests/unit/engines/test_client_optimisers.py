"""Client optimisers in whole runs: equal in every engine, killed and resumed, and refused where they make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedgg
from fedgg.algorithms import ALGORITHMS
from fedgg.lab.build import build
from fedgg.lab.runner import run

SMALL: dict[str, Any] = {
    "rounds": 2,
    "split": {"clients": 4, "beta": 0.5, "min_examples": 5},
    "model": {"name": "mlp", "hidden": 8},
    "local": {"epochs": 1, "batch": 32, "lr": 0.01, "weight_decay": 0.01},
    "server": {"cohort": 3},
    "engine": {"precision": "fp64"},
}
OPTIMISERS: dict[str, dict[str, Any]] = {
    "adam": {"name": "adam"},
    "adamw kept": {"name": "adamw", "beta2": 0.9, "state": "kept"},
    "sgd clipped": {"name": "sgd", "clip_norm": 0.5},
    "sgd kept": {"name": "sgd", "state": "kept"},
}


def experiment(engine: str, optimiser: dict[str, Any], **changes: Any) -> fedgg.Experiment:
    return fedgg.Experiment(**SMALL, algorithm={"name": "fedavg"}, optimiser=optimiser).changed(
        {"engine.name": engine, **changes}
    )


@pytest.mark.parametrize("optimiser", list(OPTIMISERS.values()), ids=list(OPTIMISERS))
@pytest.mark.parametrize("engine", ["fused", "workers", "stacked"])
def test_engines_agree(engine: str, optimiser: dict[str, Any]) -> None:
    loop, other = (run(experiment(name, optimiser)).weights for name in ("loop", engine))
    for name, tensor in loop.items():
        assert torch.allclose(tensor, other[name], rtol=1e-10, atol=1e-12), name


def test_kept_state_changes_the_second_round_and_is_the_clients_own() -> None:
    changes: dict[str, Any] = {"server.cohort": 4}
    fresh, kept = (run(experiment("loop", {"name": "adam", "state": state}, **changes)) for state in ("fresh", "kept"))
    assert fresh.rounds[0]["train_loss"] == kept.rounds[0]["train_loss"]
    assert fresh.rounds[1]["train_loss"] != kept.rounds[1]["train_loss"]


@pytest.mark.parametrize("optimiser", ["adamw kept", "sgd kept"])
@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_resumed_bit_for_bit(engine: str, optimiser: str, tmp_path: Path) -> None:
    chosen = experiment(engine, OPTIMISERS[optimiser])
    whole = run(chosen.changed({"rounds": 4}))
    run(chosen, out=tmp_path)
    resumed = run(chosen.changed({"rounds": 4}), out=tmp_path)
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, resumed.weights[name])


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_with_adamw_runs_or_is_refused_by_name(name: str) -> None:
    chosen = fedgg.Experiment(**SMALL, algorithm={"name": name}, optimiser={"name": "adamw"}, data={"proxy": 50})
    if ALGORITHMS[name]().needs_sgd():
        with pytest.raises(fedgg.UserError, match=f"{ALGORITHMS[name].__name__} is defined for SGD"):
            build(chosen)
        return
    results = [run(chosen.changed({"engine.name": engine})) for engine in ("loop", "stacked")]
    for key, tensor in results[0].weights.items():
        assert torch.allclose(tensor, results[1].weights[key], rtol=1e-9, atol=1e-11), key


def test_refused_before_anything_trains() -> None:
    push = {"name": "fedgg", "first_step": "push", "push": 0.1}
    with pytest.raises(fedgg.UserError, match="first_step = 'push' sets the length of SGD's first step"):
        build(fedgg.Experiment(**SMALL, algorithm=push, optimiser={"name": "adam"}))
    with pytest.raises(fedgg.UserError, match="FedNova needs a velocity that starts at zero"):
        build(fedgg.Experiment(**SMALL, algorithm={"name": "fednova"}, optimiser={"state": "kept"}))
    for wrong, complaint in (
        ({"name": "adamm"}, "did you mean 'adam'"),
        ({"name": "sgd", "beta1": 0.9}, "optimiser.beta1"),
        ({"name": "adam", "beta3": 0.9}, "optimiser.beta3"),
    ):
        with pytest.raises(fedgg.UserError, match=complaint):
            fedgg.Experiment(**SMALL, optimiser=wrong)
    with pytest.raises(fedgg.UserError, match=r"schedule\.end"):
        fedgg.Experiment(**SMALL, schedule={"name": "step", "end": 0.1})


def test_schedules_in_a_run() -> None:
    base = fedgg.Experiment(**SMALL, algorithm={"name": "fedavg"})
    constant = run(base.changed({"schedule.name": "constant"}))
    assert constant.rounds[1]["train_loss"] == run(base).rounds[1]["train_loss"]
    for schedule in ({"name": "cosine"}, {"name": "linear", "end": 0.5}, {"name": "constant", "warmup": 2}):
        changed = base.changed({f"schedule.{key}": value for key, value in schedule.items()})
        assert run(changed).rounds[1]["train_loss"] != constant.rounds[1]["train_loss"]


def test_identity() -> None:
    """Folders of earlier versions keep their identity; a schedule that depends on the rounds is fixed with them."""
    base = fedgg.Experiment(**SMALL)
    content = base._identity(path=True)
    assert "optimiser" not in content
    assert "schedule" not in content
    assert not {"steps", "part"} & content["local"].keys()
    for change in ({"local.steps": 3}, {"local.part": 0.5}):
        assert base.changed(change).trajectory() != base.trajectory()
    assert base.changed({"rounds": 9}).trajectory() == base.trajectory()
    cosine = base.changed({"schedule.name": "cosine"})
    assert cosine.changed({"rounds": 9}).trajectory() != cosine.trajectory()
    assert base.changed({"optimiser.clip_norm": 1.0}).trajectory() != base.trajectory()


OWN = """
from dataclasses import dataclass
from typing import ClassVar

from fedgg.core.optimisers import Optimiser
from torch import Tensor


@dataclass(frozen=True)
class SignSGD(Optimiser):
    defaults: ClassVar[dict] = {"scale": 1.0}
    scale: Tensor

    def move(self, grad, w, state):
        return -self.lr * self.scale * grad.sign(), state


def halves(round_, share=0.5):
    return share**round_
"""


def test_an_optimiser_and_a_schedule_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    fedgg.trust("own.py")
    changes = {"optimiser.name": "own.py:SignSGD", "optimiser.scale": 0.1, "schedule.name": "own.py:halves"}
    base = fedgg.Experiment(**SMALL, algorithm={"name": "fedavg"})
    results = [run(base.changed({**changes, "engine.name": engine})) for engine in ("loop", "workers", "stacked")]
    for other in results[1:]:
        for name, tensor in results[0].weights.items():
            assert torch.allclose(tensor, other.weights[name], rtol=1e-10, atol=1e-12)
    with pytest.raises(fedgg.UserError, match="has no setting 'size'"):
        build(base.changed({**changes, "optimiser.size": 2}))
    with pytest.raises(fedgg.UserError, match="must be a function with the parameter `round_`"):
        build(base.changed({"schedule.name": "own.py:SignSGD"}))
