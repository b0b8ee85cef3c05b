"""The fused step on a GPU takes clipped, displaced, second and scaled steps, also part by part beside a backward pass.

In float64, where no program has kernels, `test_every_engine.py` compares the same steps to ten digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import pytest
import torch
from step_cases import played
from torch import Tensor, nn

from fedgg.algorithms import SCAFFOLD, FedCM, FedWMSAM
from fedgg.core.algorithm import Algorithm, Client, Number
from fedgg.data.user_arrays import from_arrays
from fedgg.engines import Engine, Loop, Stacked, Streams
from fedgg.engines.fused.gpu_step import FusedStep
from fedgg.engines.fused.step_scale import step_scale
from fedgg.engines.layers import program as programs
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.one_round import begin
from fedgg.models import MODELS

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
SIDE, CLASSES = 16, 10
Case = tuple[str, tuple[tuple[str, Any], ...], float | None]  # an algorithm, its settings, and clip_norm
FEDAVG: Case = ("fedavg", (), None)
CASES: list[Case] = [
    ("fedavg", (), 0.3),
    ("fedgg", (("mu", 0.5),), 0.3),
    ("fedcm", (), None),
    ("fedlesam", (("rho", 1.0),), None),
    ("fedwmsam", (("rho", 0.5),), 0.3),
    ("mofedsam", (("rho", 0.5),), 0.3),
    ("fedcm", (), 0.3),
]


def resnet20() -> nn.Module:
    return MODELS["resnet20"]((3, SIDE, SIDE), CLASSES, width=8)


def narrowing() -> nn.Module:
    """Convolutions of small images and linear layers, three of which have thousands of weights."""
    before = [nn.Conv2d(3, 64, 3, 4, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    behind = [nn.Conv2d(64, 128, 3, padding=1), nn.GroupNorm(2, 128), nn.Flatten(), nn.Linear(512, 64), nn.ReLU()]
    return nn.Sequential(*before, *behind, nn.Linear(64, CLASSES))


def shifted() -> nn.Module:
    """The same with a layer of nine weights first: the others begin at no multiple of 16 bytes."""
    return nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), *cast("nn.Sequential", narrowing()))


def ended(
    case: Case, engine: Engine, precision: str, model: Callable[[], nn.Module] = resnet20
) -> tuple[Tensor, Tensor]:
    """The model after two rounds, and before them."""
    name, settings, clip_norm = case
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(96, 3, SIDE, SIDE, generator=generator), torch.randint(0, CLASSES, (96,), generator=generator)
    chosen = Experiment(
        algorithm={"name": name, **dict(settings)},
        split={"clients": 3, "scheme": "dirichlet", "beta": 0.5, "min_examples": 8},
        local={
            "epochs": 1,
            "batch": 16,
            "lr": 0.01,
            "weight_decay": 0.1,  # so large that it is seen beside the tolerance, also times FedCM's alpha
            "momentum": 0.0 if model is resnet20 else 0.9,
        },
        optimiser={} if clip_norm is None else {"clip_norm": clip_norm},
        engine={"precision": precision, "device": "cuda", "name": "loop"},
    )
    with arithmetic(chosen):
        dataset = from_arrays(x, y, x[:20], y[:20]).to(torch.device("cuda"))
        federation = build(chosen, data=dataset, model=model)
        return played(federation, engine, 2).server.w.double(), begin(federation).server.w.double()


@cache
def by_the_loop(case: Case) -> tuple[Tensor, Tensor]:
    return ended(case, Loop(), "fp64")


@pytest.fixture
def fused_steps(monkeypatch: pytest.MonkeyPatch) -> list[FusedStep | None]:
    """The fused steps that engines open, None for reference steps; rows have several spans."""
    opened: list[FusedStep | None] = []
    of = FusedStep.of

    def watched(*arguments: Any) -> FusedStep | None:
        opened.append(of(*arguments))
        return opened[-1]

    monkeypatch.setattr(FusedStep, "of", watched)
    monkeypatch.setattr(programs, "SPAN", 10_000)
    return opened


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, clip_norm {case[2]}")
def test_a_stack_ends_where_the_loop_does(case: Case, fused_steps: list[FusedStep | None]) -> None:
    exact, start = by_the_loop(case)
    stacked, _ = ended(case, Stacked("fp32"), "fp32")
    assert len(fused_steps) == 2
    assert all(
        step is not None and step.program is not None and len(step.program.spans(stepped=False)) > 2
        for step in fused_steps
    )
    gap, moved = float((stacked - exact).norm()), float((exact - start).norm())
    assert gap < 1e-5 * float(exact.norm())
    assert gap < 0.02 * moved
    assert float((by_the_loop(FEDAVG)[0] - exact).norm()) > 5 * gap  # what the case adds is seen
    if case in (CASES[0], CASES[5]):
        assert torch.equal(stacked, ended(case, Stacked("fp32"), "fp32")[0])  # to the bit


@needs_gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[5]], ids=lambda case: case[0])
def test_short_rows_follow_the_model_and_the_point(case: Case, fused_steps: list[FusedStep | None]) -> None:
    """In bf16, beside the reference step with the same layers."""
    fused, start = ended(case, Stacked("bf16"), "bf16")
    assert fused_steps
    assert None not in fused_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedStep, "of", lambda *_: None)
        reference, _ = ended(case, Stacked("bf16"), "bf16")
    assert float((fused - reference).norm()) < 0.1 * float((reference - start).norm())


WIDE_CASES: list[Case] = [("fedavg", (), None), ("fedgg", (("mu", 0.5),), None), ("scaffold", (), None)]


@needs_gpu
@pytest.mark.parametrize("model", [narrowing, shifted])
@pytest.mark.parametrize("case", WIDE_CASES, ids=lambda case: case[0])
def test_weights_are_stepped_by_the_kernel_of_their_gradient(
    case: Case, model: Callable[[], nn.Module], fused_steps: list[FusedStep | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where their gradients are written first, but for rounding."""
    from fedgg.kernels import weight_gradient_step

    monkeypatch.setattr(weight_gradient_step, "WEIGHTS", 1 << 12)
    ours, start = ended(case, Stacked("bf16"), "bf16", model)
    assert all(step and step.program and len(step.program.stepped) == 3 for step in fused_steps)
    assert torch.equal(ours, ended(case, Stacked("bf16"), "bf16", model)[0])  # to the bit
    monkeypatch.setattr(weight_gradient_step, "supports", lambda *_: False)
    fused_steps.clear()
    reference, _ = ended(case, Stacked("bf16"), "bf16", model)
    assert all(step and step.program and not step.program.stepped for step in fused_steps)
    assert float((ours - reference).norm()) < 0.05 * float((reference - start).norm())
    exact, _ = ended(case, Stacked("fp32"), "fp32", model)
    assert float((ours - exact).norm()) < 1.25 * float((reference - exact).norm())  # at most a quarter more rounding


