"""Gradients taken elsewhere than at w: one pass or two, with statistics, dropout, clipping and personal parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from step_cases import with_dropout, with_statistics
from torch import Tensor, nn

from fedgg.algorithms import ALGORITHMS, FedCurv, FedLESAM, FedSAM
from fedgg.core.algorithm import Algorithm, Batch, Client, Number
from fedgg.core.local import LocalStart, LocalState, local_step, open_round
from fedgg.core.model import Net
from fedgg.core.optimisers import OPTIMISERS, SGD, Optimiser
from fedgg.core.tensor_rows import Rows, length
from fedgg.engines import Engine, Fused, Loop
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin
from fedgg.lab.runner import play_round


@dataclass(frozen=True)
class Ahead(Algorithm):
    """Takes gradients one vector of ones away."""

    def begin(self, w: Tensor, client: Client) -> Rows:
        return {"anchor": w, "ones": torch.ones_like(w)}

    def displacement(self, client: Client) -> Mapping[str, Number]:
        return {"ones": 1.0}


@dataclass(frozen=True)
class Twice(Algorithm):
    """Takes a second gradient half of the first one away."""

    def second_displacement(self, grad: Tensor, w: Tensor, client: Client) -> Tensor | None:
        return 0.5 * grad


def step_of(
    kind: Algorithm, module: nn.Module, w: Tensor, batch: Batch, optimiser: Optimiser | None = None
) -> tuple[LocalState, Rows]:
    """One step from `w`, and the statistics after it."""
    net = Net(module)
    net.keeps_statistics = bool(net.start_buffers)
    one = torch.ones(1, 1).double()
    start = LocalStart(w, {}, {}, {name: rows.clone() for name, rows in net.start_buffers.items()}, one, one, one, [])
    chosen = optimiser or SGD.of(0.1, 0.0, 0.0, w)
    running, client = open_round(kind, net, chosen, start)
    return local_step(kind, chosen, running, client, batch), client.net.buffers


def problem() -> tuple[nn.Module, Tensor, Batch]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
        x = torch.randn(1, 6, 3).double()
    return module, Net(module).start, Batch(x, torch.tensor([[0, 1, 1, 0, 1, 0]]), torch.ones(1, 6).double())


def gradient_by_torch(module: nn.Module, w: Tensor, batch: Batch) -> Tensor:
    """By a copy of the module in training mode; its statistics change as torch says."""
    nn.utils.vector_to_parameters(w[0].clone(), module.parameters())
    module.zero_grad()
    torch.autograd.backward(nn.functional.cross_entropy(module(batch.x[0]), batch.y[0]))
    return torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])[None]


def test_one_pass_takes_gradient_and_statistics_at_the_displaced_point() -> None:
    module, w, batch = problem()
    after, buffers = step_of(Ahead(), module, w, batch)
    copy, _, _ = problem()
    torch.testing.assert_close(after.w, w - 0.1 * gradient_by_torch(copy, w + 1, batch))
    torch.testing.assert_close(buffers["1.running_mean"][0], dict(copy.named_buffers())["1.running_mean"])


def test_of_two_passes_the_second_gives_the_gradient_and_the_first_the_statistics() -> None:
    module, w, batch = problem()
    after, buffers = step_of(Twice(), module, w, batch)
    first, second = problem()[0], problem()[0]
    grad = gradient_by_torch(first, w, batch)
    torch.testing.assert_close(after.w, w - 0.1 * gradient_by_torch(second, w + 0.5 * grad, batch))
    for name, buffer in first.named_buffers():
        torch.testing.assert_close(buffers[name][0], buffer)
    assert int(buffers["1.num_batches_tracked"]) == 1
    with torch.no_grad():
        nn.utils.vector_to_parameters(w[0].clone(), first.parameters())
        loss = nn.functional.cross_entropy(first(batch.x[0]), batch.y[0])
    torch.testing.assert_close(after.loss_sum, 6 * loss.view(1, 1))  # the recorded loss is that of the first pass


def optimiser_with(name: str, w: Tensor, **settings: float) -> Optimiser:
    kind = OPTIMISERS[name]
    plain = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": float("inf"), **kind.defaults}
    return kind.on_rows([plain | settings], w)


@pytest.mark.parametrize("kind", [Ahead(), Twice()], ids=str)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("sgd", {"clip_norm": 0.01}), ("sgd", {"weight_decay": 0.3}), ("adamw", {"weight_decay": 0.3})],
)
def test_clipping_decay_and_adam_act_on_the_gradient_that_was_found_at_w(
    kind: Algorithm, name: str, settings: dict[str, float]
) -> None:
    module, w, batch = problem()
    optimiser = optimiser_with(name, w, **settings)
    after, _ = step_of(kind, module, w, batch, optimiser)
    copy = problem()[0]
    displaced = w + 1 if isinstance(kind, Ahead) else w + 0.5 * gradient_by_torch(copy, w, batch)
    grad = gradient_by_torch(problem()[0], displaced, batch)
    grad = optimiser.clipped(grad) if "clip_norm" in settings else grad
    torch.testing.assert_close(after.w, w + optimiser.move(grad, w, optimiser.start(w))[0])


def played(experiment: Experiment, engine: Engine, model: Any = None, rounds: int = 2) -> Tensor:
    federation = build(experiment, model=model)
    state = begin(federation)
    for _ in range(rounds):
        state, _ = play_round(federation, state, engine)
    return state.server.w


SMALL: dict[str, Any] = {
    "split": {"clients": 3, "beta": 0.5, "min_examples": 5},
    "local": {"epochs": 1, "batch": 30, "lr": 0.05},
    "engine": {"precision": "fp64"},
}


def test_both_passes_have_the_same_dropout_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other masks in the second pass, even a displacement of zero would not leave FedAvg."""
    fedavg = played(Experiment(**SMALL, algorithm={"name": "fedavg"}), Loop(), with_dropout)
    fedsam = played(Experiment(**SMALL, algorithm={"name": "fedsam", "rho": 0.0}), Loop(), with_dropout)
    assert torch.equal(fedavg, fedsam)


