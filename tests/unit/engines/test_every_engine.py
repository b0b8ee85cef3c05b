"""Every engine takes the steps of `core.local.local_step`: the shared cases, against the engine `loop`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from step_cases import (
    BATCH,
    CASES,
    PERSONAL,
    RULES,
    StepCase,
    assert_as_reference,
    played_and_recorded,
    reference,
    thinned,
)

import fedgg.core.local
from fedgg.engines import Engine, Fused, Loop, Stacked, Streams, Workers

ENGINES: dict[str, Callable[[], Engine]] = {
    "fused": Fused,
    "stacked": lambda: Stacked("fp64"),
    "streams": lambda: Streams(lanes=3),
}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
ON_GPU = [*CASES, *PERSONAL] if torch.cuda.is_available() else CASES[:1]  # one to be skipped says as much as 416


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", thinned([*CASES, *PERSONAL], all_clients=False))
def test_an_engine_takes_the_reference_steps(case: StepCase, engine: str) -> None:
    assert_as_reference(case, *played_and_recorded(case.federation(), ENGINES[engine]()))


@GPU
@pytest.mark.parametrize("engine", ["loop", *ENGINES])
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_an_engine_takes_the_reference_steps_on_a_gpu(case: StepCase, engine: str) -> None:
    on_gpu = case.on("cuda")
    if engine == "loop":
        reference(on_gpu)
    else:
        assert_as_reference(on_gpu, *played_and_recorded(on_gpu.federation(), ENGINES[engine]()))


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2, notice=lambda sentence: pytest.fail(sentence)) as engine:
        yield engine


# `workers/test_workers.py` has the bits of `fused` for every algorithm with three of six clients: those cases are left
# out, and two of those with all clients are in the fast suite.
IN_WORKERS = [
    pytest.param(case, marks=pytest.mark.slow if case in CASES[2 : len(RULES)] else [], id=str(case))
    for case in [*CASES, *PERSONAL]
    if case.model is None and not case.name.endswith("three of six")
]


@pytest.mark.parametrize("case", IN_WORKERS)
def test_workers_take_the_reference_steps(case: StepCase, workers: Workers) -> None:
    assert_as_reference(case, *played_and_recorded(case.federation(), workers))


def test_the_loop_takes_no_other_step() -> None:
    """Every step of `loop` is one call of `local_step`, and nothing of `engines` but the loop itself is entered."""
    entered: list[tuple[str, str]] = []

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.append((frame.f_code.co_filename, frame.f_code.co_name))

    chosen = next(case for case in CASES if case.name == "fedgg, pooling")
    federation = chosen.federation()
    sys.setprofile(watch)
    try:
        played_and_recorded(federation, Loop(), rounds=1)
    finally:
        sys.setprofile(None)
    steps = sum(chosen.experiment.local.epochs * -(-count // BATCH) for count in federation.examples)
    assert entered.count((fedgg.core.local.__file__, "local_step")) == steps
    files = {file.replace("\\", "/").partition("/fedgg/engines/")[2] for file, _ in entered}
    assert files <= {"", "loop.py", "base.py"}
