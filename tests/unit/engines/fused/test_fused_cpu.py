"""The fused step on a CPU takes the steps of `local_step`, in one piece or in many, for any sum of terms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedgg.algorithms import (
    MOON,
    SCAFFOLD,
    FedAvg,
    FedCM,
    FedCurv,
    FedGG,
    FedLESAM,
    FedProx,
    FedSAM,
    FedWMSAM,
    MoFedSAM,
)
from fedgg.core.algorithm import Algorithm, Batch, Client, Number, Server
from fedgg.core.local import LocalEnd, LocalStart, local_round, open_round
from fedgg.core.model import Net
from fedgg.core.optimisers import OPTIMISERS, SGD, Adam, Optimiser, with_kept_state
from fedgg.core.random_choices import torch_stream
from fedgg.core.tensor_rows import Rows, each_row
from fedgg.engines.fused import cpu_optimisers, cpu_step
from fedgg.engines.fused.cpu_step import fused_round
from fedgg.engines.fused.term_analysis import StepTerms, analyse_terms, check_later_terms
from fedgg.errors import UserError


@dataclass(frozen=True)
class Bends(Algorithm):
    """Its factor has no trace: it is asked for with tensors, step by step."""

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": torch.sin(client.inner("drift", "drift")) + client.step}


@dataclass(frozen=True)
class Starts(Algorithm):
    """The first step has no terms."""

    late: int = 0

    def terms(self, client: Client) -> dict[str, Number]:
        return {} if float(client.step) <= self.late else {"drift": 0.3}


@dataclass(frozen=True)
class LooksLate(Algorithm):
    """From the third step on it looks at the model itself."""

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": 0.1 if float(client.step) < 2 else client.w.norm()}


@dataclass(frozen=True)
class FlatLoss(Algorithm):
    """Its loss has one dimension."""

    def loss(self, w: Tensor, batch: Batch, client: Client) -> Tensor:
        return super().loss(w, batch, client)[:, 0]


@dataclass(frozen=True)
class Heavy(Algorithm):
    """The last step itself among the terms."""

    def terms(self, client: Client) -> dict[str, Number]:
        return {"step": -0.2}


@dataclass(frozen=True)
class Late(Algorithm):
    """An inner product that nobody asked for at first."""

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": client.inner("drift", "drift") if float(client.step) > 2 else 0.0}


@dataclass(frozen=True)
class Flat(Algorithm):
    """One number a client, and no more."""

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": 0.1 * client.lr[:, 0]}


@dataclass(frozen=True)
class PullsByLayer(Algorithm):
    """Factors from inner products by layer and of the model, in the gradient and in where it is taken."""

    def begin(self, w: Tensor, client: Client) -> Rows:
        return {**super().begin(w, client), "pole": torch.ones_like(w)}

    def terms(self, client: Client) -> dict[str, Number]:
        whole, of_layer = client.inner("drift", "drift"), client.inner("drift", "drift", by_layer=True)
        return {"drift": 0.2 * of_layer.sqrt() + whole, "pole": 0.01 * client.inner("pole", "pole", by_layer=True)}

    def displacement(self, client: Client) -> dict[str, Number]:
        return {"pole": 0.1 * client.inner("pole", "drift", by_layer=True)}


@dataclass(frozen=True)
class LargestLayer(Algorithm):
    """One factor for the model, from the layer that drifts most: it cannot be computed layer by layer."""

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": client.inner("drift", "drift", by_layer=True).amax(1, keepdim=True)}


@dataclass(frozen=True)
class Lost(Algorithm):
    """A vector that was never noted."""

    def terms(self, client: Client) -> dict[str, Number]:
        return {"compass": 0.5}


@dataclass(frozen=True)
class SendsLastMove(FedGG):
    """The end of a round reads the last step, which the terms of the steps do not need."""

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, memory = super().finish(w, client)
        return up | {"last_move": client.last_move, "last_step": client.vector("step")}, memory


@dataclass(frozen=True)
class OwnLoss(FedGG):
    """A loss of its own, which reads the model, the last step and an inner product, besides the terms."""

    def loss(self, w: Tensor, batch: Batch, client: Client) -> Tensor:
        along = ((w - client.w) + client.w * client.vector("step")).sum(1, keepdim=True)
        return super().loss(w, batch, client) * (1 + client.inner("drift", "drift")) + 0.3 * along


@dataclass(frozen=True)
class OwnLossTwice(OwnLoss):
    """The same with a second gradient."""

    def second_displacement(self, grad: Tensor, w: Tensor, client: Client) -> Tensor:
        return 0.2 * grad


@dataclass(frozen=True)
class FirstStepFixed(Algorithm):
    """Multiplies by a column that depends on the step."""

    def nudge(self, move: Tensor, w: Tensor, client: Client) -> Tensor:
        return move * (client.step != 0)


@dataclass(frozen=True)
class FirstStepHalved(Algorithm):
    """A condition on the step."""

    def nudge(self, move: Tensor, w: Tensor, client: Client) -> Tensor:
        return 0.5 * move if client.step == 0 else move


@dataclass(frozen=True)
class ChecksItsRows(Algorithm):
    """Looks at what it is given."""

    def nudge(self, move: Tensor, w: Tensor, client: Client) -> Tensor:
        assert isinstance(move, Tensor)
        return 0.5 * move


@dataclass(frozen=True)
class TwiceSometimes(FedLESAM):
    """A second gradient in every other step, which reads the last step."""

    def second_displacement(self, grad: Tensor, w: Tensor, client: Client) -> Tensor | None:
        if float(client.step) % 2:
            return None
        return 0.2 * grad + client.inner("step", "step") * client.inner("step", "drift") * torch.ones_like(w)


@dataclass(frozen=True)
class StepsByLayer(Algorithm):
    """Reads the last step by layer, which before the first one is zero, whatever velocity the client has kept."""

    def terms(self, client: Client) -> dict[str, Number]:
        return {"drift": 0.1 + client.inner("step", "step", by_layer=True)}

    def displacement(self, client: Client) -> dict[str, Number]:
        return {"anchor": 0.1 * client.inner("step", "step", by_layer=True)}


STEPS, BATCH, FEATURES, CLASSES = 5, 4, 6, 3
ALGORITHMS = [
    FedAvg(),
    FedProx(mu=0.3),
    SCAFFOLD(),
    FedGG(mu=2.0),
    FedGG(weight="fixed", lam=0.2, first_step="epsilon"),
    FedGG(mu=2.0, first_step="push"),
    FedGG(mu=2.0, scope="layer"),
    FedGG(mu=2.0, scope="layer", gradient="printed", first_step="push"),
    FedGG(weight="fixed", lam=0.2, first_step="epsilon", scope="layer"),
    FedGG(scope="layer", first_step="relative_push"),
    PullsByLayer(),
    LargestLayer(),
    SendsLastMove(mu=0.0, lam=0.0, weight="fixed"),
    SendsLastMove(mu=2.0, scope="layer"),
    Bends(),
    Starts(),
    Heavy(),
    FedCM(alpha=0.3),
    FedWMSAM(rho=0.2, alpha=0.4),
    FedLESAM(rho=0.3),
    FedSAM(rho=0.3),
    MoFedSAM(alpha=0.3, rho=0.2),
    SCAFFOLD(correction="after"),
    OwnLoss(mu=2.0),
    OwnLossTwice(),
    FirstStepFixed(),
    FirstStepHalved(),
    ChecksItsRows(),
    TwiceSometimes(rho=0.3),
    StepsByLayer(),
]


class TwoBiases(nn.Module):
    """Autograd gives both of them the same tensor as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, FEATURES))
        self.one, self.other = nn.Parameter(torch.randn(BATCH, CLASSES)), nn.Parameter(torch.randn(BATCH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x @ self.weight.t() + (self.one + self.other)
        return outputs


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def client(
    algorithm: Algorithm, make: type[nn.Module] | None = None, precision: torch.dtype = torch.float64
) -> tuple[Net, LocalStart, list[Batch]]:
    with torch_stream(3, "test"):
        net = Net((make or plain)().to(precision))
        w = net.start
        kept = {name: torch.randn_like(rows) for name, rows in algorithm.client_memory(w).items()}
        memory = {
            name: torch.randn_like(rows) if rows.shape == w.shape else rows
            for name, rows in algorithm.server_memory(w).items()
        }
        down = algorithm.send_down(w, Server(memory, clients=10, coverage=0.5, round=3))
        x, y = torch.randn(STEPS, 1, BATCH, FEATURES).to(precision), torch.randint(CLASSES, (STEPS, 1, BATCH))
    start = LocalStart(
        w=w,
        down=down,
        memory=kept,
        buffers={},
        examples=torch.full_like(w[:, :1], STEPS * BATCH),
        steps=torch.full_like(w[:, :1], STEPS),
        round=torch.full_like(w[:, :1], 3),
        dropout=[],
    )
    return net, start, [Batch(a, b, torch.ones(1, BATCH).to(precision)) for a, b in zip(x, y, strict=True)]


def assert_alike(one: LocalEnd, other: LocalEnd) -> None:
    for a, b in ((one.up, other.up), (one.memory, other.memory), (one.diagnostics, other.diagnostics)):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.allclose(a[name], b[name], rtol=1e-10, atol=1e-12), name
    assert torch.allclose(one.loss, other.loss, rtol=1e-12)


@pytest.mark.parametrize("piece", [7, 1 << 18])
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.0), (0.0, 0.0), (0.9, 0.01), (0.0, 0.01)])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_the_fused_step_is_the_reference_step(
    algorithm: Algorithm, momentum: float, decay: float, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_optimisers, "PIECE", piece)
    monkeypatch.setattr(cpu_optimisers, "SMALL", piece)
    net, start, batches = client(algorithm)
    sgd = SGD.of(0.1, momentum, decay, start.w)
    before = start.w.clone()
    assert_alike(fused_round(algorithm, net, sgd, start, batches), local_round(algorithm, net, sgd, start, batches))
    assert torch.equal(start.w, before)