class CentredByItsMean(nn.Module):
    """Training reads the statistic that it moves, which a BatchNorm does not."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        outputs: Tensor = self.linear(x - self.mean)
        return outputs


def test_both_passes_start_from_the_same_statistics() -> None:
    fedavg = played(Experiment(**SMALL, algorithm={"name": "fedavg"}), Loop(), CentredByItsMean)
    fedsam = played(Experiment(**SMALL, algorithm={"name": "fedsam", "rho": 0.0}), Loop(), CentredByItsMean)
    assert torch.equal(fedavg, fedsam)


@pytest.mark.parametrize("name", ["fedsam", "fedlesam"])
def test_without_a_displacement_statistics_are_those_of_fedavg(name: str) -> None:
    states = []
    for algorithm in ({"name": "fedavg"}, {"name": name, "rho": 0.0}):
        federation = build(Experiment(**SMALL, algorithm=algorithm), model=with_statistics)
        states.append(play_round(federation, begin(federation), Loop())[0].server)
    for key, rows in states[0].buffers.items():
        assert torch.equal(rows, states[1].buffers[key]), key


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_personal_parameters_are_not_displaced(method: str) -> None:
    """The head's own steps of FedRep are those of FedAvg: the shared parameters stand still, and are not displaced."""
    personal: dict[str, Any] = {"method": method} | ({"head_epochs": 1} if method == "fedrep" else {})
    model = {"name": "mlp", "hidden": 8}
    local = SMALL["local"] | {"epochs": 1 if method == "fedper" else 2}
    heads = []
    for algorithm in ({"name": "fedavg"}, {"name": "fedsam", "rho": 0.5}):
        federation = build(
            Experiment(
                **SMALL
                | {
                    "local": local,
                    "data": {"holdout": 0.2},
                    "model": model,
                    "personal": personal,
                    "algorithm": algorithm,
                }
            )
        )
        state, record = play_round(federation, begin(federation), Loop())
        assert record["lost"] == []
        heads.append(state.memory[0]["personal.w"])
    same = torch.equal(*heads)
    assert same == (method == "fedrep")  # of FedRep the head trains first, of FedPer together with the rest


