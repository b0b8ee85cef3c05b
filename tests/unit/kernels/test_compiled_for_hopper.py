"""Kernels compiled for Hopper (compute capability 9.0), which needs Triton and no GPU: `pip install triton==3.6.0`.

A product whose left operand is in registers must have ended before the next turn of its loop: Triton 3.6 overwrites
these registers without waiting for asynchronous products that still read them (triton-lang/triton issue 9433), so that
sums can be wrong and differ from run to run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="compiling kernels needs Triton: pip install triton==3.6.0")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from fedgg.kernels import (  # noqa: E402
    convolution,
    dense,
    narrow_convolution,
    optimiser_step,
    row_convolution,
    row_convolution_by_copies,
    weight_gradient_step,
)
from fedgg.kernels.optimiser_step import Pass, Shared  # noqa: E402
from fedgg.kernels.row_convolution import Geometry  # noqa: E402

ROWS, BATCH = 10, 50
NO_DEVICE = 1000  # no GPU has this number, so that its kernels are not taken for those compiled here
MOST_SHARED = 227 << 10  # bytes of shared memory that a program may have on Hopper
MMA = re.compile(r"ttng\.warp_group_dot %.* : (?P<left>tensor|!ttg\.memdesc)<")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that are launched meanwhile: they are compiled for an H100 or H200 and not run."""
    hopper = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: NO_DEVICE,
        get_current_stream=lambda _: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        map_python_to_cpp_type=str,
        launcher_cls=None,
    )
    kernels: list[Any] = []
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(launch(self, *arguments, grid=grid, warmup=True, **options))
        return kernels[-1]

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", hopper)
    return kernels


