"""Probe, local round, server and evaluation, each against a few lines of plain PyTorch."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.algorithms import SCAFFOLD, FedAvg, FedGG, FedProx
from fedgg.core.algorithm import Algorithm, Batch, Server
from fedgg.core.evaluation import Probe, evaluate
from fedgg.core.local import LocalEnd, LocalStart, local_round
from fedgg.core.model import Net
from fedgg.core.optimisers import SGD
from fedgg.core.random_choices import torch_stream
from fedgg.core.server import ServerState, close_round, healthy
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin

CHUNKS = [5, 3, 1]


def module_and_net(norm: bool = False) -> tuple[nn.Module, Net]:
    with torch_stream(1, "test"):
        middle: list[nn.Module] = [nn.BatchNorm1d(5), nn.Dropout(0.5)] if norm else [nn.Tanh()]
        module = nn.Sequential(nn.Linear(4, 5), *middle, nn.Linear(5, 3)).double()
    return module, Net(module)


def examples() -> tuple[Tensor, Tensor]:
    with torch_stream(2, "test"):
        return torch.randn(9, 4).double(), torch.randint(3, (9,))


def probe_of(net: Net) -> Probe:
    x, y = examples()
    return Probe(net, net.start_buffers, lambda row: list(zip(x.split(CHUNKS), y.split(CHUNKS), strict=True)))


@pytest.mark.parametrize("norm", [False, True])
def test_probe_against_autograd(norm: bool) -> None:
    module, net = module_and_net(norm)
    probe, (x, y) = probe_of(net), examples()
    before = {name: rows.clone() for name, rows in net.start_buffers.items()}
    module.eval()
    each = []
    for row in range(9):
        module.zero_grad()
        F.cross_entropy(module(x[row : row + 1]), y[row : row + 1]).backward()
        each.append(torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]))
    gradients = torch.stack(each)
    module.train()  # whatever mode the module is left in, a probe looks in evaluation mode
    net._training = True
    assert torch.allclose(probe.gradient(net.start), gradients.mean(0, keepdim=True), rtol=0, atol=1e-14)
    assert torch.allclose(probe.fisher(net.start), gradients.square().mean(0, keepdim=True), rtol=0, atol=1e-14)
    expected = F.cross_entropy(module.eval()(x), y).detach()
    loss = probe.loss(net.start)
    assert loss.shape == (1, 1)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-14)
    assert all(torch.equal(rows, before[name]) for name, rows in net.start_buffers.items())


def start_of(algorithm: Algorithm, w: Tensor, steps: list[int]) -> LocalStart:
    count = len(steps)
    memory = algorithm.client_memory(w)
    down = {"variate": torch.full_like(w, 0.01)} if isinstance(algorithm, SCAFFOLD) else {}
    return LocalStart(
        w=w,
        down=down,
        memory=memory,
        buffers={},
        examples=torch.full((count, 1), 6.0).double(),
        steps=torch.tensor([[float(s)] for s in steps]).double(),
        round=torch.full((count, 1), 3.0).double(),
        dropout=[],
    )


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.5), FedGG(mu=1.0), SCAFFOLD(), SCAFFOLD("exact")])
def test_rows_that_are_done_stand_still(algorithm: Algorithm) -> None:
    """Rows of 5, 2 and 1 steps in one stack, batches for those still at work only: each row is what it is alone."""
    _, net = module_and_net()
    w = net.start.expand(3, -1)
    with torch_stream(3, "test"):
        full = [
            Batch(torch.randn(3, 6, 4).double(), torch.randint(3, (3, 6)), torch.ones(3, 6).double()) for _ in range(5)
        ]
    sgd = SGD.of(0.1, 0.9, 0.05, w)
    steps = [5, 2, 1]
    working = [sum(count > step for count in steps) for step in range(5)]
    batches = [Batch(b.x[:rows], b.y[:rows], b.mask[:rows]) for b, rows in zip(full, working, strict=True)]
    end = local_round(algorithm, net, sgd, start_of(algorithm, w, steps), batches)
    for row, count in enumerate(steps):
        own = [Batch(b.x[row : row + 1], b.y[row : row + 1], b.mask[row : row + 1]) for b in batches[:count]]
        one = w[row : row + 1]
        alone = local_round(algorithm, net, SGD.of(0.1, 0.9, 0.05, one), start_of(algorithm, one, [count]), own)
        for part in ("up", "memory", "diagnostics"):
            for name, tensor in getattr(alone, part).items():
                assert torch.allclose(getattr(end, part)[name][row : row + 1], tensor, rtol=0, atol=1e-13), (part, name)


def test_local_round_equals_a_plain_loop() -> None:
    module, net = module_and_net()
    x, y = examples()
    parts = list(zip(x.split(4), y.split(4), strict=True)) * 3
    batches = [Batch(a[None], b[None], torch.ones(1, len(b)).double()) for a, b in parts]
    end = local_round(
        FedAvg(), net, SGD.of(0.1, 0.9, 0.01, net.start), start_of(FedAvg(), net.start, [len(parts)]), batches
    )
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    total = seen = 0.0
    for a, b in parts:
        optimiser.zero_grad()
        loss = F.cross_entropy(module(a), b)
        loss.backward()
        optimiser.step()
        total, seen = total + float(loss.detach()) * len(b), seen + len(b)
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    assert torch.allclose(net.start + end.up["delta"], expected[None], rtol=0, atol=1e-13)
    assert float(end.loss) == pytest.approx(total / seen, abs=1e-13)


def end_of(delta: list[float], buffers: dict[str, Tensor] | None = None, **up: Tensor) -> LocalEnd:
    row = torch.tensor([delta], dtype=torch.float64)
    return LocalEnd({"delta": row, **up}, {}, buffers or {}, {}, torch.zeros(1, 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_healthy_leaves_out_what_is_not_finite(bad: float) -> None:
    ends = {
        0: end_of([1.0, 2.0]),
        3: end_of([1.0, bad]),
        5: end_of([1.0, 1.0], {"mean": torch.tensor([[bad]]), "count": torch.tensor([1])}),
        7: end_of([1.0, 1.0], variate=torch.tensor([[bad]])),
    }
    kept, lost = healthy(ends, lambda client: {"mean": torch.zeros(1, 1), "count": torch.tensor([0])})
    assert list(kept) == [0]
    assert {gone.client: gone.why for gone in lost} == {
        3: "not finite: delta",
        5: "not finite: mean",
        7: "not finite: variate",
    }


def test_healthy_looks_at_memory_too() -> None:
    """A memory that is not finite destroys that client for good: every later round starts from it."""
    end = LocalEnd({"delta": torch.zeros(1, 2)}, {"variate": torch.tensor([[float("nan")]])}, {}, {}, torch.zeros(1, 1))
    kept, lost = healthy({4: end}, lambda client: {})
    assert not kept
    assert lost[0].client == 4


def close(ends: dict[int, LocalEnd], algorithm: Algorithm | None = None) -> tuple[Tensor, dict[int, float]]:
    state = ServerState(torch.zeros(1, 2).double(), {}, {})
    sizes = {0: 10, 1: 30, 2: 60}
    server = Server({}, 3, 1.0, 0)
    new, share = close_round(algorithm or FedAvg(), state, server, ends, sizes, "average")
    return new.w, share


def test_clients_count_by_their_examples() -> None:
    ends = {0: end_of([10.0, 0.0]), 1: end_of([0.0, 10.0]), 2: end_of([1.0, 1.0])}
    w, share = close(ends)
    assert share == pytest.approx({0: 0.1, 1: 0.3, 2: 0.6})
    assert w.tolist()[0] == pytest.approx([1.6, 3.6])
    w, share = close({0: ends[0], 1: ends[1]})
    assert share == pytest.approx({0: 0.25, 1: 0.75})


def test_order_of_clients_does_not_matter() -> None:
    generator = random.Random(0)
    ends = {client: end_of([generator.random(), 1e10 * generator.random()]) for client in range(3)}
    first, _ = close(ends)
    for _ in range(6):
        keys = list(ends)
        generator.shuffle(keys)
        assert torch.equal(close({key: ends[key] for key in keys})[0], first)


def test_what_the_server_must_not_return_is_refused() -> None:
    class Wrong(FedAvg):
        def server_memory(self, w: Tensor) -> Any:
            return {"v": torch.zeros(3)}

        def aggregate(self, w: Tensor, up: Any, share: Tensor, server: Server) -> Any:
            return w, {"v": 1.0}

    with pytest.raises(ValueError, match="server_memory"):
        begin(replace(build(Experiment(split={"clients": 2})), algorithm=Wrong()))
    with pytest.raises(TypeError, match="aggregate"):
        close({0: end_of([1.0, 1.0])}, Wrong())


def test_a_model_of_another_shape_is_refused() -> None:
    """`aggregate` that forgets `keepdim` returns [P] instead of [1, P]."""

    class Flat(FedAvg):
        def aggregate(self, w: Tensor, up: Any, share: Tensor, server: Server) -> Any:
            return w[0] + (share * up["delta"]).sum(0), {}

    with pytest.raises((ValueError, TypeError)):
        close({0: end_of([1.0, 1.0])}, Flat())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("width", [1, 4, 9, 100])
def test_evaluate_in_chunks(norm: bool, width: int) -> None:
    module, net = module_and_net(norm)
    x, y = examples()
    before = torch.get_rng_state()
    score = evaluate(net, net.start, net.start_buffers, zip(x.split(width), y.split(width), strict=True))
    outputs = module.eval()(x)
    assert score.values["accuracy"] == pytest.approx(float((outputs.argmax(1) == y).double().mean()))
    assert score.loss == pytest.approx(float(F.cross_entropy(outputs, y).detach()), abs=1e-14)
    assert score.examples == 9
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluate_nothing() -> None:
    _, net = module_and_net()
    score = evaluate(net, net.start, {}, [])
    assert (math.isnan(score.loss), score.examples) == (True, 0)
    assert math.isnan(score.values["accuracy"])