def test_backward_passes_are_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has one backward pass, and one more for three of `step_passes`: forward and backward count 1 and 2."""
    calls: list[int] = []
    grad = torch.autograd.grad

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return grad(*arguments, **named)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    for name, kind in ALGORITHMS.items():
        if kind.look_passes or kind.needs_proxy:
            continue
        calls.clear()
        federation = build(Experiment(**SMALL, model={"name": "mlp", "hidden": 4}, algorithm={"name": name}))
        play_round(federation, begin(federation), Loop())
        work = federation.work
        steps = sum(work.steps(count) for count in federation.examples)
        assert len(calls) == steps * (1 + int(kind.step_passes // 3)), name
    assert FedSAM.step_passes == 3.0
    assert FedLESAM.step_passes == 0.0


@dataclass(frozen=True)
class WrongShape(Algorithm):
    """A displacement as one number a client."""

    def second_displacement(self, grad: Tensor, w: Tensor, client: Client) -> Tensor | None:
        return length(grad)


@dataclass(frozen=True)
class NoColumn(Algorithm):
    """A factor as [K]."""

    def displacement(self, client: Client) -> Mapping[str, Number]:
        return {"drift": client.lr[:, 0]}


def test_displacements_of_another_shape_are_refused_by_name() -> None:
    module, w, batch = problem()
    with pytest.raises(UserError, match=r"WrongShape\.second_displacement\(\) gives a tensor of shape \(1, 1\)"):
        step_of(WrongShape(), module, w, batch)
    with pytest.raises(UserError, match=r"NoColumn\.displacement\(\) gives 'drift' a factor of shape \(1,\)"):
        step_of(NoColumn(), module, w, batch)


@dataclass(frozen=True)
class Around(Algorithm):
    """A displacement from every inner product there is, and a term beside it."""

    rho: Number = 0.3

    def begin(self, w: Tensor, client: Client) -> Rows:
        wave = torch.sin(torch.arange(w.shape[1], dtype=w.dtype)) / w.shape[1] ** 0.5
        return {"anchor": w, "first": wave.expand_as(w)}

    def displacement(self, client: Client) -> Mapping[str, Number]:
        size = (1 + client.inner("drift", "drift")).sqrt()
        return {"first": self.rho * client.inner("step", "first"), "drift": -self.rho / size + client.step * 0.01}

    def terms(self, client: Client) -> Mapping[str, Number]:
        return {"drift": 0.1 / (1 + client.inner("first", "drift").abs())}


@pytest.mark.parametrize("hidden", [12, 2500])  # one piece, and several
def test_the_fused_step_displaces_as_the_reference(hidden: int) -> None:
    experiment = Experiment(**SMALL, model={"name": "mlp", "hidden": hidden})
    ends = []
    for engine in (Loop(), Fused()):
        federation = build(experiment, algorithm=Around())
        state = begin(federation)
        for _ in range(2):
            state, _ = play_round(federation, state, engine)
        ends.append(state.server.w)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-10)
    plain = played(experiment.changed({"algorithm.name": "fedavg"}), Fused())
    assert float((ends[1] - plain).abs().max()) > 1e-4


def test_the_fused_step_is_taken_for_a_displacement_and_for_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgg.engines.fused import cpu_step

    rounds: list[Any] = []
    steps = cpu_step.fused_steps

    def counted(*given: Any) -> Any:
        rounds.append(given)
        return steps(*given)

    monkeypatch.setattr(cpu_step, "fused_steps", counted)
    for algorithm, fuses in ((FedLESAM(), True), (FedSAM(), True), (FedCurv(), False)):
        rounds.clear()
        federation = build(Experiment(**SMALL, model={"name": "mlp", "hidden": 4}), algorithm=algorithm)
        play_round(federation, begin(federation), Fused())
        assert bool(rounds) == fuses, algorithm