def adam(name: str, like: Tensor, **settings: float) -> Optimiser:
    values = {"lr": 0.05, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": math.inf, **Adam.defaults, **settings}
    return OPTIMISERS[name].on_rows([values], like)


OTHER_OPTIMISERS: dict[str, Callable[[Tensor], Optimiser]] = {
    "clipped": lambda w: replace(
        SGD.of(0.1, 0.9, 0.01, w),
        clip_norm=torch.full_like(w[:, :1], 0.4),
        used=frozenset({"lr", "momentum", "weight_decay", "clip_norm"}),
    ),
    "adam": lambda w: adam("adam", w),
    "adam, decay, clipped": lambda w: adam("adam", w, weight_decay=0.01, clip_norm=0.4),
    "adamw": lambda w: adam("adamw", w, weight_decay=0.1, beta2=0.9),
    "adamw, clipped": lambda w: adam("adamw", w, weight_decay=0.1, clip_norm=0.4),
}


@pytest.mark.parametrize("piece", [7, 1 << 18])
@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("optimiser", list(OTHER_OPTIMISERS))
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_with_other_optimisers(
    algorithm: Algorithm, optimiser: str, kept: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where clients keep the optimiser's state, which must not change in place."""
    monkeypatch.setattr(cpu_optimisers, "PIECE", piece)
    monkeypatch.setattr(cpu_optimisers, "SMALL", piece)
    net, start, batches = client(algorithm)
    chosen = OTHER_OPTIMISERS[optimiser](start.w)
    if kept:
        state = {name: 0.1 + torch.rand_like(rows) for name, rows in chosen.start(start.w).items()}
        start = replace(start, memory=with_kept_state(start.memory, state), keeps_optimiser_state=True)
    before = {name: rows.clone() for name, rows in start.memory.items()}
    assert_alike(
        fused_round(algorithm, net, chosen, start, batches), local_round(algorithm, net, chosen, start, batches)
    )
    assert all(torch.equal(start.memory[name], rows) for name, rows in before.items())


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimiser", list(OTHER_OPTIMISERS))
def test_without_terms_other_optimisers_have_every_bit(optimiser: str, precision: torch.dtype) -> None:
    """Of the reference step, and of an algorithm at its neutral setting."""
    neutral = FedCM().neutral()
    assert neutral is not None
    updates = []
    for algorithm, train in ((FedAvg(), local_round), (FedAvg(), fused_round), (neutral, fused_round)):
        net, start, batches = client(neutral, precision=precision)
        updates.append(train(algorithm, net, OTHER_OPTIMISERS[optimiser](start.w), start, batches).up["delta"])
    assert torch.equal(updates[0], updates[1])
    assert torch.equal(updates[0], updates[2])


@pytest.mark.parametrize(
    ("algorithm", "optimiser", "fuses"),
    [
        *((FedGG(), name, True) for name in OTHER_OPTIMISERS),
        (FedCM(), "clipped", True),
        (FedWMSAM(), "clipped", True),
        (FedSAM(), "adamw", True),
        (SCAFFOLD(correction="after"), "clipped", False),  # its nudge adds a vector
        (FedCurv(), "clipped", False),  # factors by parameter
        (MOON(), "clipped", False),  # a loss of its own
    ],
    ids=str,
)
def test_which_steps_are_fused(
    algorithm: Algorithm, optimiser: str, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, start, _ = client(algorithm)
    monkeypatch.setattr(cpu_step, "local_round", lambda *arguments: "reference")
    monkeypatch.setattr(cpu_step, "fused_steps", lambda *arguments: ("fused", {}))
    monkeypatch.setattr(cpu_step, "end_round", lambda *arguments: "fused")
    assert fused_round(algorithm, net, OTHER_OPTIMISERS[optimiser](start.w), start, []) == (  # type: ignore[comparison-overlap]
        "fused" if fuses else "reference"
    )


@pytest.mark.parametrize(
    ("algorithm", "fuses"),
    [
        (FedGG(), True),
        (FedGG(scope="layer"), True),
        (PullsByLayer(), True),
        (SendsLastMove(), True),
        (LargestLayer(), False),
        (FedGG(scope="layer", first_step="relative_push"), False),  # its push is a row, not a number
    ],
    ids=str,
)
def test_which_terms_by_layer_are_fused(algorithm: Algorithm, fuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = list[StepTerms]()
    steps = cpu_step.fused_steps

    def recorded(*arguments: Any) -> Any:
        fused.extend(argument for argument in arguments if isinstance(argument, StepTerms))
        return steps(*arguments)

    monkeypatch.setattr(cpu_step, "fused_steps", recorded)
    net, start, batches = client(algorithm)
    fused_round(algorithm, net, SGD.of(0.1, 0.9, 0.0, start.w), start, batches)
    assert bool(fused) == fuses


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.0)], ids=str)
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.0), (0.0, 0.01), (0.9, 0.01)])
def test_without_terms_every_bit_is_the_same(algorithm: Algorithm, momentum: float, decay: float) -> None:
    """Momentum, gradient and weight decay are added in the same order."""
    net, start, batches = client(algorithm)
    sgd = SGD.of(0.1, momentum, decay, start.w)
    fused, plain_steps = (
        fused_round(algorithm, net, sgd, start, batches),
        local_round(algorithm, net, sgd, start, batches),
    )
    assert torch.equal(fused.up["delta"], plain_steps.up["delta"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_parameters_that_share_a_gradient(
    algorithm: Algorithm, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_optimisers, "SMALL", 0)
    net, start, batches = client(algorithm, TwoBiases)
    sgd = SGD.of(0.1, momentum, 0.0, start.w)
    assert_alike(fused_round(algorithm, net, sgd, start, batches), local_round(algorithm, net, sgd, start, batches))


def test_terms_that_come_late_are_named() -> None:
    algorithm = Starts(late=2)
    net, start, batches = client(algorithm)
    with pytest.raises(
        UserError, match=r"Starts\.terms\(\) returns drift in step 4 and nothing before: return the same"
    ):
        fused_round(algorithm, net, SGD.of(0.1, 0.9, 0.0, start.w), start, batches)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (Starts(late=1), r"Starts\.terms\(\) returns drift in step 3 and nothing before"),
        (Starts(late=50), r"Starts\.terms\(\) returns drift in step 100 and nothing before"),
        (LooksLate(), r"LooksLate\.terms\(\) uses the rows themselves in step 3 but not in the first two"),
    ],
    ids=str,
)
def test_engines_that_ask_once_look_ahead(algorithm: Algorithm, words: str) -> None:
    net, start, _ = client(algorithm)
    _, client_view = open_round(algorithm, net, SGD.of(0.1, 0.9, 0.0, start.w), start)
    wanted = analyse_terms(algorithm, client_view)
    assert wanted is not None
    with pytest.raises(UserError, match=words):
        check_later_terms(algorithm, client_view, wanted)


