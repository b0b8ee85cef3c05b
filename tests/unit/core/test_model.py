"""Modules as functions of rows: stacked equals one by one; dropout and BatchNorm mean what their names say."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.algorithms import SCAFFOLD, FedAvg, FedGG, FedProx
from fedgg.core.algorithm import Algorithm, Batch
from fedgg.core.buffers import close_buffers
from fedgg.core.local import LocalEnd, LocalStart, local_round
from fedgg.core.model import Net
from fedgg.core.optimisers import SGD
from fedgg.core.random_choices import torch_seed, torch_stream
from fedgg.engines.loop import open_client
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin, next_job
from fedgg.lab.runner import run

MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)),
    "cnn": lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)),
    "layer norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
    "batch norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
    "constant buffer": lambda: WithConstant(),
}


class WithConstant(nn.Module):
    """A buffer that is a constant, not a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1)) * self.mask  # type: ignore[no-any-return]


def net_of(kind: str, examined: bool) -> Net:
    with torch_stream(0, "test"):
        net = Net(MODULES[kind]().double())
        if examined:
            net.examine(torch.randn(2, 3, 2, 2).double(), 3)
        return net


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("examined", [True, False])
@pytest.mark.parametrize("kind", MODULES)
def test_stacked_equals_one_by_one(kind: str, examined: bool, train: bool) -> None:
    torch.manual_seed(1)
    net = net_of(kind, examined)
    w = net.start + 0.1 * torch.randn(3, net.layout.total).double()
    x, y, mask = torch.randn(3, 6, 3, 2, 2).double(), torch.randint(3, (3, 6)), torch.ones(3, 6).double()
    buffers = {name: torch.cat([rows] * 3) for name, rows in net.start_buffers.items()}
    together = net.bind({name: rows.clone() for name, rows in buffers.items()}, train=train)
    for k in range(3):
        alone = net.bind({name: rows[k : k + 1].clone() for name, rows in buffers.items()}, train=train)
        one = w[k : k + 1], x[k : k + 1]
        assert torch.allclose(together(w, x)[k], alone(*one)[0], rtol=0, atol=1e-13)
        losses = together.loss(w, x, y, mask)[k], alone.loss(*one, y[k : k + 1], mask[k : k + 1])[0]
        assert torch.allclose(*losses, rtol=0, atol=1e-13)


def test_padding_does_not_count() -> None:
    net = net_of("mlp", True)
    x, y = torch.randn(1, 4, 3, 2, 2).double(), torch.randint(3, (1, 4))
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0]]).double()
    forward = net.bind({}, train=True)
    short = forward.loss(net.start, x[:, :2], y[:, :2], mask[:, :2])
    assert torch.allclose(forward.loss(net.start, x, y, mask), short, rtol=0, atol=1e-15)
    assert float(forward.loss(net.start, x, y, 0 * mask).detach()) == 0  # a row that is done: no division by zero


# Dropout --------------------------------------------------------------------------------------------------------------


