"""What the numbers of a run are made with: torch's switches, set for the run and put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedgg.lab.config import Experiment

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.float32}


@contextmanager
def arithmetic(experiment: Experiment) -> Iterator[None]:
    """TF32 only where asked for, the same kernels each time unless told otherwise, as many threads as asked."""
    engine, matmul, cudnn = experiment.engine, torch.backends.cuda.matmul, torch.backends.cudnn
    threads, before = (
        torch.get_num_threads(),
        (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark),
    )
    coarse = engine.precision in ("tf32", "bf16")
    torch.set_num_threads(engine.threads_in_use)
    matmul.allow_tf32, cudnn.allow_tf32 = coarse, coarse
    cudnn.deterministic, cudnn.benchmark = engine.deterministic, not engine.deterministic
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
        torch.set_num_threads(threads)