def type_of(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


def images(side: int, channels: int, precision: str = "bf16", rows: int = ROWS) -> Tensor:
    return torch.empty(rows, BATCH, side, side, channels, dtype=type_of(precision))


def dense_layer(precision: str, rows: int) -> None:
    x, bias = torch.empty(rows, BATCH, 192, dtype=type_of(precision)), torch.empty(rows, 512)
    dense.forward(x, torch.empty(rows, 512, 192), bias, True, precision)


def convolution_and_pool(precision: str) -> None:
    shape = convolution.Shape(6, 14, 14, 16, 5)
    x = torch.empty(ROWS, BATCH, 14, 14, convolution.lanes(6), dtype=type_of(precision))
    kernels = convolution.spread(torch.empty(ROWS, 16, 6, 5, 5), shape, x.dtype)
    y, winner = convolution.forward(x, kernels, torch.empty(ROWS, 16), shape, precision)
    into_w, into_bias = torch.empty(ROWS, 16, 6, 5, 5), torch.empty(ROWS, 16)
    convolution.weight_gradient(x, y, winner, shape, precision, into_w, into_bias)
    convolution.input_gradient(y, winner, kernels, shape, BATCH, precision)


def row_convolution_of(channels: int, outputs: int, side: int, stride: int, precision: str) -> None:
    geometry = Geometry((3, 3), (stride, stride), (1, 1))
    w = torch.empty(ROWS, outputs, 3, 3, channels, dtype=type_of(precision))
    x = images(side, channels, precision)
    y = row_convolution.forward(x, w, torch.empty(ROWS, outputs), geometry, True, precision)
    row_convolution.input_gradient(y, w, side, side, geometry, precision)
    row_convolution.weight_gradient(x, y, torch.empty(w.shape), geometry, precision)


def convolution_by_copies(channels: int, outputs: int, side: int, kernel: int, rows: int) -> None:
    geometry = Geometry((kernel, kernel), (1, 1), (kernel // 2, kernel // 2))
    x, grad = images(side, channels, rows=rows), images(side, outputs, rows=rows)
    w = torch.empty(rows, outputs, kernel, kernel, channels, dtype=torch.bfloat16)
    row_convolution_by_copies.forward(x, w, torch.empty(rows, outputs), geometry, True)
    row_convolution_by_copies.input_gradient(grad, w, side, side, geometry)
    row_convolution_by_copies.weight_gradient(x, grad, torch.empty(w.shape), geometry)


def first_convolution(precision: str) -> None:
    geometry = Geometry((7, 7), (2, 2), (3, 3))
    x = images(32, 4, precision)  # as `packed` has them
    w = torch.empty(ROWS, 64, 7, 7, 3, dtype=x.dtype)
    y = narrow_convolution.forward(x, w, None, geometry, False, precision)
    narrow_convolution.weight_gradient(x, y, torch.empty(w.shape), geometry, precision)


def step_of(length: int, vectors: int, blocks: int, **more: Any) -> Pass:
    shared = Shared(torch.empty(ROWS, length), torch.zeros(ROWS, dtype=torch.int64))
    return Pass(
        w=torch.empty(ROWS, length),
        velocity=torch.empty(ROWS, length),
        anchor=shared if vectors else None,
        vectors=[shared] * vectors,
        factors=torch.empty(ROWS, 3),
        has_factor=[bool(vectors), bool(vectors), False],
        at_work=torch.ones(ROWS, 1, dtype=torch.bool),
        parts=torch.empty(ROWS, 2, blocks),
        pairs=((1, 1), (0, 2)) if vectors else ((1, 1), (1, 1)),
        lr=torch.empty(ROWS, 1),
        momentum=torch.empty(ROWS, 1),
        decay=torch.empty(ROWS, 1),
        **more,
    )


def step_of_a_convolution(channels: int, outputs: int, side: int, vectors: int) -> None:
    blocks = weight_gradient_step.blocks(outputs, 9 * channels, channels)
    length = 9 * channels * outputs
    step = step_of(length, vectors, blocks, short=torch.empty(ROWS, length, dtype=torch.bfloat16))
    geometry = Geometry((3, 3), (1, 1), (1, 1))
    weight_gradient_step.advance(step, images(side, channels), images(side, outputs), geometry, 0, 0)


def step_of_a_wide_layer(precision: str) -> None:
    wide, length = 3072 * 512, 3072 * 512 + 512
    x, back = (torch.empty(ROWS, BATCH, size, dtype=type_of(precision)) for size in (3072, 512))
    step = step_of(length, 1, optimiser_step.blocks(length, wide))
    optimiser_step.advance(step, torch.empty(ROWS, length), optimiser_step.Wide(x, back, precision))


CASES: dict[str, Callable[[], None]] = {
    **{
        f"dense {precision}, {rows} rows": partial(dense_layer, precision, rows)
        for precision in ("bf16", "tf32", "tf32x3")
        for rows in (10, 128)
    },
    **{f"wide step {precision}": partial(step_of_a_wide_layer, precision) for precision in ("bf16", "tf32")},
    **{f"pooled {precision}": partial(convolution_and_pool, precision) for precision in ("bf16", "tf32", "tf32x3")},
    **{f"first {precision}": partial(first_convolution, precision) for precision in ("bf16", "tf32", "tf32x3")},
    **{
        f"rows {sizes} {precision}": partial(row_convolution_of, *sizes, precision)
        for sizes in ((64, 128, 8, 2), (20, 10, 9, 1), (256, 256, 7, 1))
        for precision in ("bf16", "tf32", "tf32x3")
    },
    **{
        f"copies {sizes}": partial(convolution_by_copies, *sizes)
        for sizes in (
            *((64, 64, 32, 3, 10), (128, 128, 4, 3, 10), (512, 512, 1, 3, 10), (16, 16, 8, 3, 10)),
            *((64, 128, 8, 1, 10), (256, 256, 2, 3, 60), (256, 128, 8, 3, 60)),
        )
    },
    **{
        f"step {sizes} {vectors}": partial(step_of_a_convolution, *sizes, vectors)
        for sizes in ((256, 256, 2), (128, 256, 1), (64, 512, 1))
        for vectors in (0, 1)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_no_product_is_pending_that_reads_registers(case: str, compiled: list[Any]) -> None:
    CASES[case]()
    assert compiled
    for kernel in compiled:
        code = kernel.asm["ttgir"]
        reads_registers = any(product["left"] == "tensor" for product in MMA.finditer(code))
        pending = {int(number) for number in re.findall(r"pendings = (\d+)", code)}
        assert not (reads_registers and pending - {0}), f"{kernel.metadata.name}: {sorted(pending)} products pending"
        assert kernel.metadata.shared <= MOST_SHARED