@pytest.mark.parametrize("algorithm", [FedGG(), FedProx(0.1), SCAFFOLD(), Heavy()], ids=str)
def test_looking_ahead_leaves_the_others_alone(algorithm: Algorithm) -> None:
    net, start, _ = client(algorithm)
    _, client_view = open_round(algorithm, net, SGD.of(0.1, 0.9, 0.0, start.w), start)
    wanted = analyse_terms(algorithm, client_view)
    if wanted is not None:
        check_later_terms(algorithm, client_view, wanted)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_loss_without_its_second_dimension_is_named(rows: int) -> None:
    net, start, batches = client(FlatLoss())
    same = torch.zeros(rows, dtype=torch.int64)
    start, batches = each_row(start, same), [each_row(batch, same) for batch in batches]
    words = rf"FlatLoss\.loss\(\) gives a tensor of shape \({rows},\) for {rows} rows?: make it \[K, 1\]"
    with pytest.raises(UserError, match=words):
        local_round(FlatLoss(), net, SGD.of(0.1, 0.9, 0.0, start.w), start, batches)


def test_a_late_look_at_the_rows_is_named() -> None:
    net, start, batches = client(LooksLate())
    with pytest.raises(UserError, match=r"LooksLate\.terms\(\) uses the rows themselves in step 3"):
        fused_round(LooksLate(), net, SGD.of(0.1, 0.9, 0.0, start.w), start, batches)


def test_inner_products_that_come_late_are_named() -> None:
    net, start, batches = client(Late())
    with pytest.raises(UserError, match=r"reads the inner product drift\.drift in a later step"):
        fused_round(Late(), net, SGD.of(0.1, 0.9, 0.0, start.w), start, batches)


def test_a_factor_without_its_second_dimension_is_named() -> None:
    net, start, batches = client(Flat())
    with pytest.raises(UserError, match=r"Flat\.terms\(\) gives 'drift' a factor of shape \(1,\): make it .* \[1, 1\]"):
        fused_round(Flat(), net, SGD.of(0.1, 0.9, 0.0, start.w), start, batches)


def test_a_vector_that_is_not_there_is_named() -> None:
    net, start, batches = client(Lost())
    with pytest.raises(UserError, match=r"there is no vector 'compass': begin\(\) noted anchor"):
        fused_round(Lost(), net, SGD.of(0.1, 0.9, 0.0, start.w), start, batches)