@needs_gpu
def test_streams_clip_in_the_fused_step(fused_steps: list[FusedStep | None]) -> None:
    exact, _ = by_the_loop(CASES[0])
    streamed, _ = ended(CASES[0], Streams(), "fp32")
    assert None not in fused_steps
    assert float((streamed - exact).norm()) < 1e-5 * float(exact.norm())


# What `nudge` does, on any device -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Halves(Algorithm):
    share: Number = 0.5

    def nudge(self, move: Tensor, w: Tensor, client: Client) -> Tensor:
        return self.share * move * client.lr


@dataclass(frozen=True)
class Fades(Algorithm):
    """By the step's number: not the same in all steps."""

    def nudge(self, move: Tensor, w: Tensor, client: Client) -> Tensor:
        return move / (1 + client.step)


@dataclass(frozen=True)
class Turns(Algorithm):
    def nudge(self, move: Tensor, w: Tensor, client: Client) -> Tensor:
        return -move + w


def opened(algorithm: Algorithm) -> Client:
    column, row = torch.tensor([[0.2], [0.4]]), torch.ones(2, 5)
    names = ("steps", "effective_steps", "lr", "momentum", "examples", "round", "step")
    rest: dict[str, Any] = dict.fromkeys(names, column) | {
        "net": None,
        "probe": None,
        "down": {},
        "memory": {},
        "last_step": row,
        "sums": {},
        "w": row,
    }
    notes = {"anchor": row, "correction": row, "alpha": 2 * column}
    return Client(**rest, notes=notes)


@pytest.mark.parametrize(
    ("algorithm", "scale"),
    [
        (Algorithm(), 1.0),
        (SCAFFOLD(), 1.0),
        (SCAFFOLD(correction="after"), None),
        (FedCM(alpha=0.3), 0.3),
        (FedCM(alpha=torch.tensor([[0.3], [0.1]])), [0.3, 0.1]),
        (FedWMSAM(), [0.4, 0.8]),
        (Halves(), [0.1, 0.2]),
        (Fades(), None),
        (Turns(), None),
    ],
    ids=str,
)
def test_what_multiplies_a_step_is_known(algorithm: Algorithm, scale: Any) -> None:
    found = step_scale(algorithm, opened(algorithm))
    assert (found if found is None or isinstance(found, float) else found.flatten().tolist()) == (
        pytest.approx(scale) if scale is not None else None
    )
