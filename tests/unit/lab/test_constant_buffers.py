"""Buffers that training does not change are constants: not averaged, not sent, not judged; until they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.run_result import Run
from fedgg.lab.runner import run

INF = float("inf")


class Causal(nn.Module):
    """Attention over the rows of an image, with a causal mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 10)
        self.mask: Tensor
        self.register_buffer("mask", torch.full((8, 8), -INF).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x.squeeze(1)).chunk(3, -1)
        logits: Tensor = self.out(((q @ k.mT + self.mask).softmax(-1) @ v).mean(1))
        return logits


class Scaled(nn.Module):
    """Inputs times numbers that an average rounds, NaN where nothing is read, and a batch norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 10), nn.BatchNorm1d(10)
        self.scale: Tensor
        self.register_buffer("scale", torch.cat([torch.linspace(0.1, 3, 64), torch.tensor([float("nan")])]))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.norm(self.linear(x.flatten(1) * self.scale[:64]))
        return logits


class Peak(nn.Module):
    """Keeps the brightest image it has trained on, which only batches with a brighter one change, beside -inf."""

    bound = 0.125

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.peak: Tensor
        self.register_buffer("peak", torch.tensor([self.bound, -INF]))

    def forward(self, x: Tensor) -> Tensor:
        brightest = x.flatten(1).mean(1).max()
        if self.training and float(brightest) > float(self.peak[0]):
            self.peak[0] = brightest
        logits: Tensor = self.linear(x.flatten(1))
        return logits


class Rotated(nn.Module):
    """Multiplies by constant complex numbers, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.turn: Tensor
        self.register_buffer("turn", torch.polar(torch.ones(32), torch.arange(32.0)))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.reshape(-1, 32, 2).contiguous()) * self.turn
        logits: Tensor = self.linear(torch.view_as_real(turned).flatten(1))
        return logits


def small(**changes: Any) -> Experiment:
    return Experiment(
        rounds=2, split={"clients": 7, "beta": 0.3}, local={"epochs": 1}, algorithm={"name": "fedavg"}
    ).changed(changes)


def bytes_of(done: Run) -> set[int]:
    return {line[way] // len(line["clients"]) for line in done.rounds for way in ("bytes_up", "bytes_down")}


@pytest.mark.parametrize("statistics", ["average", "local", "frozen"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_mask_of_infinities_is_no_divergence(engine: str, statistics: str, tmp_path: Path) -> None:
    asked = small(**{"engine.name": engine, "model.statistics": statistics})
    run(asked.changed({"rounds": 1}), model=Causal, out=tmp_path)
    done = run(asked, model=Causal, out=tmp_path)
    assert (done.status, done.summary["clients_lost"]) == ("finished", 0)
    assert torch.equal(done.weights["mask"], Causal().mask)
    assert bytes_of(done) == {4 * done.summary["parameters"]}


@pytest.mark.parametrize("statistics", ["average", "local"])
def test_constants_do_not_drift_beside_statistics_that_move(statistics: str) -> None:
    done = run(small(**{"rounds": 12, "model.statistics": statistics, "local.epochs": 2}), model=Scaled)
    assert done.status == "finished"
    assert torch.equal(done.weights["scale"][:64], Scaled().scale[:64])
    assert int(done.weights["norm.num_batches_tracked"]) > 0
    moving = 4 * 10 + 4 * 10 + 8  # mean, variance, counter
    up = {line["bytes_up"] // 7 for line in done.rounds}
    assert up == {4 * done.summary["parameters"] + moving}


def test_a_buffer_that_changes_later_travels_and_is_averaged_from_then_on() -> None:
    """Found out by looking at what training did, not by the first look at the model."""
    federation = build(small(), model=Peak)
    assert not federation.net.keeps_statistics  # two examples of the test set changed nothing
    done = run(small(rounds=4), model=Peak)
    model = 4 * done.summary["parameters"]
    assert done.rounds[0]["bytes_down"] == 7 * model
    assert done.rounds[0]["bytes_up"] > 7 * model  # clients in which it changed send it
    assert done.rounds[1]["bytes_down"] == 7 * (model + 8)
    assert float(done.weights["peak"][0]) > Peak.bound
    assert float(done.weights["peak"][1]) == -INF


def test_a_buffer_that_becomes_infinite_is_a_divergence() -> None:
    class Overflows(Peak):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and len(x) > 2:
                self.peak[0] = INF
            logits: Tensor = self.linear(x.flatten(1))
            return logits

    done = run(small(), model=Overflows)
    assert done.status == "diverged"
    assert "not finite: peak" in done.summary["why"]


def test_under_privacy_a_buffer_that_changes_later_stops_the_run() -> None:
    """No noise protects it."""
    private = small(**{"privacy.noise": 0.0})
    with pytest.raises(UserError, match=r"privacy: training changed the buffer peak of client \d, .* 'frozen'"):
        run(private, model=Peak)
    done = run(private.changed({"model.statistics": "frozen"}), model=Peak)
    assert done.status == "finished"
    assert float(done.weights["peak"][0]) == Peak.bound


def test_frozen_statistics_have_an_effect_and_say_so() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))

    frozen = small(**{"model.statistics": "frozen"})
    notices = build(frozen, model=normed).notices
    assert any("normalisation layers use their starting statistics" in notice for notice in notices)
    assert not any("has no effect" in notice for notice in notices)
    assert run(frozen, model=normed).test_accuracy != run(small(), model=normed).test_accuracy
    for plain in (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), Causal):
        assert any("has no effect: the model keeps none" in notice for notice in build(frozen, model=plain).notices)


def test_a_model_with_infinite_constants_can_be_a_start(tmp_path: Path) -> None:
    run(small(), model=Causal, out=tmp_path)
    file = tmp_path / "model.safetensors"
    begun = build(small(**{"model.start": str(file)}), model=Causal).net
    assert torch.equal(begun.start, begun.layout.flatten(load_file(file)))


def test_complex_numbers_that_cannot_be_trained_or_kept_are_refused() -> None:
    class Trained(Rotated):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(32, dtype=torch.complex64))

    with pytest.raises(UserError, match="factor is complex: train its real and imaginary part"):
        build(small(), model=Trained)
    long = Rotated()
    long.turn = long.turn.to(torch.complex128)
    with pytest.raises(UserError, match="the buffer turn is complex128"):
        build(small(), model=long)


def test_complex_constants_stay_complex(tmp_path: Path) -> None:
    for precision, engine in (("fp32", "loop"), ("fp64", "loop"), ("fp32", "stacked")):
        asked = small(**{"engine.precision": precision, "engine.name": engine})
        done = run(asked, model=Rotated, out=tmp_path / f"{precision}-{engine}")
        assert torch.equal(done.weights["turn"], Rotated().turn)
