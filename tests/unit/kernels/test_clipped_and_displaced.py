"""The kernels of clipped gradients and displaced rows against the optimiser and the sums they stand for.

They also run without a GPU, by Triton's interpreter: with TRITON_INTERPRET=1, where Triton is installed.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from fedgg import kernels

if not (torch.cuda.is_available() or (kernels.available() and os.environ.get("TRITON_INTERPRET") == "1")):
    pytest.skip("kernels need a GPU, or Triton's interpreter", allow_module_level=True)

from fedgg.core.optimisers import CLIP_EPSILON, SGD
from fedgg.kernels import clip_gradient, displaced_rows, optimiser_step
from fedgg.kernels.clip_gradient import Clipping
from fedgg.kernels.optimiser_step import DRIFT, FIRST_VECTOR, Pass, Shared

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's in the interpreter, for infinity
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHORT, LONG = 5000, 2 * optimiser_step.BLOCK * optimiser_step.PROGRAMS + 77  # one block and several to a program
CLIPS = (0.5, 3.0, 1e6, math.inf, 2.0, 2.0, 2.0)  # by row: two clipped, two not, and those with odd gradients
NAN, INFINITE, ZERO = 4, 5, 6  # rows with such gradients
ROWS = len(CLIPS)


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype).to(DEVICE)


def vectors(length: int, dtype: torch.dtype) -> tuple[Shared, list[Shared]]:
    """An anchor and two vectors, of which several rows read the same."""
    shared = []
    for _ in range(3):
        rows = drawn(ROWS, length, dtype=dtype)
        rows[1] = rows[3] = rows[0]
        shared.append(Shared(rows, optimiser_step.leads(rows, [0, 0, 1, 0, 1, 1, 1])))
    return shared[0], shared[1:]


Spans = tuple[optimiser_step.Span, ...]
SIZES: dict[str, tuple[int, torch.dtype, Spans]] = {
    "whole": (SHORT, torch.float64, ()),
    "spans": (SHORT, torch.float32, ((0, 2100), (2100, 4999), (4999, SHORT))),
    "long": (LONG, torch.float32, ((0, 100_000), (100_000, LONG))),
}
TERMS = {"none": (False, False, False), "drift and second": (True, False, True), "drift and first": (True, True, False)}


@pytest.mark.parametrize(
    ("size", "terms", "momentum"),
    [(size, terms, 0.0 if terms == "none" else 0.9) for size in ("whole", "spans") for terms in TERMS]
    + [("long", "drift and second", 0.0)],
)
def test_a_clipped_step(size: str, terms: str, momentum: float) -> None:
    (length, dtype, spans), with_terms = SIZES[size], TERMS[terms]
    torch.manual_seed(0)
    settings = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.01}
    w, grad, velocity = (drawn(ROWS, length, dtype=dtype) for _ in range(3))
    sgd = SGD.on_rows([settings | {"clip_norm": clip} for clip in CLIPS], w)
    grad[NAN, 3], grad[INFINITE, 7], grad[ZERO] = math.nan, math.inf, 0.0
    at_work = torch.ones(ROWS, 1, dtype=torch.bool, device=DEVICE)
    at_work[1] = False
    anchor, notes = vectors(length, dtype)
    factors = torch.rand(ROWS, 3, dtype=dtype).to(DEVICE)
    total = grad.clone()
    for number, vector in enumerate((w - anchor.rows, *(note.rows for note in notes))):
        total += factors[:, number : number + 1] * vector if with_terms[number] else 0
    move, state = sgd.move(sgd.clipped(total), w, {"velocity": velocity})
    expected_w, expected_velocity = (
        torch.where(at_work, new, old) for new, old in ((w + move, w), (state["velocity"], velocity))
    )

    blocks = clip_gradient.blocks(length, spans)
    parts = w.new_full((ROWS, blocks + 5), 9.0)[:, :blocks]  # engines pad long rows
    clipping = Clipping(sgd.clip_norm, parts, torch.full_like(sgd.clip_norm, 9.0), spans)
    sums = torch.zeros(ROWS, 1, optimiser_step.blocks(length), dtype=dtype, device=DEVICE)
    step = Pass(
        w, velocity, anchor, notes, factors, list(with_terms), sgd.lr, sgd.momentum if momentum else None,
        sgd.weight_decay, at_work, sums, ((DRIFT, FIRST_VECTOR),), clip=clipping.factor,
    )  # fmt: skip
    for span in reversed(range(len(spans) or 1)):
        clip_gradient.sum_squares(step, grad, clipping, span)
    clip_gradient.set_factors(clipping, CLIP_EPSILON)
    found = clipping.factor.clone()
    optimiser_step.advance(step, grad)

    close = 1e-12 if dtype == torch.float64 else 1e-5
    wanted = (sgd.clip_norm / (total.double().norm(dim=1, keepdim=True) + CLIP_EPSILON)).clamp_max(1.0)
    torch.testing.assert_close(found[at_work].double(), wanted[at_work], rtol=0.1 * close, atol=0, equal_nan=True)
    assert (wanted[[0, 2, 3]] < 1).flatten().tolist() == [True, False, False]
    torch.testing.assert_close(w, expected_w, rtol=close, atol=close, equal_nan=True)
    if momentum:
        torch.testing.assert_close(velocity, expected_velocity, rtol=close, atol=close, equal_nan=True)
    drift = (w - anchor.rows).double()
    inner = torch.where(at_work, (drift * notes[0].rows).sum(1, keepdim=True), 0).flatten()
    torch.testing.assert_close(sums.sum((1, 2)).double(), inner, rtol=1e3 * close, atol=1e4 * close, equal_nan=True)


def test_lengths_have_the_same_bits_again() -> None:
    torch.manual_seed(1)
    w, grad = (drawn(3, LONG, dtype=torch.float32) for _ in range(2))
    column = torch.ones(3, 1, device=DEVICE)
    step = Pass(w, w, None, [], column, [False] * 3, column, None, None, column.bool(), w.new_zeros(3, 0, 1), ())
    found = set()
    for _ in range(5):
        clipping = Clipping(column, w.new_empty(3, clip_gradient.blocks(LONG)), torch.empty_like(column), ())
        clip_gradient.sum_squares(step, grad, clipping)
        clip_gradient.set_factors(clipping, CLIP_EPSILON)
        found.add(tuple(clipping.factor.flatten().tolist()))
    assert len(found) == 1


@pytest.mark.parametrize("terms", [(True, 0), (False, 1), (True, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_displaced_rows(dtype: torch.dtype, terms: tuple[bool, int]) -> None:
    torch.manual_seed(2)
    drift, count = terms
    w, (anchor, notes) = drawn(ROWS, SHORT, dtype=dtype), vectors(SHORT, dtype)
    factors = torch.rand(ROWS, 3, dtype=dtype).to(DEVICE)
    expected = w + sum((factors[:, n + 1 : n + 2] * notes[n].rows for n in range(count)), torch.zeros_like(w))
    expected += factors[:, :1] * (w - anchor.rows) if drift else 0
    for short in (None, torch.empty(ROWS, SHORT, dtype=torch.bfloat16, device=DEVICE)):
        point = torch.empty(ROWS, SHORT + 24, dtype=dtype, device=DEVICE)[:, :SHORT]
        displaced_rows.displace(w, anchor if drift else None, notes[:count], factors, point, short)
        torch.testing.assert_close(point, expected)
        if short is not None and dtype == torch.float32:  # the interpreter truncates, and has no cast from float64
            torch.testing.assert_close(short.float(), point, rtol=0.01, atol=0)