class Functional(nn.Module):
    """Dropout that is no submodule."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.inner, self.outer, self.always = nn.Linear(12, 8), nn.Linear(8, 3), always

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.inner(x.flatten(1)), 0.5, training=self.training or self.always)
        return self.outer(hidden)  # type: ignore[no-any-return]


class Spy(nn.Module):
    """Passes its input on, with holes, and writes the holes down."""

    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 3), []

    def forward(self, x: Tensor) -> Tensor:
        holes = F.dropout(torch.ones_like(x), 0.5, training=self.training)
        if self.training:
            self.seen.append(holes.detach().clone())
        return self.linear(x * holes)  # type: ignore[no-any-return]


def masks(algorithm: Algorithm, seed: int = 0, round_: int = 0, client: int = 0, steps: int = 4) -> list[Tensor]:
    """The dropout masks a client meets in a round."""
    torch.manual_seed(99)
    net = Net(Spy())
    net.examine(torch.zeros(2, 4), 3)
    spy = net.module
    assert isinstance(spy, Spy)
    spy.seen.clear()
    w = net.start
    start = LocalStart(
        w=w,
        down=algorithm.send_down(w, None)  # type: ignore[arg-type]
        if not isinstance(algorithm, SCAFFOLD)
        else {"variate": torch.zeros_like(w)},
        memory=algorithm.client_memory(w),
        buffers={},
        examples=torch.full((1, 1), 6.0),
        steps=torch.full((1, 1), float(steps)),
        round=torch.full((1, 1), float(round_)),
        dropout=[(seed, round_, client)],
    )
    batch = Batch(torch.ones(1, 6, 4), torch.zeros(1, 6, dtype=torch.int64), torch.ones(1, 6))
    with torch.random.fork_rng(devices=[]):
        local_round(algorithm, net, SGD.of(0.1, 0.9, 0.0, w), start, [batch] * steps)
    return spy.seen


def test_masks_are_a_function_of_seed_round_client_and_step() -> None:
    base = masks(FedAvg())
    assert all(torch.equal(a, b) for a, b in zip(base, masks(FedAvg()), strict=True))
    variants = [base, masks(FedAvg(), seed=1), masks(FedAvg(), round_=1), masks(FedAvg(), client=1)]
    flat = [mask for variant in variants for mask in variant]
    assert all(not torch.equal(a, b) for a, b in combinations(flat, 2))


@pytest.mark.parametrize("algorithm", [FedGG(mu=1.0), FedProx(mu=1.0), SCAFFOLD()])
def test_masks_are_the_same_for_all_algorithms(algorithm: Algorithm) -> None:
    assert all(torch.equal(a, b) for a, b in zip(masks(FedAvg()), masks(algorithm), strict=True))


def test_masks_are_counted_as_their_definition_says() -> None:
    """SplitMix64 over plain integers: key, step and place of the dropout make a moment, moment and element a number."""

    def mixed(z: int) -> int:
        z %= 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    golden, key = 0x9E3779B97F4A7C15, torch_seed(3, "dropout", 1, 2)
    for step, mask in enumerate(masks(FedAvg(), seed=3, round_=1, client=2)):
        moment = mixed(key + golden * (1024 * step + 1 + 1))
        expected = [2.0 * (mixed(moment + golden * element) >> 40 >= 2**23) for element in range(24)]
        assert mask.flatten().tolist() == expected


@pytest.mark.parametrize("module", [Functional, lambda: nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(12, 3))])
def test_dropout_is_noticed_wherever_it_is(module: Callable[[], nn.Module]) -> None:
    net = Net(module())
    net.examine(torch.randn(2, 3, 2, 2), 3)
    assert net.drops
    assert not net.draws_random_numbers  # masks are counted
    assert not net.keeps_statistics


def test_a_module_without_dropout_draws_nothing() -> None:
    net = net_of("batch norm", True)
    assert not net.draws_random_numbers
    assert net.keeps_statistics
    assert not net_of("constant buffer", True).keeps_statistics


def small(**changes: Any) -> Experiment:
    return Experiment(
        rounds=2, split={"clients": 3}, local={"epochs": 1, "batch": 64}, algorithm={"name": "fedavg"}
    ).changed(changes)


def digits_model(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *layers, nn.Linear(8, 10))


@pytest.mark.parametrize(
    "model",
    [
        lambda: digits_model(nn.ReLU()),
        lambda: digits_model(nn.Dropout()),
        lambda: digits_model(nn.BatchNorm1d(8)),
    ],
    ids=["plain", "dropout", "batch norm"],
)
def test_a_run_leaves_the_users_generator_alone_and_does_not_depend_on_it(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = run(small(), model=model).weights
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = run(small(), model=model).weights
    assert all(torch.equal(first[name], second[name]) for name in first)


class AlwaysDropout(nn.Module):
    """`F.dropout(x)` without `training=self.training`: a well-known slip, random in evaluation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.dropout(self.inner(x.flatten(1)), 0.9))  # type: ignore[no-any-return]


def test_a_model_that_is_random_in_evaluation_is_refused_or_at_least_reproducible() -> None:
    def accuracies(seed: int) -> list[float]:
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        try:
            found = run(small(), model=AlwaysDropout).test_accuracy
        except UserError:
            return []
        assert torch.equal(torch.get_rng_state(), before), "the user's generator was drawn from"
        return found

    assert accuracies(1) == accuracies(2)


def test_the_users_own_module_is_not_changed() -> None:
    torch.manual_seed(0)
    module = digits_model(nn.BatchNorm1d(8))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run(small(**{"engine.precision": "fp64"}), model=module)
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == before[name].dtype, f"{name} was float32 and is {tensor.dtype} now"
        assert torch.equal(tensor, before[name]), name


# Buffers --------------------------------------------------------------------------------------------------------------


def test_average_by_hand() -> None:
    trained = {"mean": torch.tensor([[1.0, 2.0], [5.0, 6.0]]), "count": torch.tensor([3, 7])}
    share = torch.tensor([[0.25], [0.75]])
    server = {"mean": torch.zeros(1, 2), "count": torch.tensor([0])}
    for policy in ("average", "local"):
        closed = close_buffers(policy, server, trained, share)
        assert closed["mean"].tolist() == [[4.0, 5.0]]
        assert closed["count"].tolist() == [7]
    assert close_buffers("frozen", server, trained, share) is server


def norm_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, affine=False), nn.Linear(64, 10))


@pytest.mark.parametrize("policy", ["average", "local", "frozen"])
@pytest.mark.parametrize("has_own", [False, True])
def test_which_buffers_a_client_starts_from_and_which_travel(policy: str, has_own: bool) -> None:
    federation = build(small(**{"model.statistics": policy}), model=norm_model)
    job = next_job(federation, begin(federation))
    own = {name: rows + 2 for name, rows in job.buffers.items()}
    job = replace(job, kept_buffers={0: own} if has_own else {})
    start, _ = open_client(job, 0)
    expected = own if policy == "local" and has_own else job.buffers
    for name, rows in start.buffers.items():
        assert torch.equal(rows, expected[name])
        rows += 1  # training changes them in place
        assert not torch.equal(rows, expected[name]), name
    end = LocalEnd({}, {}, start.buffers, {}, torch.zeros(1, 1))
    travel = bool(job.buffers_down(0)), bool(job.buffers_up(0, end))
    assert travel == {"average": (True, True), "local": (not has_own, True), "frozen": (False, False)}[policy]


def batch_norm_run(policy: str, rounds: int = 1) -> tuple[Any, Any]:
    experiment = small(
        **{"rounds": rounds, "model.statistics": policy, "local.batch": 100000, "local.epochs": 1}
    ).changed({"engine.precision": "fp64", "split.clients": 1, "split.scheme": "iid"})
    federation = build(experiment.changed({"local.batch": 1437}), model=norm_model)
    return federation, run(experiment.changed({"local.batch": 1437}), model=norm_model)


@pytest.mark.parametrize("policy", ["average", "local"])
def test_statistics_of_a_full_batch_by_hand(policy: str) -> None:
    """One client, one step on everything: the running mean has gone a tenth of the way to the data's."""
    federation, finished = batch_norm_run(policy)
    x = torch.cat([x for x, _ in federation.feed.client_chunks(0)]).flatten(1)
    assert torch.allclose(finished.weights["1.running_mean"], 0.1 * x.mean(0), rtol=0, atol=1e-12)
    assert torch.allclose(finished.weights["1.running_var"], 0.9 + 0.1 * x.var(0), rtol=0, atol=1e-12)
    assert int(finished.weights["1.num_batches_tracked"]) == 1


def test_frozen_statistics_never_move_and_are_what_training_uses() -> None:
    federation, finished = batch_norm_run("frozen", rounds=2)
    assert torch.equal(finished.weights["1.running_mean"], torch.zeros(64).double())
    assert int(finished.weights["1.num_batches_tracked"]) == 0
    plain = run(finished.experiment.changed({"model.statistics": "average"}), model=_scaled_linear)
    for mine, theirs in (("2.weight", "1.weight"), ("2.bias", "1.bias")):
        assert torch.allclose(finished.weights[mine], plain.weights[theirs], rtol=0, atol=1e-10)
    assert federation.net.frozen_statistics


def _scaled_linear() -> nn.Module:
    """What a BatchNorm at its starting statistics amounts to: division by sqrt(1 + 1e-5)."""

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) / math.sqrt(1 + 1e-5)

    return nn.Sequential(Scale(), nn.Linear(64, 10))


def test_local_statistics_stay_with_their_client() -> None:
    from fedgg.engines import Loop
    from fedgg.lab.one_round import begin
    from fedgg.lab.runner import play_round

    experiment = small(**{"model.statistics": "local", "server.cohort": 2, "engine.precision": "fp64", "rounds": 5})
    federation = build(experiment, model=lambda: digits_model(nn.BatchNorm1d(8)))
    state = begin(federation)
    for _ in range(5):
        new, record = play_round(federation, state, Loop())
        called = {line["client"] for line in record["clients"]}
        for client, kept in state.kept_buffers.items():
            same = torch.equal(kept["2.running_mean"], new.kept_buffers[client]["2.running_mean"])
            assert same == (client not in called)
        share = torch.tensor([[line["examples"]] for line in record["clients"]]).double()
        means = torch.cat([new.kept_buffers[line["client"]]["2.running_mean"] for line in record["clients"]])
        expected = (share / share.sum() * means).sum(0, keepdim=True)
        assert torch.allclose(new.server.buffers["2.running_mean"], expected, rtol=0, atol=1e-14)
        state = new


def test_a_last_batch_of_one_example_meets_batch_norm() -> None:
    """PyTorch refuses to normalise one example: the user must hear it in one line, or the run must go on."""
    experiment = Experiment(
        rounds=1, split={"clients": 1, "scheme": "iid"}, local={"batch": 32, "epochs": 1}, algorithm={"name": "fedavg"}
    )
    x, y = torch.randn(65, 64), torch.arange(65) % 10  # 32 + 32 + 1
    with suppress(UserError):
        run(experiment, model=lambda: digits_model(nn.BatchNorm1d(8)), data=(x, y, x, y))


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (lambda: nn.Linear(7, 10), "cannot take examples of shape"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), r"returned \[2, 9\] .* needs \[2, 10\]"),
        (lambda: nn.Flatten(), "nothing to learn"),
        (lambda: nn.Conv2d(3, 4, 3), "cannot take"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_in_one_line(module: Callable[[], nn.Module], word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        build(small(), model=module)
    assert "\n" not in str(caught.value)
